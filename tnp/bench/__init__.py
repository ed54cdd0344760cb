"""Measures time, memory and energy, each job in its own process. Holds no model code."""
