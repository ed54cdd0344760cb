"""The training loop: any source, resume, averaging, early stopping, and what it refuses."""

import logging
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.model.test_transformer_np import CONFIG, build, make_task
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


def test_a_run_that_diverges_says_so_and_leaves_what_was_saved(tmp_path):
    with pytest.raises(RuntimeError, match="the loss is (nan|inf) at step 4: the run diverged"):
        train(6, lambda step: task_of(step, 1e30 if step == 3 else None), folder=tmp_path)
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


def test_a_model_is_no_step():
    with pytest.raises(TypeError, match="step is a TransformerNP: it must be a TrainingStep"):
        fit(build(), task_of, 3)


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
    options = {"schedule": lambda i: np.interp(i, [0, 9], [1e-2, 1e-3]), "average": np.float64(0.5)}
    options["about"] = {
        "data": tmp_path / "a.csv",
        "sizes": [np.int64(3), {"eps": np.float32(0.5)}],
    }
    train(2, folder=tmp_path, **options)
    run = train(4, folder=tmp_path, **options)
    assert [report["step"] for report in run.reports] == [0, 2, 4]
    assert {type(report["learning_rate"]) for report in run.reports} == {float}
    with pytest.raises(
        ValueError, match="the schedule's rate of step 0 is '0.1': it must be a num"
    ):
        train(2, schedule=lambda i: "0.1")
    seen = []
    for value, kind in (
        (np.ones(3), "ndarray"),
        (len, "builtin_function"),
        (lambda: 0, "function"),
        (torch.ones(2), "Tensor"),
    ):
        with pytest.raises(TypeError, match=f"about.a is a {kind}.*: it must hold numbers, texts"):
            train(2, seen.append, folder=tmp_path / "b", about={"a": value})
    assert not seen and not (tmp_path / "b").exists()


def test_a_source_that_changes_its_dimensions_is_refused_and_the_run_before_stays(tmp_path):
    def tasks(step):
        task = task_of(step)
        wide = torch.zeros(2, 7, 2)
        return task if step < 3 else Task(wide, task.y_context, wide[:, :5], task.y_target)

    with pytest.raises(ValueError, match=r"x_context is \(2, 7, 2\): it must be \[B, rows, 1\]"):
        train(6, tasks, folder=tmp_path)
    assert train(2, folder=tmp_path).reports[-1]["step"] == 2


@pytest.mark.parametrize(
    "options, message",
    [
        ({"tasks": None}, "tasks is a NoneType: it must be a function, a list or a DataLoader"),
        ({"evaluate": [task_of(0)]}, "evaluate is a list: it must be a function or None"),
        ({"evaluate": lambda model: None}, "evaluate gives a NoneType: it must give a report's"),
        ({"schedule": 0.1}, "schedule is a float: it must be a function or None"),
    ],
)
def test_arguments_of_another_type_are_named(options, message):
    with pytest.raises(TypeError, match=message):
        train(3, **options)


def test_held_out_tasks_are_tasks():
    with pytest.raises(TypeError, match="held-out tasks: number 0 is a Tensor: all must be a"):
        HeldOut(task_of(0))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"every": 0}, "every is 0: it must be a whole number"),
        ({"accumulate": 1.5}, "accumulate is 1.5: it must be a whole number"),
        ({"average": 1.0}, "average is 1.0: it must lie between 0 and 1"),
        ({"patience": 2}, "patience needs `evaluate`"),
    ],
)
def test_arguments_out_of_range_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        train(3, **options)


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
    ],
)
def test_a_state_of_another_model_is_refused_and_changes_no_weight(tmp_path, options, message):
    train(2, folder=tmp_path)
    model = options.get("model") or build()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        train(3, folder=tmp_path, **{"model": model} | options)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_state_of_other_groups_of_parameters_is_refused_and_changes_no_weight(tmp_path):
    train(2, folder=tmp_path)
    model = build()
    before = [p.detach().clone() for p in model.parameters()]
    first, *others = model.parameters()
    groups = [{"params": [first]}, {"params": others}]
    step = TrainingStep(model, optimizer=torch.optim.AdamW(groups))
    with pytest.raises(ValueError, match=rf"groups of \[1, {len(others)}\] parameters here and"):
        fit(step, task_of, 4, folder=tmp_path)
    assert all(map(torch.equal, before, model.parameters()))


def test_a_state_of_another_run_is_refused(tmp_path):
    train(2, folder=tmp_path, about={"data": "a"})
    with pytest.raises(ValueError, match="of another run: data is 'a' there and 'b' here"):
        train(2, folder=tmp_path, about={"data": "b"})


def test_reports_hold_plain_numbers_so_that_their_state_can_be_read_again(tmp_path):
    options = {"folder": tmp_path, "evaluate": lambda model: {WATCHED: np.float64(1.5)}}
    train(2, **options)
    reports = train(4, **options).reports
    assert [report["step"] for report in reports] == [0, 2, 4]
    assert {type(report[WATCHED]) for report in reports} == {float}


def test_patience_asked_for_or_left_out_later_goes_by_the_best_since(tmp_path):
    values = iter([5.0, 1.0, 2.0, 3.0, 2.5])
    options = {"folder": tmp_path, "every": 1, "evaluate": lambda model: {WATCHED: next(values)}}
    train(1, **options)  # 5.0 and 1.0, whose weights nobody kept
    run = train(3, **options, patience=2)
    assert not run.stopped_early
    kept = [p.detach().clone() for p in run.model.parameters()]  # of 3.0
    extended = train(4, **options)  # 2.5: without patience the last is what was trained
    assert not all(map(torch.equal, kept, extended.model.parameters()))


def test_what_evaluates_nothing_is_named():
    with pytest.raises(ValueError, match="there is no held-out task: give at least one"):
        HeldOut([])
    with pytest.raises(ValueError, match="evaluate gives no 'heldout_log_likelihood', which"):
        train(2, patience=1, evaluate=lambda model: {})
