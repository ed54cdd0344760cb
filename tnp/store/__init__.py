"""Keeps recorded rows: schemas, files, and the database that is built from them."""

from tnp import _moved

__getattr__ = _moved.names_of(__name__)
