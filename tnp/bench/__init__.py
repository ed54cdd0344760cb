"""Measures time, memory and energy, each job in a process of its own. Holds no model code."""
