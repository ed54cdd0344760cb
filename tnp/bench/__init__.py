"""How things are measured: timing, memory, provenance, isolation. No model code."""
