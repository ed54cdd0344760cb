"""Work captured as CUDA graphs, on one stream and with one memory pool for all of them."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

Result = TypeVar("Result")


class Captures:
    """Runs work on a stream of `device` that is its own, and captures it there.

    The graphs share their memory. That is right where they follow one another on one stream, and
    what one wrote is read before the next one is replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = self._pool = None

    def run(self, work: Callable[[], Result]) -> Result:
        """`work`, eagerly."""
        with self._apart():
            return work()

    def capture(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """A replay of `work`, and what it writes to; `work` must not wait for the device."""
        try:
            graph, result = self._captured(work)
        except torch.cuda.OutOfMemoryError:  # spare memory is not given back in a capture
            torch.cuda.empty_cache()
            graph, result = self._captured(work)

        def replay() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return replay, result

    def _captured(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Not by `torch.cuda.graph`, which gives back all of the allocator's spare memory first."""
        with self._apart():
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(self._pool)
            try:
                result = work()
            finally:
                graph.capture_end()
        self._pool = graph.pool()
        return graph, result

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """On the stream, which waits for the current one, and is waited for."""
        with torch.cuda.device(self._device):  # streams are the current device's
            if self._stream is None:
                self._stream = torch.cuda.Stream(self._device)
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                yield
            current.wait_stream(self._stream)
