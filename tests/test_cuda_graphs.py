"""Tests what captures do beside capturing. Gate `cuda_graphs` captures, on a GPU."""

import gc
import logging
import weakref

import pytest
import torch

from tests.model.test_buckets import replaying
from tests.model.test_transformer_np import make_task
from tests.replays import Replays
from tnp.cuda_graphs import Captures, GraphCache


class OutOfMemory(Captures):
    """The first `n` captures run out of memory, with something large at hand."""

    def __init__(self, n):
        super().__init__(torch.device("cpu"))
        self.left, self.large = n, []

    def _captured(self, work):
        assert all(large() is None for large in self.large)
        if self.left:
            self.left -= 1
            large = torch.zeros(1)
            self.large.append(weakref.ref(large))
            raise torch.cuda.OutOfMemoryError
        return None, work()


def test_a_capture_without_memory_is_made_once_more_and_keeps_nothing_of_the_first():
    captures = OutOfMemory(1)
    _, result = captures.capture(lambda: 7)
    assert result == 7 and len(captures.large) == 1
    with pytest.raises(torch.cuda.OutOfMemoryError):
        OutOfMemory(2).capture(lambda: 7)


def test_no_garbage_is_collected_in_a_capture():
    """Among it may be graphs of a step that is gone, and freeing one makes the capture void."""
    _, collecting = OutOfMemory(0).capture(gc.isenabled)
    assert not collecting and gc.isenabled()
    with pytest.raises(torch.cuda.OutOfMemoryError):
        OutOfMemory(2).capture(gc.isenabled)
    assert gc.isenabled()


def test_a_size_that_has_failed_is_not_captured_before_it_has_run(monkeypatch):
    step, captures = replaying(None)
    task, run = make_task(), Replays.run

    def fail(self, work):
        raise KeyboardInterrupt

    monkeypatch.setattr(Replays, "run", fail)
    for _ in range(4):
        with pytest.raises(KeyboardInterrupt):
            step(task)
    monkeypatch.setattr(Replays, "run", run)
    for _ in range(3):
        step(task)
        assert not captures.captured
    step(task)
    assert captures.captured == 1


def test_a_size_keeps_no_place_if_its_first_run_fails():
    """Else sizes that fail fill the cache, and sizes that succeed run without a graph."""
    graphs = GraphCache(Replays(), 1, logging.getLogger("test"), "%d sizes were met")
    with pytest.raises(KeyboardInterrupt), graphs.eager(graphs.get("fails", list)):
        raise KeyboardInterrupt
    assert graphs.first is None

    good = graphs.get("runs", list)
    with graphs.eager(good):
        pass
    with pytest.raises(KeyboardInterrupt), graphs.eager(good):  # only the first run decides
        raise KeyboardInterrupt
    assert graphs.first is graphs.get("runs", list) is good and good.has_run
    assert graphs.get("fails", list) is None


def test_a_first_step_that_fails_does_not_fix_the_size_of_all_steps(monkeypatch):
    step, _ = replaying(None)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(Replays, "run", lambda self, work: 1 / 0)
        step(make_task(n_context=7))
    step(make_task())
