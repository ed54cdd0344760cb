"""Tasks from one's own data: drawn by the step alone, never context and target at once, padded."""

import numpy as np
import pytest
import torch

from tnp.tasks import FunctionTasks, Task, collate, draw_sizes, functions_of_table

SIZES = {"batch": 5, "n_context": (2, 9), "n_target": (3, 6)}


def functions(*sizes: int, d_x: int = 2, d_y: int = 1) -> list:
    chance = np.random.default_rng(0)
    return [(chance.normal(size=(n, d_x)), chance.normal(size=(n, d_y))) for n in sizes]


def points(x: torch.Tensor, y: torch.Tensor) -> set[tuple]:
    return {tuple(row) for row in torch.cat([x, y], -1).tolist()}


def test_a_task_is_drawn_by_the_step_alone_and_no_point_twice():
    known = functions(40, 30)
    tasks = FunctionTasks(known, **SIZES)
    every = set().union(*(points(torch.tensor(x), torch.tensor(y)) for x, y in known))
    sizes = set()
    for step in range(30):
        task, again = tasks(step), FunctionTasks(known, **SIZES)(step)
        assert torch.equal(task.x_context, again.x_context)
        sizes.add((task.n_context, task.n_target))
        for b in range(task.batch):
            context = points(task.x_context[b], task.y_context[b])
            target = points(task.x_target[b], task.y_target[b])
            assert len(context) == task.n_context and len(target) == task.n_target
            assert not context & target and context | target <= every
    assert {m for m, _ in sizes} == set(range(2, 10)) and {n for _, n in sizes} == {3, 4, 5, 6}
    assert not torch.equal(tasks(0).x_context, FunctionTasks(known, **SIZES, seed=1)(0).x_context)


def test_a_function_with_few_points_gives_what_it_has():
    tasks = FunctionTasks(functions(4, 400), batch=8, n_context=(9, 9), n_target=(6, 6))
    task = tasks(0)
    pairs = zip(task.context_lengths.tolist(), task.target_lengths.tolist(), strict=True)
    assert set(pairs) == {(3, 1), (9, 6)}
    task.check_finite()


def test_a_normalization_is_of_all_points():
    tasks = FunctionTasks(functions(40, 30), **SIZES)
    x = torch.cat([x for x, _ in tasks.functions])
    torch.testing.assert_close(tasks.normalization.x_mean, x.mean(0))
    torch.testing.assert_close(tasks.normalization.x_deviation, x.std(0, correction=0))


@pytest.mark.parametrize("of", ["dictionary", "structured array"])
def test_a_table_holds_functions_told_apart_by_a_column(of):
    table = {"t": [0.0, 1.0, 2.0, 3.0], "h": [5.0, 6.0, 7.0, 8.0], "id": ["b", "a", "b", "b"]}
    if of == "structured array":
        rows = list(zip(*table.values(), strict=True))
        table = np.array(rows, dtype=[("t", float), ("h", float), ("id", "U1")])
    first, second = functions_of_table(table, ["t"], ["h"], by="id")
    assert first[0].tolist() == [[1.0]] and second[1].tolist() == [[5.0], [7.0], [8.0]]
    (whole,) = functions_of_table(table, ["t", "h"], ["h"])
    assert whole[0].shape == (4, 2)
    with pytest.raises(ValueError, match="the table has no column 'time': it has t, h, id"):
        functions_of_table(table, ["time"], ["h"])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"h": ["5", "six"]}, "column 'h' holds <U3, not numbers: could not convert string"),
        ({"h": [1j, 2.0]}, "column 'h' holds complex128, not real numbers"),
        ({"h": [5.0]}, "equally many rows, at least one, not t 2, h 1, id 2"),
        ({"id": ["a"]}, "equally many rows, at least one, not t 2, h 2, id 1"),
        ({"t": [], "h": [], "id": []}, "at least one, not t 0, h 0, id 0"),
        ({"id": ["a", None]}, "column 'id', row 1, is None: every row must say which function"),
        ({"id": [float("nan"), 1.0]}, "column 'id', row 0, is nan: every row must say which"),
    ],
)
def test_a_column_that_cannot_be_used_is_one_sentence(change, message):
    table = {"t": [0.0, 1.0], "h": [5.0, 6.0], "id": ["a", "b"]} | change
    with pytest.raises(ValueError, match=message):
        functions_of_table(table, ["t"], ["h"], by="id")


