"""Holds one package for each operator: a reference in plain PyTorch, and implementations
for GPUs.
"""
