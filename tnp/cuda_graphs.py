"""Work captured as CUDA graphs, on one stream and with one memory pool for all of them."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TypeVar

import torch

Result = TypeVar("Result")


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Without Python's garbage collector, in all threads: a graph that it frees makes a capture
    void. `torch.cuda.graph` collects before a capture and may be interrupted in it all the same.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Captures:
    """Runs work on a stream beside the current one of `device`, and captures it there.

    The graphs share their memory. That is right where they follow one another on one stream, and
    what one wrote is read before the next one is replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = None

    def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work`, which is run and not captured."""
        with self._apart():
            return work()

    @_nothing_collected()
    def capture(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """A replay of `work`, and what it writes to; `work` must not wait for the device."""
        captured = None
        # Spare memory is not given back in a capture. Outside of `except`, because an error keeps
        # all that the failed work has made.
        with suppress(torch.cuda.OutOfMemoryError):
            captured = self._captured(work)
        if captured is None:
            gc.collect()
            torch.cuda.empty_cache()
            captured = self._captured(work)
        graph, result = captured

        def replay() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return replay, result

    def _captured(self, work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """A graph of `work`, and what it writes to.

        Not by `torch.cuda.graph`, which gives back all of the allocator's spare memory first.
        """
        with self._apart():
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(self._pool)
            try:
                result = work()
            except BaseException:
                with suppress(RuntimeError):  # of a capture that the error has made void
                    graph.capture_end()
                raise
            graph.capture_end()
        self._pool = graph.pool()
        return graph, result

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """On the stream, which waits for the current one, and is waited for."""
        with torch.cuda.device(self._device):  # streams are the current device's
            stream, current = _stream(self._device), torch.cuda.current_stream()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                current.wait_stream(stream)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """One for all work of a device: for each stream that it meets cuBLAS keeps memory for ever."""
    return torch.cuda.Stream(device)
