"""Fails like a package whose library is missing."""

raise OSError("libfast.so: cannot open shared object file")
