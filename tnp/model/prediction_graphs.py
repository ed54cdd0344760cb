"""Captures predictions from one encoding as CUDA graphs, one for each number of targets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import nn

from tnp.cuda_graphs import Captures, GraphCache
from tnp.ops._shared.casting import WeightCasts

# The most graphs that an encoding keeps. Other numbers of targets are predicted without a graph.
MOST_GRAPHS = 64

log = logging.getLogger("tnp.predict")

Decode = Callable[[torch.Tensor], torch.Tensor]


class DecodeGraphs:
    """Decodes targets, at first eagerly and then by replaying the graph of their size.

    Weights are cast only once. Uncast weights stay in memory as long as the graphs. Predictions
    must follow one another on one stream.

    Args:
        weights: the model's parameters.
        captures: makes the graphs, on the device of the parameters.
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
            decode: the same function in all calls, because only the first two calls of a size run
                it. It must not wait for the device.
            x_target: [B, N, d_x].
        """

        def static_targets() -> torch.Tensor:
            with torch.inference_mode(False):  # inference tensors could not be written to later
                return torch.empty_like(x_target, memory_format=torch.contiguous_format)

        one = self._graphs.get(x_target.shape, static_targets)
        if one is None:
            return decode(x_target)
        if one.has_run and one.replay is None:
            with self._casts.step():  # casts the weights before the capture
                self._graphs.capture(one, partial(decode, one.inputs))
            one.kept = self._casts.copies()
        one.inputs.copy_(x_target)
        if one.replay is None:
            # Eager calls read the static targets too: a plan's key holds their alignment, and no
            # plan may be missing in the capture.
            with self._graphs.eager(one), self._casts.step():
                return decode(one.inputs)
        one.replay()
        return one.result.clone()

    def replay(self, size: torch.Size) -> Callable[[], None]:
        """Returns the function that replays the graph for targets of `size`, without any copy."""
        return self._graphs.replay(size)
