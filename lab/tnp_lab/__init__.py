"""Holds kernels in CUDA C++ to learn from, behind operators of `tnp`. See README.md."""
