"""Tests tasks that hold whole groups of points, such as stations, out of their context."""

import numpy as np
import pytest
import torch

from tests.tasks.test_own_data import SIZES, functions
from tnp.tasks.functions import FunctionTasks
from tnp.tasks.tables import functions_of_table


def grouped(*sizes: tuple[int, ...]) -> list:
    """Functions of groups a, b, … with so many points each; y is the number of the group."""
    found = []
    for x, of in zip(functions(*map(sum, sizes)), sizes, strict=True):
        numbers = np.repeat(np.arange(len(of)), of)
        found.append((x[0], numbers[:, None].astype(float), np.array(list("abcdef"))[numbers]))
    return found


def groups_of(y: torch.Tensor, lengths: torch.Tensor | None, sample: int) -> set[float]:
    n = y.shape[1] if lengths is None else lengths[sample]
    return set(y[sample, :n].flatten().tolist())


@pytest.mark.parametrize("hold_out", [0.4, ["b", "d"], {"b"}, np.array(["d"])])
def test_groups_that_are_held_out_are_no_context(hold_out):
    known = grouped((5, 3, 4, 6, 5), (9, 2, 1), (4, 7))
    tasks = FunctionTasks(known, **SIZES, hold_out=hold_out)
    kept, held = {}, {}
    for step in range(60):
        task, again = tasks(step), FunctionTasks(known, **SIZES, hold_out=hold_out)(step)
        assert torch.equal(task.y_target, again.y_target)
        for b in range(task.batch):
            context = groups_of(task.y_context, task.context_lengths, b)
            target = groups_of(task.y_target, task.target_lengths, b)
            assert context and target and not context & target
            kept[frozenset(target)] = held[frozenset(context)] = True
    names = "abcde"
    if hold_out == 0.4:  # two of five groups, one of three, one of two
        assert all(1 <= len(target) <= 2 for target in kept)
        assert set().union(*kept) == set().union(*held) == set(map(float, range(5)))
    else:
        wanted = {float(names.index(group)) for group in hold_out}
        assert set().union(*kept) == wanted and not set().union(*held) & wanted


def test_functions_without_points_on_both_sides_give_no_tasks():
    tasks = FunctionTasks(grouped((4, 4), (5,), (0, 3, 2)), **SIZES, hold_out=["a"])
    assert tasks._drawn == [0]
    assert len(tasks.normalization.numbers()["x_mean"]) == 2
    with pytest.raises(ValueError, match="no function has points both of a group to hold out and"):
        FunctionTasks(grouped((5,), (0, 3)), **SIZES, hold_out=0.5)


@pytest.mark.parametrize(
    "functions, hold_out, message",
    [
        (grouped((3, 3)), 1.0, "hold_out is 1.0: it must be a share between 0 and 1, or a list"),
        (grouped((3, 3)), "a", "hold_out is 'a': it must be a share between 0 and 1, or a list"),
        (grouped((3, 3)), True, "hold_out is True: it must be a number"),
        (grouped((3, 3)), ["z"], "hold_out is .'z'.: no point is of group 'z'"),
        (grouped((3, 3)), [], "hold_out is ..: it names no group"),
        (functions(5), 0.5, r"function 0 is a pair \(x, y\): hold_out needs \(x, y, groups\)"),
        ([(*functions(3)[0], ["a"])], 0.5, "function 0 has 3 points and 1 groups: each point"),
        (
            [(*functions(3)[0], np.ma.array([1, 2, 3], mask=[0, 1, 0]))],
            0.5,
            "groups of function 0, row 1, is missing: every row must name its group",
        ),
    ],
)
def test_groups_that_cannot_be_held_out_are_named(functions, hold_out, message):
    with pytest.raises(ValueError, match=message):
        FunctionTasks(functions, **SIZES, hold_out=hold_out)


def test_a_table_names_groups():
    table = {"t": [0.0, 1.0, 2.0], "h": [5.0, 6.0, 7.0], "day": [2, 1, 2], "at": ["b", "a", "c"]}
    first, second = functions_of_table(table, ["t"], ["h"], by="day", group="at")
    assert first[2] == ["a"] and second[2] == ["b", "c"]
    assert second[1].tolist() == [[5.0], [7.0]]
