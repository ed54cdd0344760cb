"""Chooses and launches the implementation of an operator's call."""

from tnp import _moved

__getattr__ = _moved.names_of(__name__)
