"""Tests sources of tasks: known numbers, disjoint hold-outs, nothing but (seed, step)."""

import numpy as np
import pytest
import torch

from tests.refusals import assert_refused
from tnp.tasks.dead_leaves import dead_leaves
from tnp.tasks.gaussian_process import GaussianProcessTasks
from tnp.tasks.images import ImageTasks
from tnp.tasks.sizes import draw_sizes
from tnp.tasks.task import Task


def points(n, d=1, batch=2):
    return torch.zeros(batch, n, d)


def values(task: Task) -> list[torch.Tensor]:
    return [x for x in task if x is not None]


@pytest.mark.parametrize("make", [lambda: GaussianProcessTasks(), lambda: ImageTasks(64)])
def test_a_task_is_a_function_of_seed_and_step(make):
    draw = make().sample(0, 3, 2, 40, 24)
    again = make().sample(0, 3, 2, 40, 24)
    assert all(torch.equal(a, b) for a, b in zip(values(draw), values(again), strict=True))
    for seed, step in ((0, 4), (1, 3), (3, 0)):
        other = make().sample(seed, step, 2, 40, 24)
        assert not torch.equal(draw.y_context, other.y_context)


def test_gaussian_process_has_its_known_likelihoods():
    tasks, exact, prior = GaussianProcessTasks(), [], []
    for step in range(4):
        task = tasks.sample(0, step, 32, 64, 500)
        exact.append(tasks.exact_log_likelihood(task, 0, step))
        prior.append(tasks.prior_log_likelihood(task))
    exact, prior = torch.cat(exact), torch.cat(prior)
    assert exact.mean().item() == pytest.approx(0.795, abs=4 * exact.std().item() / 128**0.5)
    # −½ log(2π·1.01) − ½
    assert prior.mean().item() == pytest.approx(-1.424, abs=4 * prior.std().item() / 128**0.5)


def test_exact_posterior_beats_that_of_shuffled_values():
    tasks = GaussianProcessTasks()
    task = tasks.sample(0, 0, 8, 64, 50)
    shuffled = task.with_shuffled_context()
    assert (shuffled.y_context != task.y_context).all()
    assert torch.equal(shuffled.y_context.sort(1)[0], task.y_context.sort(1)[0])
    true, control = (tasks.exact_log_likelihood(t, 0, 0).mean() for t in (task, shuffled))
    assert true > control + 1


@pytest.mark.parametrize("n_context, n_target", [(64, 500), (10_000, 1_000), (200_000, 5_000)])
def test_images_serve_all_three_shapes_and_none_is_held_out_too(n_context, n_target):
    tasks, held_out = (ImageTasks(n_context + n_target, held_out=on) for on in (False, True))
    for picture in held_out._pictures:
        for seen in tasks._pictures:
            assert picture.shape != seen.shape or not torch.equal(picture, seen)
    task = tasks.sample(0, 0, 2, n_context, n_target)
    assert task.x_context.shape == (2, n_context, 2) and task.y_target.shape == (2, n_target, 1)
    assert task.x_context.min() >= -1 and task.x_context.max() <= 1
    pixels = torch.cat([task.x_context, task.x_target], dim=1)[0]
    assert len(torch.unique(pixels, dim=0)) == n_context + n_target
    assert task.y_context.isfinite().all() and task.y_context.abs().max() < 10
    if n_target == 500:  # brightness is not quantized
        assert len(task.y_target[0].unique()) > 490
    assert 0.001 < tasks.sigma_min < 0.1


def test_bad_tasks_raise_naming_the_shape():
    made = Task(points(3), points(3), points(2), points(2))
    assert_refused(
        (lambda: Task(points(3)[0], points(3), points(2), points(2)), "x_context has shape"),
        (lambda: Task(points(3), points(4), points(2), points(2)), "agree in batch and points"),
        (lambda: Task(points(3), points(3), points(2, 2), points(2)), "agree in batch and dimens"),
        (lambda: Task(*(points(3, batch=0),) * 4), r"has shape \(0, 3, 1\): it must hold at least"),
        (lambda: Task(points(0), points(0), points(2), points(2)), "n_context is 0"),
        (lambda: Task(points(3), points(3), points(2), points(2).to("meta")),
         "y_target is on meta and x_context on cpu: a task's"),
        (lambda: Task(points(3), points(3).long(), points(2), points(2)),
         "y_context is torch.int64: it must be a float dtype"),
        (lambda: made.copy_(Task(points(4), points(4), points(2), points(2))),
         "does not fit the captured step"),
        (lambda: ImageTasks(262_145), "n_points is 262145"),
        (lambda: ImageTasks(100).sample(0, 0, 1, 600, 100), "more than the 625 pixels"),
        *((lambda n=n: ImageTasks(n), f"n_points is {n}: it must be a whole number")
          for n in (0, -3, 64.0)),
    )  # fmt: skip
    with pytest.raises(TypeError, match="y_target is a NoneType: it must be a torch.Tensor"):
        Task(points(3), points(3), points(2), None)


