"""Transformer Neural Processes, the kernels that make them fast, and the experiment that proves it."""
