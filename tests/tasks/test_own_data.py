"""Tests tasks of one's own data: drawn by the step alone, no point twice, padded."""

import io

import numpy as np
import pytest
import torch

from tests.refusals import assert_refused
from tnp.tasks.collate import collate
from tnp.tasks.functions import FunctionTasks
from tnp.tasks.sizes import draw_sizes
from tnp.tasks.tables import functions_of_table
from tnp.tasks.task import Task

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
    x = torch.cat([x for x, _ in tasks.functions])
    torch.testing.assert_close(tasks.normalization.x_mean, x.mean(0))  # of all points
    task = tasks(0)
    pairs = zip(task.context_lengths.tolist(), task.target_lengths.tolist(), strict=True)
    assert set(pairs) == {(3, 1), (9, 6)}
    task.check_finite()


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
    with pytest.raises(ValueError, match="the table has no column 'time': it has 't', 'h', 'id'"):
        functions_of_table(table, ["time"], ["h"])


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"h": ["5", "six"]},
            "column 'h', row 1, holds 'six', not a number: .* for each category",
        ),
        ({"h": np.array([5, "six"], object)}, "column 'h', row 1, holds 'six', not a number"),
        ({"h": np.ones((2, 2))}, r"column 'h' has shape \(2, 2\): it must have one value a row"),
        ({"h": 5.0}, r"column 'h' has shape \(\): it must have one value a row"),
        ({"h": [[5.0], [6.0, 7.0]]}, "column 'h' of type list is no array: "),
        ({"h": np.zeros(2, [("a", float)])}, r"column 'h' holds records of \('a',\): it must hold"),
        (
            {"h": np.array([np.ones(1), None], object)},
            r"column 'h', row 0, holds a ndarray of shape \(1,\), not a number",
        ),
        ({"h": [10**400, 1]}, "column 'h', row 0, holds 10+, not a number: int too large"),
        ({"h": [5.0, np.inf]}, "column 'h', row 1, is inf: it must be finite"),
        ({"h": torch.ones(2) * 1j}, "column 'h' holds torch.complex64, not real numbers"),
        ({"h": [1j, 2.0]}, "column 'h' holds complex128, not real numbers"),
        ({"h": [5.0]}, "equally many rows, at least one, not t 2, h 1, id 2"),
        ({"id": ["a"]}, "equally many rows, at least one, not t 2, h 2, id 1"),
        ({"t": [], "h": [], "id": []}, "at least one, not t 0, h 0, id 0"),
        ({"id": ["a", None]}, "column 'id', row 1, is missing: every row must name its function$"),
        ({"id": [float("nan"), 1.0]}, "column 'id', row 0, is missing: every row must name its"),
        ({"id": np.ma.array([1, 7], mask=[0, 1])}, "column 'id', row 1, is missing: every row"),
        ({"id": np.array(["2026", "NaT"], "M8[s]")}, "column 'id', row 1, is missing: every row"),
        ({"id": [[1], [2]]}, "column 'id', row 0, is a list: it names no function"),
    ],
)
def test_a_column_that_cannot_be_used_is_one_sentence(change, message):
    table = {"t": [0.0, 1.0], "h": [5.0, 6.0], "id": ["a", "b"]} | change
    with pytest.raises(ValueError, match=message):
        functions_of_table(table, ["t"], ["h"], by="id")


class NA:
    """As `pandas.NA` is: neither equal nor unequal to anything."""

    def __eq__(self, other: object) -> "NA":
        return self

    def __bool__(self) -> bool:
        raise TypeError("boolean value of NA is ambiguous")


