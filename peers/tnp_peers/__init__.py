"""Other packages' kernels as implementations of tnp's operators, to time ours against.

Each is registered by an entry point in pyproject.toml; an extra of its name pins its package, which
is imported when it is called. All keep to the contract: they leave their inputs as they are. Where
a package writes into what it is given, it is given a copy, whose time is part of using it.
"""
