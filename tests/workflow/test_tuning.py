"""What `snakemake tune` measures, and that what won stands in the device's table."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
import yaml

from tnp.dispatch import tuned_tables
from tnp.dispatch.registry import catalog
from tnp.ops.swiglu import OPERATOR
from tnp.store.files import write_table
from workflow import operator_plan, plan

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())
HERE = (CONFIG, "cuda", "nvidia-h200")
WITHOUT = {name: section for name, section in CONFIG.items() if name != "tuning"}


def test_an_operation_that_two_implementations_share_is_tuned_once():
    jobs = operator_plan.tuning(*HERE)
    of_mid = {name: one for name, one in jobs.items() if "--mid--" in name}
    assert {name: (list(one["forced"]), one["passes"]) for name, one in of_mid.items()} == {
        "tuning--attention--mid--forward": (["separate"], ["forward"]),
        "tuning--attention--mid--separate": (["separate"], ["backward"]),
        "tuning--attention--mid--fused": (["fused"], ["backward"]),
        "tuning--attention--mid--forward_8bit": (["e4m3"], ["forward"]),
    }
    for name, one in jobs.items():
        assert one["forced"] == {contender: {} for contender in one["implementations"]}
        assert (one["study"], one["config_id"]) == ("tuning", name)
    assert {one["shape"] for one in jobs.values()} == set(CONFIG["tuning"]["shapes"])


def test_trials_are_no_part_of_what_is_measured_anyway():
    assert not operator_plan.tuning(*HERE).keys() & plan.ops(*HERE).keys()
    assert (
        operator_plan.tuning(CONFIG, "cpu", "cpu") == operator_plan.tuning(WITHOUT, *HERE[1:]) == {}
    )


def test_implementations_are_chosen_by_the_benchmarks_at_the_shapes_to_tune():
    ops = plan.ops(*HERE)
    jobs = operator_plan.deciding(CONFIG, ops)
    assert ("attention--large", 2) in jobs and ("mlp--small", 1) in jobs
    tuned = {ops[name]["shape"] for name, _ in jobs}
    assert tuned == set(CONFIG["tuning"]["shapes"])
    for op in {ops[name]["op"] for name, _ in jobs}:
        known, timed = catalog(), set(CONFIG["ops"][op]["implementations"])
        assert set(known.candidates(op, "auto")) - set(known.installed(op)) <= timed
        assert set(CONFIG["ops"][op]["shapes"]) - tuned  # where nothing was tuned
    assert operator_plan.deciding(CONFIG, plan.ops(CONFIG, "cpu", "cpu")) == []
    assert operator_plan.deciding(WITHOUT, ops) == []


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
    assert "nothing to do" in said and entries == ()
