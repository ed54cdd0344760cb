"""CUDA graphs for tests without a GPU."""

import torch

from tnp.cuda_graphs import Captures


class Replays(Captures):
    """A "graph" does the work again: what a graph would do, on any device."""

    captured = 0

    def __init__(self):
        super().__init__(torch.device("cpu"))

    def run(self, work):
        return work()

    def capture(self, work):
        self.captured += 1
        written = _Written()

        def replay():
            result = work()
            if result is not None:
                written.clone = result.clone

        return replay, written


class _Written:
    """What the last replay wrote; nobody reads more of it than a copy."""
