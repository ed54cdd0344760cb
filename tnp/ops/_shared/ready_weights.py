"""Names weights that kernels for a few rows may read before they wait: see `few_rows`.

A model says so, and kernels ask. A model runs without Triton too, so nothing here imports it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

_READY: ContextVar[frozenset[int]] = ContextVar("addresses of weights that are ready")


@contextmanager
def weights_ready(weights: Iterable[Tensor]) -> Iterator[None]:
    """Lets products of a few rows read these weights before their kernels wait.

    No launch inside may write one of them, nor may the launch right before the first product. Other
    weights are read after the wait, casts and copies among them that a call makes.
    """
    kept = list(weights)  # no other tensor gets their addresses
    token = _READY.set(frozenset(weight.data_ptr() for weight in kept))
    try:
        yield
    finally:
        _READY.reset(token)


def is_ready(weight: Tensor) -> bool:
    """Returns whether the weight is one of those of `weights_ready`."""
    return weight.data_ptr() in _READY.get(())
