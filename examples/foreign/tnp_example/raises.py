"""As a package whose library is not there."""

raise OSError("libfast.so: cannot open shared object file")
