"""Offers other packages' kernels as implementations of tnp's operators, to compare ours with.

An entry point in pyproject.toml registers each. An extra of the same name pins its package, which
is imported on the first call. All leave their inputs unchanged: a package that writes into its
inputs gets copies, whose time counts.
"""
