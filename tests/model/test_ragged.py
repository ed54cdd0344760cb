"""Tests that each sample of a size of its own counts as if alone, whatever padding holds."""

import math
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.model.test_transformer_np import CONFIG, build, make_task
from tests.refusals import assert_refused
from tnp.model.variants import FAMILIES
from tnp.tasks.task import Task
from tnp.train.step import TrainingStep

CONTEXT, TARGETS = [7, 1, 4], [2, 5, 3]
OURS = dict.fromkeys(FAMILIES, "fused") | {"skip_unread": True, "d_ff_storage": 32}


def lengths(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def ragged(fill: float = math.nan) -> Task:
    task = make_task(batch=3)
    for b, (m, n) in enumerate(zip(CONTEXT, TARGETS, strict=True)):
        task.x_context[b, m:] = task.y_context[b, m:] = fill
        task.x_target[b, n:] = task.y_target[b, n:] = fill
    return replace(task, context_lengths=lengths(CONTEXT), target_lengths=lengths(TARGETS))


def alone(task: Task, b: int) -> Task:
    m, n = CONTEXT[b], TARGETS[b]
    context, target = task.context, (task.x_target, task.y_target)
    return Task(*(x[b : b + 1, :m] for x in context[:2]), *(x[b : b + 1, :n] for x in target))


def loss_and_gradients(model, tasks: list[Task], shares: list[float]) -> dict[str, torch.Tensor]:
    loss = sum(share * model.loss(task) for task, share in zip(tasks, shares, strict=True))
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "spec, fill",
    [
        ({}, math.nan),
        ({"skip_unread": True}, math.inf),
        ({"recompute_above": 1}, 1e30),
        ({"attention": "reference"}, math.nan),
        (OURS, math.nan),
    ],
    ids=str,
)
def test_each_sample_counts_as_if_it_stood_alone(spec, fill):
    task = ragged(fill)
    together = loss_and_gradients(build(**spec), [task], [1.0])
    each = [alone(task, b) for b in range(3)]
    apart = loss_and_gradients(build(**spec), each, [n / sum(TARGETS) for n in TARGETS])
    for name, x in apart.items():
        torch.testing.assert_close(together[name], x, rtol=1e-4, atol=1e-5, msg=name)


def test_predictions_are_those_of_each_sample():
    task, model = ragged(), build()
    moved = ragged().to(dtype=torch.float64)
    assert moved.x_target.dtype == torch.float64 and moved.target_lengths.dtype == torch.int32
    together = model.predict(task.context, task.x_target)
    for b, n in enumerate(TARGETS):
        single = alone(task, b)
        expected = model.predict(single.context, single.x_target)
        torch.testing.assert_close(together.mean[b, :n], expected.mean[0])


def test_one_compiled_loss_serves_all_sizes():
    model, graphs = build(replace(CONFIG, n_layers=1), skip_unread=True), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(model.nll, fullgraph=True, dynamic=True, backend=backend)
    for n in (8, 11, 20, 38):
        task = ragged().padded(n + 1, n)
        torch.testing.assert_close(compiled(*task), model.loss(task))
    assert len(graphs) == 1


def test_lengths_are_whole_numbers_in_range_of_any_type():
    task, model, numbers = make_task(batch=3), build(), [7, 1, 4]
    expected = model.predict(task.context._replace(lengths=lengths(numbers)), task.x_target).mean
    for given in (numbers, np.array(numbers), np.array(numbers, np.uint8), torch.tensor(numbers)):
        made = replace(task, context_lengths=given)
        assert made.context_lengths.dtype == torch.int32
        assert made.context_lengths.tolist() == numbers
        found = model.predict(task.context._replace(lengths=given), task.x_target).mean
        assert torch.equal(found, expected)
    beyond = r"context_lengths\[2\] is 4294967297: it must be from 1 to 7"
    for given, sentence in (
        (lengths([7, 0, 4]), r"context_lengths\[1\] is 0: .* from 1 to 7"),
        ([7, 1, 2**32 + 1], beyond),
        (torch.tensor([7, 1, 2**32 + 1]), beyond),
        ([7.0, 1.0, 4.0], "context_lengths holds float64: it must hold whole numbers"),
        ([True, True, True], "context_lengths holds bool: it must hold whole numbers"),
        (np.ma.array(numbers, mask=[0, 1, 0]), "context_lengths holds a missing value"),
        (torch.ones(3), "context_lengths is torch.float32"),
        ([7, 1], r"torch.int32 \(2,\): it must be int32 of shape \(3,\)"),
        (7, r"torch.int32 \(\): it must be int32 of shape \(3,\)"),
    ):
        context = task.context._replace(lengths=given)
        assert_refused(
            (lambda given=given: replace(task, context_lengths=given), sentence),
            (lambda context=context: model.predict(context, task.x_target), sentence),
        )
    there = lengths([1] * 3).to("meta")
    assert_refused(
        (lambda: replace(task, target_lengths=lengths([2, 6, 3])), r"\[1\] is 6: .* from 1 to 5"),
        (lambda: replace(task, target_lengths=there), "target_lengths is on meta and x_con"),
    )


def test_points_are_counted_anew_where_lengths_have_changed():
    task = replace(make_task(batch=3), context_lengths=lengths([7, 1, 4]))
    assert task.count() == (12, 15)
    task.context_lengths[0] = 2
    assert task.count() == task.clone().count() == task.padded(9, 9).count() == (7, 15)


def test_a_value_that_is_not_finite_is_found_among_points_and_not_among_padding():
    task = ragged()
    task.check_finite()
    task.y_target[1, 4] = math.nan
    sentence = r"y_target of sample 1, point 4, is \[nan\]: every value"
    with pytest.raises(ValueError, match=sentence):
        task.check_finite()
    model = build()
    before = deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=sentence):
        TrainingStep(model, learning_rate=1e-2)(task)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


def test_padding_a_task_changes_no_loss():
    task, model = make_task(), build()
    padded = task.padded(9, 8)
    assert padded.n_context == 9 and padded.context_lengths.tolist() == [7, 7]
    torch.testing.assert_close(model.loss(padded), model.loss(task))
    again = padded.padded(12, 8)
    assert again.context_lengths.tolist() == [7, 7] and again.n_context == 12
    with pytest.raises(ValueError, match="7 context and 5 target points does not fit into 6 and 9"):
        task.padded(6, 9)


def test_the_control_shuffles_each_samples_own_values():
    task = ragged(fill=9.0)
    shuffled = task.with_shuffled_context()
    for b, m in enumerate(CONTEXT):
        before, after = task.y_context[b, :m], shuffled.y_context[b, :m]
        assert torch.equal(before.sort(0)[0], after.sort(0)[0])
        assert m == 1 or (before != after).all()