@pytest.mark.parametrize("tasks", [GaussianProcessTasks(), ImageTasks(64)])
@pytest.mark.parametrize(
    "sizes, message",
    [
        ((0, 0, 1, -2, 5), "n_context is -2: it must be a whole number, at least 1"),
        ((0, 0, 1, 0, 5), "n_context is 0"),
        ((0, 0, 1, 3, -1), "n_target is -1: it must be a whole number, at least 0"),
        ((0, 0, 0, 3, 5), "batch is 0"),
        ((0, 0, -1, 3, 5), "batch is -1"),
        ((0, 0, 1, 3.0, 5), "n_context is 3.0: it must be a whole number"),
        ((0, 0, True, 3, 5), "batch is True"),
        ((-1, 0, 1, 3, 5), "seed is -1: it must be a whole number, at least 0"),
        ((0, 0.5, 1, 3, 5), "step is 0.5"),
        ((0, 0, np.float64(1), 3, 5), "batch is np.float64"),
        ((0, 0, torch.tensor(True), 3, 5), "batch is tensor"),
    ],
)
def test_sizes_that_no_task_has_are_named(tasks, sizes, message):
    with pytest.raises(ValueError, match=message):
        tasks.sample(*sizes)


def test_arrays_become_tensors_of_their_precision() -> None:
    x, y = np.zeros((1, 3, 1)), np.zeros((1, 3, 1), np.float32)
    y_missing = np.ma.array(y, mask=[[[0], [1], [0]]])
    task = Task(x, y, x.tolist(), y_missing)
    assert [tensor.dtype for tensor in values(task)] == [torch.float64, torch.float32] * 2
    assert task.y_target.isnan().flatten().tolist() == [False, True, False]
    with pytest.raises(ValueError, match=r"y_target of sample 0, point 1, is \[nan\]: every"):
        task.check_finite()


@pytest.mark.parametrize(
    "y, error, message",
    [
        ("abc", TypeError, "y_context is a str: it must be a torch.Tensor or an array of floats"),
        (np.zeros((1, 3, 1), int), ValueError, "y_context is int64: it must be a float dtype"),
        (np.zeros((1, 3, 1), "M8[s]"), ValueError, "y_context holds datetime64.s., not numbers"),
        (torch.eye(3)[None].to_sparse(), ValueError, "a tensor of torch.sparse_coo: it must be"),
    ],
)
def test_what_is_no_array_of_floats_is_named(y, error, message) -> None:
    x = torch.zeros(1, 3, 1)
    with pytest.raises(error, match=message):
        Task(x, y, x, x)


def test_a_loader_can_pin_a_task(monkeypatch) -> None:
    """`DataLoader(pin_memory=True)` calls a batch's `pin_memory`, which needs a GPU."""
    pinned = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    lengths = torch.tensor([3, 1], dtype=torch.int32)
    task = Task(points(3), points(3), points(2), points(2), lengths)
    found = torch.utils.data._utils.pin_memory.pin_memory(task)
    assert len(pinned) == 5 and found.count() == task.count() == (4, 4)


def test_sizes_may_be_spread_by_their_logarithms():
    drawn = [draw_sizes(0, step, (10, 1000), log=True)[0] for step in range(2000)]
    assert min(drawn) == 10 and max(drawn) > 950 and max(drawn) <= 1000
    below = sum(n < 100 for n in drawn) / len(drawn)
    assert 0.45 < below < 0.55


def test_sizes_may_be_limited_together():
    drawn = [draw_sizes(0, step, (3, 46), (3, 47), together=50) for step in range(2000)]
    assert max(map(sum, drawn)) == 50
    assert {m for m, _ in drawn} == set(range(3, 47)) and min(n for _, n in drawn) == 3
    with pytest.raises(ValueError, match="together"):
        draw_sizes(0, 0, (3, 46), (3, 47), together=48)


def test_drawn_pictures_are_flat_but_at_edges_and_each_is_another():
    generator = torch.Generator().manual_seed(0)
    first, second = dead_leaves(generator, 2, 64), dead_leaves(generator, 2, 64)
    again = dead_leaves(torch.Generator().manual_seed(0), 2, 64)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert first.shape == (2, 64, 64) and 0.5 < first.std() < 2.0
    steps = first.diff(dim=2).abs()
    assert steps.median() < 0.05 and steps.max() > 1.0  # inside a leaf, and between two
