"""A small form of `python -m tests.faults`, of less than a minute."""

from functools import partial
from pathlib import Path
from random import Random

import duckdb
import pytest

from tests.faults import configurations, disks, files, kills
from tnp.store.schemas import TABLES

# The figures, which take longest, are left out.
SMALL = {
    "kills": (partial(kills.run, target="measurements"), 1),
    "configurations": (configurations.run, 100),
    "files": (files.run, len(files.FAULTS)),
    "disks": (disks.run, 4),
}


@pytest.mark.parametrize("kind", SMALL)
def test_nothing_is_lost_and_nothing_false(kind: str, tmp_path: Path) -> None:
    run, n = SMALL[kind]
    assert not run(n, tmp_path, Random(0))


@pytest.mark.parametrize(
    ("runs", "n_kills", "n_found"),
    [(["a"], 0, 0), (["a", "a"], 0, 1), (["a", "a"], 1, 1), (["a", "b"], 0, 1), (["a", "b"], 1, 0)],
)
def test_a_row_that_counts_twice_is_noticed(
    runs: list[str], n_kills: int, n_found: int, tmp_path: Path
) -> None:
    database = tmp_path / "results.duckdb"
    with duckdb.connect(str(database)) as store:
        for table, schema in TABLES.items():
            empty = schema.empty_table()  # noqa: F841 (named in the query)
            store.sql(f"create table {table} as from empty")
        for run in runs:
            store.sql(f"insert into steps (config_id, run_id) values ('small', '{run}')")
    assert len(kills.counted_twice(database, n_kills)) == n_found
