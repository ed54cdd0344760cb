"""Measures time, memory and energy, each job in its own process. Holds no model code."""

from tnp.util.lazy import offers

__getattr__, __dir__, __all__ = offers(
    __name__, {"tnp.bench.comparison": ("Comparison", "compare")}
)
