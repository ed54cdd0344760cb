"""Holds attention in portable Triton, for every GPU from compute capability 8.0."""
