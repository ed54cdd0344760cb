"""Finds the fastest kernels and implementations on a GPU, and their costs."""

from tnp import _moved

__getattr__ = _moved.names_of(__name__)
