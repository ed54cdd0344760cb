"""Trains models: one step, a loop around it, and the recorded runs."""

from tnp import _moved
from tnp.util.lazy import offers

_offered, __dir__, __all__ = offers(
    __name__, {"tnp.train.loop": ("fit",), "tnp.train.step": ("TrainingStep",)}
)
__getattr__ = _moved.names_of(__name__, _offered)
