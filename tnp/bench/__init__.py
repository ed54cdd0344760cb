"""How things are measured: timing, memory, provenance, rooflines, isolation. No model code."""
