"""Operators: each with a plain-PyTorch reference and the implementations that run on a GPU."""
