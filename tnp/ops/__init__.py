"""Holds one package for each operator: a reference in PyTorch, and implementations for GPUs."""