class Column:
    """A column of a library that is no array, such as a series or a netCDF variable."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        return self.values


MASKED = np.ma.array([5.0, -9999.0, 7.0], mask=[0, 1, 0])
MISSING = {
    "NaN": np.array([5.0, np.nan, 7.0]),
    "masked": MASKED,
    "masked integers": np.ma.array([5, -9999, 7], mask=[0, 1, 0]),
    "masked objects": np.ma.array([5, "?", 7], mask=[0, 1, 0], dtype=object),
    "masked text": np.ma.array(["5", "?", "7"], mask=[0, 1, 0]),
    "list with a mask": [5.0, np.ma.masked, 7.0],
    "None": [5, None, 7],
    "NA": np.array([5, NA(), 7], dtype=object),
    "NaT": np.array([5, np.datetime64("NaT"), 7], dtype=object),
    "series": Column(np.array([5, NA(), 7], dtype=object)),
    "variable": Column(MASKED),
    "tensor": torch.tensor([5.0, torch.nan, 7.0]),
}


@pytest.mark.filterwarnings("ignore:Warning. converting a masked element to nan")
@pytest.mark.parametrize("kind", MISSING)
def test_a_missing_value_is_never_a_number(kind):
    missing = MISSING[kind]
    with pytest.raises(ValueError, match="column 'h', row 1, is missing, 1 of 1 such rows: leave"):
        functions_of_table({"t": np.arange(3.0), "h": missing}, ["t"], ["h"])
    in_two = [[value] for value in missing] if isinstance(missing, list) else missing
    if isinstance(in_two, Column):
        in_two = Column(in_two.values[:, None])
    elif not isinstance(in_two, list):
        in_two = in_two[:, None]
    with pytest.raises(ValueError, match=r"y of function 0, row 1, is \[nan\]: it must be finite"):
        FunctionTasks([(np.zeros((3, 1)), in_two)], **SIZES)


def test_a_null_of_duckdb_or_arrow_is_missing_and_an_error_prints_no_data():
    duckdb, arrow = pytest.importorskip("duckdb"), pytest.importorskip("pyarrow")
    relation = duckdb.sql("from (values (0.0, 5.0), (1.0, null), (2.0, 7.0)) as _(t, h)")
    ((x, _),) = functions_of_table(relation.filter("h is not null"), ["t"], ["h"])
    assert x.tolist() == [[0.0], [2.0]]
    table = arrow.table({"t": [0.0, 1.0], "h": [5, None], "id": ["a", None]})
    assert_refused(
        *((lambda t=t: functions_of_table(t, ["t"], ["h"]), "column 'h', row 1, is missing")
          for t in (relation, relation.fetchnumpy(), table)),
        (lambda: functions_of_table(table, ["t"], ["t"], by="id"),
         "column 'id', row 1, is missing: every row must name its"),
        (lambda: functions_of_table(table, ["t"], ["y"]), "column 'y': it has 't', 'h', 'id'$"),
    )  # fmt: skip


DAYS = np.datetime64("2026-01-01") + np.arange(2)
SINCE = r"subtract an origin and divide by a unit, as \(t - t0\) / np.timedelta64"
TIMES = [
    (DAYS, "datetime64.D.", SINCE),
    (DAYS.astype("M8[ns]"), "datetime64.ns.", SINCE),
    (DAYS.tolist(), "date", SINCE),
    (DAYS.astype("M8[s]").tolist(), "datetime", SINCE),
    (np.array(["2026-01-01", "NaT"], "M8[s]"), "datetime64.s.", SINCE),
    (DAYS - DAYS[0], "timedelta64.D.", "divide by a unit, as t / np.timedelta64"),
    ((DAYS - DAYS[0]).tolist(), "timedelta", "divide by a unit, as t / np.timedelta64"),
]


@pytest.mark.parametrize("times, kind, advice", TIMES)
def test_times_have_no_unit_until_somebody_chooses_one(times, kind, advice):
    message = f"holds {kind}, not numbers: {advice}"
    with pytest.raises(ValueError, match=f"column 't' {message}"):
        functions_of_table({"t": times, "h": np.ones(2)}, ["t"], ["h"])
    in_two = [[time] for time in times] if isinstance(times, list) else times[:, None]
    with pytest.raises(ValueError, match=f"x of function 0 {message}"):
        FunctionTasks([(in_two, np.ones((2, 1)))], **SIZES)
    days = functions_of_table({"t": [0.0, 1.0], "h": np.ones(2), "day": DAYS}, ["t"], ["h"], "day")
    assert len(days) == 2


@pytest.mark.parametrize(
    "column",
    [
        np.array([True, False]),
        torch.tensor([True, False]),
        torch.tensor([1.0, 0.0]).bfloat16(),
        torch.tensor([1.0, 0.0], requires_grad=True),
        ["1", "0"],
    ],
    ids=["bools", "tensor of bools", "bfloat16", "with a gradient", "text"],
)
def test_a_column_of_numbers_may_be_of_any_type(column):
    ((_, y),) = functions_of_table({"t": [0.0, 1.0], "h": column}, ["t"], ["h"])
    assert y.dtype == torch.float64 and y.tolist() == [[1.0], [0.0]] and not y.requires_grad


def test_a_frame_or_a_grid_with_names_of_any_kind_is_a_table():
    class Frame(dict):
        columns = [0, ("a", "t"), "h"]

    class Grid:  # a Dataset of xarray
        def to_dataframe(self) -> "Grid":
            return self

        def reset_index(self) -> Frame:
            return frame

    frame = Frame({0: [3, "3", 3], ("a", "t"): [1.0, 2.0, 3.0], "h": [5.0, 6.0, 7.0]})
    for table in (frame, Grid()):
        found = functions_of_table(table, [("a", "t")], ["h"], by=0)
        assert [x.tolist() for x, _ in found] == [[[1.0], [3.0]], [[2.0]]]
    with pytest.raises(ValueError, match=r"no column 't': it has 0, \('a', 't'\), 'h'$"):
        functions_of_table(frame, ["t"], ["h"])


def test_a_csv_of_one_row_and_one_with_a_byte_order_mark():
    def read(text: str) -> np.ndarray:
        return np.genfromtxt(io.StringIO(text), delimiter=",", names=True)

    ((x, y),) = functions_of_table(read("t,h\n1,2\n"), ["t"], ["h"])
    assert (x.tolist(), y.tolist()) == ([[1.0]], [[2.0]])
    with pytest.raises(ValueError, match=r"no column 't': it has '\\ufefft', 'h'"):
        functions_of_table(read("\ufefft,h\n1,2\n"), ["t"], ["h"])
    with pytest.raises(ValueError, match="its function .np.genfromtxt reads numbers: use pandas"):
        functions_of_table(read("t,h\n1,a\n2,3\n"), ["t"], ["t"], by="h")


def test_what_is_no_table_or_no_list_is_named():
    table = {"t": [0.0, 1.0], "h": [5.0, 6.0]}
    assert_refused(
        *((lambda t=t: functions_of_table(t, ["t"], ["h"]),
           f"table is a {type(t).__name__}: it must hold columns by name")
          for t in ("a.csv", [{"t": 1.0}], None, torch.ones(2))),
        *((lambda f=f: FunctionTasks(f, **SIZES),
           f"functions is a {type(f).__name__}: it must be a list of pairs")
          for f in (np.zeros((2, 2)), {"x": 1}, "ab", iter(functions(5)))),
        error=TypeError,
    )  # fmt: skip
    with pytest.raises(ValueError, match="x is 't': it must be a list of names of columns"):
        functions_of_table(table, "t", ["h"])


def test_collated_tasks_are_padded_to_the_largest():
    def ones(batch, m, n, **options):
        return Task(*(torch.ones(batch, n, 1, **options) for n in (m, m, n, n)))

    small, large = ones(2, 3, 4), ones(1, 5, 2)
    batch = collate([small, large])
    assert batch.context_lengths.tolist() == [3, 3, 5]
    assert batch.target_lengths.tolist() == [4, 4, 2]
    assert collate([batch, large]).context_lengths.tolist() == [3, 3, 5, 5]
    assert collate([small, small]).context_lengths is None
    wide, there = Task(*(torch.ones(1, 3, d) for d in (2, 1, 2, 1))), ones(1, 3, 3, device="meta")
    assert_refused(
        (lambda: collate([]), "there is no task to collate"),
        (lambda: collate([small, wide]), "d_x 1, d_y 1 and d_x 2, d_y 1 cannot be in one batch"),
        (lambda: collate([small, there]), "tasks on cpu and meta cannot be in one batch"),
    )
    with pytest.raises(TypeError, match="tasks to collate: number 1 is a tuple: all must be a tnp"):
        collate([small, tuple(small)])


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
        (
            {"functions": [(np.array([["a"]]), np.zeros((1, 1)))]},
            "x of function 0, row 0, holds 'a', not a",
        ),
        (
            {"n_context": (40, 90)},
            "n_context begins at 40, but no function has more than 40 points, one of them a "
            "target: let it begin at 39 or less",
        ),
        ({"n_context": 4}, "n_context is 4: it must be the smallest and the largest number"),
        ({"n_context": (0, 4)}, "the smallest n_context is 0: it must be a whole number, at least"),
        ({"n_target": (5, 4)}, "the largest n_target is 4: it must be a whole number, at least 5"),
        ({"seed": -1}, "seed is -1: it must be a whole number, at least 0"),
        ({"batch": 0}, "batch is 0"),
        ({"n_target": (2.0, 4)}, "the smallest n_target is 2.0: it must be a whole number"),
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
