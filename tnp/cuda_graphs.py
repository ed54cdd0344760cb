"""Captures work as CUDA graphs, on one stream a device, with one memory pool a `Captures`."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any, Generic, TypeVar

import torch

Result = TypeVar("Result")
Inputs = TypeVar("Inputs")


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Stops Python's garbage collector in all threads.

    Freeing a graph during a capture would make the capture fail.

    `torch.cuda.graph` collects before a capture, and the collector may still run during it.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Captures:
    """Runs work on a second stream of `device`, and captures it there.

    The graphs share their memory. So they must follow one another on one stream, and the results of
    a graph must be read before the next graph is replayed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = None

    def run(self, work: Callable[[], Result]) -> Result:
        """Runs `work` without capturing it, and returns its result."""
        with self._on_stream():
            return work()

    @_nothing_collected()
    def capture(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Returns a function that replays `work`, and its result.

        `work` must not synchronize with the GPU.
        """
        captured = None
        # The allocator cannot free cached memory during a capture, so an error frees it and
        # captures once more. The second try is outside of `except`, because an error keeps alive
        # all tensors of the failed work.
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
        """Returns a graph of `work`, and the result that it writes.

        This calls `CUDAGraph` directly: `torch.cuda.graph` first empties the allocator's cache.
        """
        with self._on_stream():
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(self._pool)
            try:
                result = work()
            except BaseException:
                with suppress(RuntimeError):  # the error has voided the capture
                    graph.capture_end()
                raise
            graph.capture_end()
        self._pool = graph.pool()
        return graph, result

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """Runs the block on the stream, between the current stream's earlier and later work."""
        with torch.cuda.device(self._device):  # whose current stream is meant below
            stream, current = _stream(self._device), torch.cuda.current_stream()
            stream.wait_stream(current)
            try:
                with torch.cuda.stream(stream):
                    yield
            finally:
                current.wait_stream(stream)


@dataclass
class Graph(Generic[Inputs]):
    """Holds work on inputs of one size: it first runs eagerly, then is captured and replayed."""

    inputs: Inputs  # static: the graph reads them
    has_run: bool = False
    replay: Callable[[], None] | None = None
    result: torch.Tensor | None = None  # static: the graph writes it
    kept: Any = None  # is kept alive here, since the graph holds only addresses


class GraphCache(Generic[Inputs]):
    """Keeps a `Graph` for each size of inputs.

    Args:
        captures: makes all graphs, on one device.
        most: how many graphs are kept.
        log: gets one warning when there are more than `most` sizes.
        warning: the text of the warning, with %d in place of `most`.
    """

    def __init__(self, captures: Captures, most: int, log: logging.Logger, warning: str) -> None:
        self.captures = captures
        self._most, self._log, self._warning = most, log, warning
        self._by_size: dict[Hashable, Graph[Inputs]] = {}
        self._full = False

    @property
    def first(self) -> Graph[Inputs] | None:
        """Returns the graph of the first size, or None."""
        return next(iter(self._by_size.values()), None)

    def get(self, size: Hashable, make_inputs: Callable[[], Inputs]) -> Graph[Inputs] | None:
        """Returns the graph of `size`, or None if the cache is full."""
        found = self._by_size.get(size)
        if found is not None:
            return found
        if len(self._by_size) == self._most:
            if not self._full:
                self._log.warning(self._warning, self._most)
            self._full = True
            return None
        found = self._by_size[size] = Graph(make_inputs())
        return found

    @contextmanager
    def eager(self, graph: Graph[Inputs]) -> Iterator[None]:
        """Marks `graph` as run after the block. If the first run fails, the size is forgotten."""
        try:
            yield
        except BaseException:
            if not graph.has_run:
                (size,) = (size for size, kept in self._by_size.items() if kept is graph)
                del self._by_size[size]
            raise
        graph.has_run = True

    def capture(self, graph: Graph[Inputs], work: Callable[[], torch.Tensor]) -> None:
        """Captures `work`, which reads `graph.inputs`."""
        graph.replay, graph.result = self.captures.capture(work)

    def replay(self, size: Hashable) -> Callable[[], None]:
        """Returns the function that replays the graph of `size`, which must have been captured."""
        return self._by_size[size].replay


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Returns a device's only stream for captures: cuBLAS keeps memory for each stream."""
    return torch.cuda.Stream(device)
