"""Training: one step, a loop around it, and the runs that are recorded."""

from tnp.util.lazy import offers

__getattr__, __dir__, __all__ = offers(
    __name__, {"tnp.train.loop": ("fit",), "tnp.train.step": ("TrainingStep",)}
)
