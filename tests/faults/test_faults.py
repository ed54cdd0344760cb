"""A small form of `python -m tests.faults`, of less than a minute."""

import signal
import subprocess
import time
from pathlib import Path
from random import Random

import duckdb
import pytest

from tests.faults import configurations, disks, files, kills
from tnp.store.schemas import TABLES

SMALL = {
    "configurations": (configurations.run, 100),
    "files": (files.run, len(files.FAULTS)),
    "disks": (disks.run, 4),
}


@pytest.mark.parametrize("kind", SMALL)
def test_nothing_is_lost_and_nothing_false(kind: str, tmp_path: Path) -> None:
    run, n = SMALL[kind]
    assert not run(n, tmp_path, Random(0))


def test_a_killed_workflow_goes_on_where_it_was(tmp_path: Path) -> None:
    """It is killed while a step is measured; the gate before it stays, the training comes after.

    The figures, which take longest, are left out.
    """
    workflow = kills.Workflow(tmp_path, "measurements")

    def until_a_step_is_measured(process: subprocess.Popen) -> None:
        while process.poll() is None and not list(tmp_path.glob("data/runs/cpu/logs/cpu--*.log")):
            time.sleep(0.02)

    assert kills.killed(workflow, until_a_step_is_measured, signal.SIGKILL) == (True, [])
    (gate,) = tmp_path.glob("data/runs/cpu/gates/*.parquet")
    written = gate.stat()
    assert not list(tmp_path.glob("data/runs/cpu/steps/*"))
    assert workflow.finish() == workflow.torn() == workflow.left_over() == []
    assert gate.stat() == written and len(list(gate.parent.iterdir())) == 1
    rows = kills.identities(workflow.store())
    empty = {table for table, found in rows.items() if not found}
    assert not empty & {"gates", "code", "steps", "samples", "environments"}
    assert [row[-1] for row in rows["training"]] == list(range(0, 101, 5))
    assert not kills.counted_twice(tmp_path / "measured.duckdb")


@pytest.mark.parametrize(("runs", "n_found"), [(["a"], 0), (["a", "a"], 1), (["a", "b"], 1)])
def test_a_row_that_counts_twice_is_noticed(runs: list[str], n_found: int, tmp_path: Path) -> None:
    database = tmp_path / "results.duckdb"
    with duckdb.connect(str(database)) as store:
        for table, schema in TABLES.items():
            empty = schema.empty_table()  # noqa: F841 (named in the query)
            store.sql(f"create table {table} as from empty")
        for run in runs:
            store.sql(f"insert into steps (config_id, run_id) values ('small', '{run}')")
    assert len(kills.counted_twice(database)) == n_found
