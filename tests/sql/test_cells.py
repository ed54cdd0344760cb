"""Tests that recorded rows give the same cells in every view as before."""

import pyarrow as pa

from tests.sql.cells import changed, digest


def test_every_cell_over_the_recorded_rows_is_what_it_was(recorded_database):
    differs = changed(recorded_database)
    assert differs == [], "where that is meant: python -m tests.sql.cells --write"


def test_a_digest_sees_a_cell_and_which_row_it_is_in():
    rows = {"a": [1.0, 2.0], "b": ["x", "y"]}
    same = digest(pa.table({"a": [2.0, 1.0], "b": ["y", "x"]}))
    assert digest(pa.table(rows)) == same
    assert digest(pa.table(rows | {"c": [0, 0]}), ["a", "b"]) == same
    assert digest(pa.table(rows | {"a": [1.0, 2.1]}))["a"] != same["a"]
    assert digest(pa.table(rows | {"b": ["y", "x"]}))["b"] != same["b"]
