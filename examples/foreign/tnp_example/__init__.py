"""Implementations of tnp's SwiGLU, and operator `scale`."""
