"""Tests how sizes that vary are rounded, how many there are, and that padding is exact."""

import logging
import random
import shutil
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from tests.model.test_transformer_np import CONFIG, build, make_task
from tests.refusals import assert_refused
from tests.replays import Replays
from tnp.model.buckets import Buckets, rounded
from tnp.train import step_graphs
from tnp.train.step import TrainingStep
from tnp.train.step_graphs import StepGraphs

DRAW = random.Random(0)
SIZES = [(DRAW.randint(3, 40), DRAW.randint(5, 90)) for _ in range(12)]


def replaying(buckets: Buckets | None) -> tuple[TrainingStep, Replays]:
    step = TrainingStep(build(skip_unread=True), learning_rate=1e-2, buckets=buckets)
    captures = Replays()
    step._graphs = StepGraphs(step._run, step._watch, captures, vary=buckets is not None)
    return step, captures


def test_sizes_are_rounded_up_by_an_eighth_at_most():
    for n in range(1, 5000):
        size = rounded(n)
        assert n <= size <= max(n + 15, 1.125 * n) and rounded(size) == size
    assert [rounded(n) for n in (1, 16, 17, 129, 257)] == [16, 16, 32, 144, 288]
    assert [rounded(n) for n in (500, 10_000)] == [512, 10_240]


def test_as_many_buckets_as_there_are_sizes():
    buckets, found = Buckets(max_context=64, max_target=500), set()
    for m in range(1, 65):
        for n in range(1, 501):
            found.add((min(rounded(m), 64), min(rounded(n), 500)))
    assert len(buckets) == len(found) == 4 * 24
    assert buckets.sizes(3, 490) == (16, 500) and buckets.sizes(65, 490) is None


def test_training_in_buckets_is_training_without():
    runs = []
    for buckets in (None, Buckets(max_context=40, max_target=90)):
        model = build()
        step = TrainingStep(model, learning_rate=1e-2, buckets=buckets)
        losses = [step(make_task(n_context=m, n_target=n)) for m, n in SIZES]
        runs.append([*losses, *model.parameters()])
    for plain, padded in zip(*runs, strict=True):
        torch.testing.assert_close(padded, plain, rtol=1e-3, atol=1e-4)


def test_every_size_has_a_graph_of_its_own_and_all_train_one_model():
    buckets = Buckets(max_context=40, max_target=90)
    eager = TrainingStep(build(skip_unread=True), learning_rate=1e-2, buckets=buckets)
    step, captures = replaying(buckets)
    for m, n in SIZES * 3:
        task = make_task(n_context=m, n_target=n)
        torch.testing.assert_close(step(task), eager(task))
    assert captures.captured == len({(rounded(m), min(rounded(n), 90)) for m, n in SIZES})


def test_a_task_larger_than_all_buckets_runs_as_it_is_and_that_is_said_once(caplog):
    step, captures = replaying(Buckets(max_context=16, max_target=16))
    plain = TrainingStep(build(skip_unread=True), learning_rate=1e-2)
    with caplog.at_level(logging.WARNING, "tnp.train.step"):
        for _ in range(3):
            task = make_task(n_context=17, n_target=5)
            torch.testing.assert_close(step(task), plain(task))
    assert [record.message[:46] for record in caplog.records] == [
        "a task of 17 context and 5 target points is la"
    ]
    assert not captures.captured


def test_more_sizes_than_graphs_run_eagerly_and_that_is_said_once(caplog, monkeypatch):
    monkeypatch.setattr(step_graphs, "MOST_GRAPHS", 1)
    step, captures = replaying(Buckets(max_context=40, max_target=90))
    with caplog.at_level(logging.WARNING, "tnp.train.step"):
        for m, n in [(5, 5)] * 5 + [(20, 20), (30, 80)]:
            assert step(make_task(n_context=m, n_target=n)).isfinite()
    assert captures.captured == 1 and len(caplog.records) == 1
    assert "1 sizes of tasks were met" in caplog.text


def test_without_buckets_a_captured_step_refuses_what_it_was_not_captured_for():
    step, _ = replaying(None)
    for _ in range(5):
        step(make_task())
    task = make_task().padded(7, 5)
    assert task.context_lengths.tolist() == [7, 7]
    assert_refused(
        (lambda: step(make_task(n_context=9)), r"does not fit the captured step's .*buckets"),
        (lambda: step(task), "all its tasks must have them, or none"),
        (lambda: step(make_task(), make_task()), "the captured step takes 1 tasks, not 2"),
    )
    step.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    with pytest.raises(RuntimeError, match="the optimizer's learning rate was replaced"):
        step(make_task())


@pytest.mark.parametrize("sizes", [(0, 5), (5, 2.0), (-1, 5)])
def test_buckets_of_no_size_are_named(sizes):
    with pytest.raises(ValueError, match="max_(context|target) is .*: it must be a whole number"):
        Buckets(*sizes)


def test_tasks_whose_gradients_are_added_up_share_a_bucket():
    buckets = Buckets(max_context=40, max_target=90)
    eager = TrainingStep(build(skip_unread=True), learning_rate=1e-2)
    step, captures = replaying(buckets)
    for (m, n), other in zip(SIZES * 2, SIZES[1:] * 2, strict=False):
        tasks = make_task(n_context=m, n_target=n), make_task(n_context=other[0], n_target=other[1])
        torch.testing.assert_close(step(*tasks), eager(*tasks), rtol=1e-4, atol=1e-4)
    assert 0 < captures.captured <= len(buckets)


@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler on a CPU")
@torch._inductor.config.patch({"force_disable_caches": True})
def test_a_compiled_step_is_the_uncompiled_one_at_every_size():
    """Inductor must not keep tensors for the backward pass with the strides of the first size.

    Rows of padded tasks are packed. `tests/model/test_ragged.py` compiles a loss without packing.
    """
    sizes, losses = ((7, 20), (30, 60), (7, 20), (31, 33), (8, 8)), []
    config = replace(CONFIG, n_layers=1)  # each block takes Inductor some seconds
    for compile_ in (False, True):
        model = build(config, skip_unread=True, compile=compile_, pack=True)
        step = TrainingStep(model, learning_rate=1e-2, buckets=Buckets(40, 90))
        assert (step.nll == model.nll) != compile_
        step._pads = True  # as where a graph is captured, which a CPU has not
        torch._dynamo.reset()
        counters.clear()
        losses.append([step(make_task(n_context=m, n_target=n)).item() for m, n in sizes])
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
    assert counters["stats"]["unique_graphs"] == 1  # a program for all sizes


@pytest.mark.parametrize(
    ("variant", "padded"), [({}, True), ({"compile": True}, False),
                            ({"compile": True, "mlp": "fused"}, True),
                            ({"compile": True, "recompute_above": 1}, True)]
)  # fmt: skip
def test_what_is_compiled_for_all_sizes_is_not_padded(variant, padded):
    step = TrainingStep(build(**variant), learning_rate=1e-2, buckets=Buckets(40, 90))
    task = make_task(n_context=7, n_target=20)
    assert step.n_rows(task) == task.batch * (16 + 32 if padded else 7 + 20)
