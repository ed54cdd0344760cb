"""Transformer Neural Processes, the kernels that make them fast, and the proof of both."""
