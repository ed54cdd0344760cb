"""Tests the training loop: any source, resume, averaging, early stopping, and refusals."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.model.test_transformer_np import CONFIG, build, make_task
from tests.refusals import assert_refused
from tnp.tasks.task import Task
from tnp.train.loop import WATCHED, HeldOut, fit
from tnp.train.step import TrainingStep


def task_of(step: int, fill: float | None = None) -> Task:
    generator = torch.Generator().manual_seed(step)
    task = make_task()
    task.y_context.copy_(torch.randn(2, 7, 1, generator=generator))
    if fill is not None:
        task.y_target.fill_(fill)
    return task


def wide(task: Task) -> Task:
    """Returns the task with two dimensions of x in place of one."""
    x_context, x_target = (x.expand(-1, -1, 2) for x in (task.x_context, task.x_target))
    return Task(x_context, task.y_context, x_target, task.y_target)


def train(n_steps, tasks=task_of, model=None, **options):
    step = TrainingStep(model or build(), learning_rate=1e-2)
    return fit(step, tasks, n_steps, **{"every": 2} | options)


def weights(run) -> list[torch.Tensor]:
    return list(run.model.parameters())


class Killed(Exception):
    pass


def killing(report):
    if report["step"] == 4:
        raise Killed


@pytest.mark.parametrize("options", [{}, {"average": 0.5}, {"accumulate": 2}], ids=str)
def test_a_killed_run_ends_as_the_unbroken_one(tmp_path, options):
    unbroken = train(7, **options)
    with pytest.raises(Killed):
        train(7, folder=tmp_path, on_report=killing, **options)
    resumed = train(7, folder=tmp_path, **options)
    assert [report["step"] for report in resumed.reports] == [0, 2, 4, 6, 7]
    assert [report["loss"] for report in resumed.reports] == [
        report["loss"] for report in unbroken.reports
    ]
    assert all(map(torch.equal, weights(resumed), weights(unbroken)))


def test_a_finished_run_is_extended_and_not_run_again(tmp_path):
    train(4, folder=tmp_path)
    seen = []
    again = train(4, lambda step: seen.append(step) or task_of(step), folder=tmp_path)
    assert not seen and again.reports[-1]["step"] == 4
    extended = train(8, folder=tmp_path)
    assert all(map(torch.equal, weights(extended), weights(train(8))))


def test_what_can_be_iterated_trains_and_says_where_a_resume_is_not_exact(tmp_path, caplog):
    tasks = [task_of(i) for i in range(3)]
    run = train(7, tasks, folder=tmp_path)
    expected = train(7, lambda step: tasks[step % 3])
    assert all(map(torch.equal, weights(run), weights(expected)))
    loader = torch.utils.data.DataLoader(tasks, batch_size=None)
    loaded = train(7, loader)
    assert all(map(torch.equal, weights(loaded), weights(expected)))
    with caplog.at_level(logging.WARNING, "tnp.train.loop"):
        train(8, tasks, folder=tmp_path)
    assert "resumed at step 7: tasks is no function of the step and begins anew" in caplog.text


def test_the_average_is_the_mean_that_it_says():
    seen = []
    model = build()
    run = train(3, model=model, average=0.5, every=1,
                on_report=lambda _: seen.append(model.heads.down.detach().clone()))  # fmt: skip
    expected = seen[1]  # the first step's weights are where the average starts
    for after in seen[2:]:
        expected = 0.5 * expected + 0.5 * after
    torch.testing.assert_close(run.model.heads.down, expected)
    assert run.model is not model


def test_training_stops_where_nothing_becomes_better_and_gives_the_best(tmp_path):
    values = iter([0.0, 1.0, 2.0, 1.5, 1.9, 5.0])
    kept = {}

    def evaluate(model):
        value = next(values)
        kept[value] = model.heads.down.detach().clone()
        return {WATCHED: value}

    run = train(100, evaluate=evaluate, every=1, patience=2)
    assert run.stopped_early and [report["step"] for report in run.reports] == [0, 1, 2, 3, 4]
    assert torch.equal(run.model.heads.down, kept[2.0])


def test_held_out_tasks_are_weighed_by_their_targets():
    model, one, two = build(), make_task(), make_task(n_target=2)
    found = HeldOut([one, two.padded(9, 4)])(model)[WATCHED]
    expected = -(10 * model.loss(one) + 4 * model.loss(two)) / 14
    assert found == pytest.approx(expected.item(), rel=1e-5)


def test_a_schedule_is_of_the_step():
    rates = []
    run = train(4, schedule=lambda step: 10.0 ** -(step + 1), every=1, on_report=rates.append)
    assert [report["learning_rate"] for report in rates] == [10.0 ** -(i + 1) for i in range(5)]
    assert len(run.reports) == 5


@pytest.mark.parametrize(
    ("fourth", "error", "message"),
    [
        (lambda: task_of(3, 1e30), RuntimeError, "the loss is (nan|inf) at step 4: the run diverg"),
        (lambda: wide(task_of(3)), ValueError, r"x_context is \(2, 7, 2\): it must be \[B, rows,"),
    ],
)
def test_a_run_that_fails_says_so_and_leaves_what_was_saved(tmp_path, fourth, error, message):
    with pytest.raises(error, match=message):
        train(6, lambda step: fourth() if step == 3 else task_of(step), folder=tmp_path)
    assert train(2, folder=tmp_path).reports[-1]["step"] == 2


@pytest.mark.parametrize(
    "source, error, message",
    [
        (lambda step: make_task().x_context, TypeError, "tasks gives a Tensor: it must give a tnp"),
        (lambda step: task_of(step, math.nan), ValueError, "y_target of sample 0, point 0, is"),
        (lambda step: make_task(n_target=0), ValueError, "it must hold at least one target"),
        ([], ValueError, "tasks has ended and gives nothing when it is started again"),
        (iter([task_of(0)]), ValueError, "tasks has ended"),
    ],
)
def test_a_source_that_trains_nothing_is_one_sentence(source, error, message):
    with pytest.raises(error, match=message):
        train(3, source)


@pytest.mark.parametrize("name", ["step", "loss", "learning_rate", "elapsed_s"])
def test_what_evaluates_replaces_nothing_of_a_report(name):
    seen = []
    with pytest.raises(ValueError, match=f"evaluate gives '{name}', which every report has"):
        train(2, lambda i: seen.append(i) or task_of(i), evaluate=lambda model: {name: 5.0})
    assert not seen


def test_a_resumed_run_says_from_where_and_which_settings_it_keeps(tmp_path, caplog):
    train(4, folder=tmp_path)
    step = TrainingStep(build(), learning_rate=1e-5, weight_decay=0.5)
    with caplog.at_level(logging.WARNING, "tnp.train.loop"):
        run = fit(step, task_of, 2, folder=tmp_path)
    assert len(run.reports) == 3
    assert "goes on from step 4 of" in caplog.text and "its 3 reports come first" in caplog.text
    assert "has made 4 steps and n_steps is 2: nothing is trained" in caplog.text
    assert "learning_rate 0.01 there and 1e-05 here" in caplog.text
    assert "weight_decay 0.01 there and 0.5 here" in caplog.text
    caplog.clear()
    train(6, folder=tmp_path)
    assert "keeps the settings" not in caplog.text and "nothing is trained" not in caplog.text


def test_numbers_of_numpy_and_paths_are_saved_as_plain_ones_and_others_are_named(tmp_path):
    about = {"data": tmp_path / "a.csv", "sizes": [np.int64(3), {"eps": np.float32(0.5)}]}
    options = {"schedule": lambda i: np.interp(i, [0, 9], [1e-2, 1e-3]), "about": about}
    options |= {"average": np.float64(0.5), "evaluate": lambda model: {WATCHED: np.float64(1.5)}}
    train(2, folder=tmp_path, **options)
    run = train(4, folder=tmp_path, **options)
    assert [report["step"] for report in run.reports] == [0, 2, 4]
    for name in ("learning_rate", WATCHED):
        assert {type(report[name]) for report in run.reports} == {float}
    with pytest.raises(ValueError, match="of another run: data is .*a.csv' there and 'b' here"):
        train(4, folder=tmp_path, **options | {"about": about | {"data": "b"}})
    seen, kinds = [], {"ndarray": np.ones(3), "builtin_function": len, "Tensor": torch.ones(2)}
    for kind, value in kinds.items():
        with pytest.raises(TypeError, match=f"about.a is a {kind}.*: it must hold numbers, texts"):
            train(2, seen.append, folder=tmp_path / "b", about={"a": value})
    assert not seen and not (tmp_path / "b").exists()


def test_arguments_that_train_nothing_are_named():
    def ask(**options):
        return lambda: train(3, **options)

    assert_refused(
        (lambda: fit(build(), task_of, 3), "step is a TransformerNP: it must be a TrainingStep"),
        (lambda: HeldOut(task_of(0)), "held-out tasks: number 0 is a Tensor: all must be a"),
        (ask(tasks=None), "tasks is a NoneType: it must be a function, a list or a DataLoader"),
        (ask(evaluate=[task_of(0)]), "evaluate is a list: it must be a function or None"),
        (ask(evaluate=lambda model: None), "evaluate gives a NoneType: it must give a report's"),
        (ask(schedule=0.1), "schedule is a float: it must be a function or None"),
        error=TypeError,
    )
    assert_refused(
        (ask(every=0), "every is 0: it must be a whole number"),
        (ask(accumulate=1.5), "accumulate is 1.5: it must be a whole number"),
        (ask(average=1.0), "average is 1.0: it must lie between 0 and 1"),
        (ask(schedule=lambda i: "0.1"), "the schedule's rate of step 0 is '0.1': it must be a num"),
        (ask(patience=2), "patience needs `evaluate`"),
        (ask(patience=1, evaluate=lambda model: {}), "gives no 'heldout_log_likelihood', which"),
        (lambda: HeldOut([]), "there is no held-out task: give at least one"),
    )


@pytest.mark.parametrize(
    "options, message",
    [
        ({"model": build(d_ff_storage=32)}, "has weights of other names or shapes, such as"),
        # Weights of the same shapes, which would be another function in this model.
        ({"model": build(replace(CONFIG, n_heads=4))}, "n_heads is 2 there and 4 here"),
        ({"model": build(replace(CONFIG, sigma_min=0.1))}, "sigma_min is 0.0 there and 0.1 here"),
        ({"model": build(dtype=torch.bfloat16)}, "is 'torch.float32' there and 'torch.bfl"),
        ({"average": 0.5}, "average is None there and 0.5 here"),
        ({"accumulate": 2}, "accumulate is 1 there and 2 here"),
        ({"groups": 2}, r"groups of \[1, \d+\] parameters here and"),
    ],
)
def test_a_state_of_another_model_is_refused_and_changes_no_weight(tmp_path, options, message):
    train(2, folder=tmp_path)
    model = options.get("model") or build()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        if "groups" in options:
            first, *others = model.parameters()
            optimizer = torch.optim.AdamW([{"params": [first]}, {"params": others}])
            fit(TrainingStep(model, optimizer=optimizer), task_of, 4, folder=tmp_path)
        else:
            train(3, folder=tmp_path, **{"model": model} | options)
    assert all(map(torch.equal, before, model.parameters()))


def test_patience_asked_for_or_left_out_later_goes_by_the_best_since(tmp_path):
    values = iter([5.0, 1.0, 2.0, 3.0, 2.5])
    options = {"folder": tmp_path, "every": 1, "evaluate": lambda model: {WATCHED: next(values)}}
    train(1, **options)  # 5.0 and 1.0, whose weights nobody kept
    run = train(3, **options, patience=2)
    assert not run.stopped_early
    kept = [p.detach().clone() for p in run.model.parameters()]  # of 3.0
    extended = train(4, **options)  # 2.5: without patience the last is what was trained
    assert not all(map(torch.equal, kept, extended.model.parameters()))
