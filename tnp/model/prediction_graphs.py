"""Captures predictions from one encoding as CUDA graphs, one for each number of targets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from tnp.cuda_graphs import Captures, GraphCache
from tnp.ops._shared.casting import WeightCasts

# Graphs kept at most of an encoding; targets of further sizes are predicted without one.
MOST_GRAPHS = 64

log = logging.getLogger("tnp.predict")

Decode = Callable[[torch.Tensor], torch.Tensor]


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
        self._graphs: GraphCache[torch.Tensor] = GraphCache(
            captures, MOST_GRAPHS, log, "%d numbers of targets were met: others run no graph"
        )

    def __call__(self, decode: Decode, x_target: torch.Tensor) -> torch.Tensor:
        """Returns `decode(x_target)`, a tensor of its own.

        Args:
            decode: the same in all calls, since only the first two of a size run it. It must not
                wait for the device.
            x_target: [B, N, d_x].
        """

        def static_targets() -> torch.Tensor:
            with torch.inference_mode(False):  # or nothing else could be copied to them
                return torch.empty_like(x_target, memory_format=torch.contiguous_format)

        one = self._graphs.get(x_target.shape, static_targets)
        if one is None:
            return decode(x_target)
        if one.has_run and one.replay is None:
            with self._casts.step():  # which casts the weights ahead of the capture
                self._graphs.capture(one, partial(decode, one.inputs))
            one.kept = self._casts.copies()
        one.inputs.copy_(x_target)
        if one.replay is None:
            # Eager calls read the static targets too: their address is a part of what plans are
            # found by, and no plan may be missing in the capture.
            with self._graphs.eager(one), self._casts.step():
                return decode(one.inputs)
        one.replay()
        return one.result.clone()

    def replay(self, size: torch.Size) -> Callable[[], None]:
        """Returns what replays the graph of targets of `size`, without any copy."""
        return self._graphs.replay(size)
