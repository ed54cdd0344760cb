"""Holds demos of CuTe that run on a CPU: `python -m tnp_lab.demos`."""
