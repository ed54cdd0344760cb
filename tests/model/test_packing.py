"""Tests packed batches, whose samples' rows follow one another, and what padding may not do."""

import math
from dataclasses import replace

import pytest
import torch

from tests.model.test_ragged import CONTEXT, TARGETS, lengths, loss_and_gradients, ragged
from tests.model.test_transformer_np import build, make_task
from tests.refusals import assert_refused
from tests.replays import Replays
from tnp.model.buckets import Buckets
from tnp.model.packing import Packing, Rows, capacity_for
from tnp.model.variants import Variant
from tnp.train.step import TrainingStep
from tnp.train.step_graphs import StepGraphs


def test_every_point_has_a_row_and_the_last_row_is_nobodys():
    rows = Rows.of(lengths([3, 1, 2]), n=4, capacity=9)
    assert rows.of_place.view(3, 4).tolist() == [[0, 1, 2, 8], [3, 8, 8, 8], [4, 5, 8, 8]]
    assert rows.place[:6].tolist() == [0, 1, 2, 4, 8, 9]
    assert rows.is_real.flatten().tolist() == [True] * 6 + [False] * 3


def test_targets_follow_the_context_in_both_orders():
    packing = Packing(lengths([2, 1]), lengths([1, 2]), (2, 2), (4, 4))
    points = torch.arange(1.0, 9.0).view(2, 4, 1)  # of each sample two context, two target places
    packed = packing.pack(points, "all")
    real = packing._rows["all"].is_real.flatten()
    assert packed[0, real, 0].tolist() == [1, 2, 5, 3, 7, 8]
    back = packing.unpack(packed.unsqueeze(1), "all")[:, 0, :, 0]
    is_point = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    assert torch.equal(back[is_point], points[..., 0][is_point])


def test_each_way_is_the_gradient_of_the_other_but_for_spare_rows():
    packing = Packing(lengths([2, 1]), lengths([1, 2]), (2, 2), (4, 4))
    heads = torch.randn(1, 3, 8, 2, dtype=torch.float64, requires_grad=True)
    gradient = torch.randn(2, 3, 4, 2, dtype=torch.float64)
    is_point = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    gradient = gradient * is_point[:, None, :, None]  # attention has none for padding
    (found,) = torch.autograd.grad(packing.unpack(heads, "all"), heads, gradient)
    expected = torch.zeros_like(heads)
    places = [(0, 0), (0, 1), (1, 0), None, (0, 2), (1, 2), (1, 3), None]
    for row, place in enumerate(places):
        if place is not None:
            expected[0, :, row] = gradient[place[0], :, place[1]]
    assert torch.equal(found, expected)


def test_capacity_has_a_spare_row_and_is_never_more_than_padding():
    for points in ((1, 1), (15, 16), (128, 4096), (640, 5000)):
        for n, rows in zip(points, capacity_for(points, 10, (64, 500)), strict=True):
            assert n < rows <= n + max(16, n // 8 + 1)
    assert capacity_for((640, 5000), 10, (64, 500)) == (641, 5001)
    assert_refused(
        (lambda: build().nll(*make_task(), (40, 40)), "a capacity is given and no lengths"),
        (lambda: Variant("both", skip_unread=True, centred_keys=True, pack=True),
         "'both': centred_keys takes a mean .* choose one"),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("spec", "capacity"), [({}, (40, 70)), ({"skip_unread": True, "recompute_above": 1}, (13, 11))]
)
def test_packed_is_padded(spec, capacity):
    task = ragged(math.nan)
    padded = loss_and_gradients(build(**spec), [task], [1.0])
    model = build(**spec)
    loss = model.nll(*task, capacity)
    loss.backward()
    packed = {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}
    for name, x in padded.items():
        torch.testing.assert_close(packed[name], x, rtol=1e-4, atol=1e-5, msg=name)


def test_a_packed_step_trains_as_a_padded_one_and_computes_fewer_rows():
    weights, rows = [], []
    for pack in (False, True):
        buckets = Buckets(max_context=8, max_target=6)
        model = build(pack=pack)
        step = TrainingStep(model, learning_rate=1e-2, buckets=buckets)
        for _ in range(3):
            step(ragged(math.nan))
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
        rows.append(step.n_rows(ragged()))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-4)
    assert rows == [3 * 8 + 3 * 6, sum(capacity_for((sum(CONTEXT), sum(TARGETS)), 3, (8, 6)))]


def test_a_captured_step_without_buckets_has_a_graph_for_each_number_of_rows():
    """A replay of one with fewer rows would read past them."""
    step = TrainingStep(build(pack=True), learning_rate=1e-2)
    captures = Replays()
    plain = TrainingStep(build(pack=True), learning_rate=1e-2)
    step._graphs = StepGraphs(step._run, step._watch, captures, vary=False)
    whole = make_task(batch=3, n_context=60, n_target=70)
    few, many = (
        replace(whole, context_lengths=lengths([m] * 3), target_lengths=lengths([n] * 3))
        for m, n in ((3, 2), (60, 70))
    )
    for task in (few, few, few, few, many, few, many, many):
        torch.testing.assert_close(step(task), plain(task))
    assert captures.captured == 2
