"""Measures things: timing, memory, provenance, isolation. No model code."""