def test_one_name_is_no_list_of_columns():
    with pytest.raises(ValueError, match="x is 'time': it must be a list of names of columns"):
        functions_of_table({"time": [0.0, 1.0], "h": [5.0, 6.0]}, "time", ["h"])


def test_functions_may_be_told_apart_by_any_objects():
    ids = np.array([3, "3", 3], dtype=object)
    found = functions_of_table({"t": [0.0, 1.0, 2.0], "h": [5.0, 6.0, 7.0], "id": ids}, ["t"],
                               ["h"], by="id")  # fmt: skip
    assert [len(x) for x, _ in found] == [2, 1]


def test_tasks_on_two_devices_go_into_no_batch():
    here, there = (Task(*(torch.ones(1, 3, 1, device=device),) * 4) for device in ("cpu", "meta"))
    with pytest.raises(ValueError, match="tasks on cpu and meta go into no batch together"):
        collate([here, there])


def test_collated_tasks_are_padded_to_the_largest():
    small = Task(*(torch.ones(2, n, 1) for n in (3, 3, 4, 4)))
    large = Task(*(torch.ones(1, n, 1) for n in (5, 5, 2, 2)))
    batch = collate([small, large])
    assert batch.context_lengths.tolist() == [3, 3, 5] and batch.target_lengths.tolist() == [
        4,
        4,
        2,
    ]
    assert collate([batch, large]).context_lengths.tolist() == [3, 3, 5, 5]
    assert collate([small, small]).context_lengths is None
    with pytest.raises(ValueError, match="there is no task to collate"):
        collate([])
    with pytest.raises(TypeError, match="tasks to collate: number 1 is a tuple: all must be a tnp"):
        collate([small, tuple(small)])
    with pytest.raises(ValueError, match="tasks of d_x 1, d_y 1 and d_x 2, d_y 1 go into no batch"):
        collate([small, Task(*(torch.ones(1, 3, d) for d in (2, 1, 2, 1)))])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"functions": []}, "there is no function to draw tasks from"),
        ({"functions": functions(1)}, "function 0 has 1 points: it needs two"),
        ({"functions": [*functions(5), *functions(5, d_x=1)]}, "d_x 1, d_y 1 and d_x 2, d_y 1"),
        ({"functions": [(np.zeros(5), np.zeros((5, 1)))]}, r"function 0 has x \(5,\) and y"),
        (
            {"functions": [(np.zeros((3, 1)), np.array([[0], [np.nan], [1]]))]},
            "row 1, is .nan.: it",
        ),
        (
            {"functions": functions(5)[0]},
            "function 0 is a ndarray: it must be a pair of its points",
        ),
        ({"functions": [(np.zeros((3, 1)), np.zeros((3, 0)))]}, "d_x 1 and d_y 0: each must be"),
        ({"functions": [(np.array([["a"]]), np.zeros((1, 1)))]}, "x of function 0 holds <U1, not"),
        ({"n_context": 4}, "n_context is 4: it must be the smallest and the largest number"),
        ({"n_context": (0, 4)}, "the smallest n_context is 0: it must be a whole number, at least"),
        ({"n_target": (5, 4)}, "the largest n_target is 4: it must be a whole number, at least 5"),
        ({"seed": -1}, "seed is -1: it must be a whole number, at least 0"),
        ({"batch": 0}, "batch is 0"),
    ],
)
def test_what_gives_no_tasks_is_named(change, message):
    arguments = {"functions": functions(40)} | SIZES | change
    with pytest.raises(ValueError, match=message):
        FunctionTasks(arguments.pop("functions"), **arguments)


def test_sizes_are_uniform_and_a_function_of_seed_and_step():
    drawn = [draw_sizes(0, step, (3, 5), (7, 7)) for step in range(300)]
    counts = [sum(m == size for m, _ in drawn) for size in (3, 4, 5)]
    assert all(70 < count < 130 for count in counts) and all(n == 7 for _, n in drawn)
    assert draw_sizes(0, 3, (3, 5), (7, 7)) == drawn[3]
