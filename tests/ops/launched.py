"""Records the tensors that kernels are launched on, for tests that nothing was copied."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tnp.dispatch.launcher import Bound


@contextmanager
def recorded() -> Iterator[list[tuple]]:
    """Records the arguments of every launch inside of the context."""
    seen: list[tuple] = []
    real = Bound.__call__

    def noted(self, *arguments):
        seen.append(arguments)
        return real(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bound, "__call__", noted)
        yield seen


def reads(launch: tuple, *tensors: torch.Tensor) -> bool:
    """Whether each tensor's own memory was handed over, not a copy's."""
    addresses = {x.data_ptr() for x in launch if isinstance(x, torch.Tensor)}
    return all(x.data_ptr() in addresses for x in tensors)
