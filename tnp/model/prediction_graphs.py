"""Predictions from one encoding as CUDA graphs: one for each size of targets, in one pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from tnp.cuda_graphs import Captures
from tnp.ops._shared.casting import WeightCasts

# Graphs kept at most of an encoding; targets of further sizes are predicted without one.
MOST_GRAPHS = 64

log = logging.getLogger("tnp.predict")

Decode = Callable[[torch.Tensor], torch.Tensor]


@dataclass
class _OfOneSize:
    x_target: torch.Tensor  # static: what the graph reads
    replay: Callable[[], None] | None = None
    parameters: torch.Tensor | None = None  # static: what the graph writes
    weights: list[torch.Tensor] | None = None  # that it reads: it knows addresses alone


class DecodeGraphs:
    """Runs what targets go through eagerly at first, and then by replaying the graph of their size.

    Weights are cast once and not at every prediction. Those that are read as they are stay in
    memory, whatever becomes of the model. Predictions must follow one another on one stream.

    Args:
        weights: the model's parameters.
        captures: of the device where they lie.
    """

    def __init__(self, weights: Iterable[nn.Parameter], captures: Captures) -> None:
        parameters = list(weights)
        self._casts = WeightCasts(parameters)
        self._uncast = [parameter.detach() for parameter in parameters]
        self._by_size: dict[torch.Size, _OfOneSize] = {}
        self._captures, self._full = captures, False

    def __call__(self, decode: Decode, x_target: torch.Tensor) -> torch.Tensor:
        """`decode` of x_target [B, N, d_x], a tensor of its own; it must not wait for the device.

        It is the same of all calls, since only the first two of a size run it.
        """
        one = self._by_size.get(x_target.shape)
        if one is None:
            if len(self._by_size) == MOST_GRAPHS:
                if not self._full:
                    log.warning("%d numbers of targets were met: others run no graph", MOST_GRAPHS)
                self._full = True
                return decode(x_target)
            # Eager calls read the static targets too: their address is a part of what plans are
            # found by, and no plan may be missing in the capture.
            with torch.inference_mode(False):  # or nothing else could be copied to them
                one = _OfOneSize(torch.empty_like(x_target, memory_format=torch.contiguous_format))
            one.x_target.copy_(x_target)
            with self._casts.step():
                parameters = decode(one.x_target)
            self._by_size[x_target.shape] = one
            return parameters
        if one.replay is None:
            with self._casts.step():  # which casts the weights ahead of the capture
                run = partial(decode, one.x_target)
                one.replay, one.parameters = self._captures.capture(run)
            one.weights = self._casts.copies()
        one.x_target.copy_(x_target)
        one.replay()
        return one.parameters.clone()

    def replay(self, size: torch.Size) -> Callable[[], None]:
        """What replays the graph of targets of `size`, which must have been captured: no copies."""
        return self._by_size[size].replay
