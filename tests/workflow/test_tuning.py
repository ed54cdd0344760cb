"""Tests that the winners of a tuning stand in the device's table."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tnp.dispatch import tuned_tables
from tnp.ops.swiglu import OPERATOR
from tnp.store.files import write_table

ROOT = Path(__file__).parents[2]


SCRIPT = """
import json, runpy, sys
from pathlib import Path
from types import SimpleNamespace
from tnp.dispatch import tuned_tables as choice

choice.COMMITTED = Path(sys.argv[1])
files = SimpleNamespace(**json.loads(sys.argv[2]))
device = SimpleNamespace(device="nvidia-h200")
asked = SimpleNamespace(input=files, params=device, log=[sys.argv[3]])
runpy.run_path("workflow/scripts/tune.py", {"snakemake": asked})
"""


@pytest.fixture
def tune(tmp_path):
    """Runs the rule's script over rows of table "ops"; what it says, and the table's entries."""

    def run(trials: list[dict], timed: list[dict]) -> tuple[str, tuple[tuned_tables.Entry, ...]]:
        common = {"device": "nvidia-h200", "recorded_at": datetime(2026, 2, 1, tzinfo=UTC)}
        files = {"environments": []}
        environment = [{"environment_id": "e", "compute_capability": "9.0"}]
        for name, table, rows in (("trials", "ops", trials), ("ops", "ops", timed),
                                  ("environments", "environments", environment)):  # fmt: skip
            files[name] = [str(tmp_path / f"{name}.parquet")] if rows else []
            write_table(tmp_path / f"{name}.parquet", table, [common | row for row in rows])
        arguments = [str(tmp_path), json.dumps(files), str(tmp_path / "tune.log")]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, cwd=ROOT
        )
        tuned_tables.refresh()
        return done.stderr, tuned_tables.table(tmp_path / "nvidia-h200.json")

    yield run
    tuned_tables.refresh()


def test_the_script_enters_what_won(tune):
    problem = OPERATOR.problem("bfloat16", rows=8, width=64)
    common = {"op": "swiglu", "problem": problem.json, "pass": "forward", "status": "ok"}
    trials = [
        common | {"implementation": "triton", "time_ms_p50": ms}
        | {"forced": json.dumps({"swiglu.forward": ["triton", {"block": block}]})}
        for block, ms in ((1, 2.0), (2, 1.0))
    ]  # fmt: skip
    timed = [
        common | {"implementation": name, "time_ms_p50": ms}
        for name, ms in (("torch", 2.0), ("triton", 1.0))
    ]
    said, entries = tune(trials, timed)
    assert "1 kernels and 1 implementations" in said, said
    found = {(one["of"], one["mode"]): (one["choice"], one.get("config")) for one in entries}
    assert found == {
        ("swiglu.forward", ""): ("triton", {"block": 2}),
        ("swiglu", "inference"): ("triton", None),
    }
    assert {one["capability"] for one in entries} == {90}


def test_where_nothing_was_measured_the_script_says_so(tune):
    said, entries = tune([], [])
    assert "no timed rows" in said and entries == ()
