"""Trials of a problem's candidates, who wins them, and what `snakemake tune` makes of it."""

import json
import math
import os
import time
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest
import torch
import yaml

from tests.bench.configurations import TIMING
from tests.workflow.conftest import Checkout
from tnp import choice, plans
from tnp.bench import tuning
from tnp.contract import Kernel
from tnp.gates import GATES
from tnp.ops.attention import OPERATOR
from tnp.schemas import TABLES
from tnp.store import build_database, read_table, write_table
from workflow import tuning_plan

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 2, 1, 10, 0, tzinfo=UTC)


def parameters(**changes) -> dict:
    return {
        "operation": "forward",
        "shape": "tiny",
        "batch": 2,
        "n_q": 21,
        "n_k": 13,
        "n_heads": 2,
        "head_dim": 16,
        "dtype": "float32",
        "timing": TIMING,
        "device": "cpu",
        "device_slug": "cpu",
    } | changes


@dataclass(frozen=True)
class Config:
    """Of a kernel that is no kernel: what its result is multiplied by, and how long it takes."""

    factor: float = 1.0
    seconds: float = 0.0


def prepare(call, config, inputs):
    def launch(inputs, scalars):
        q, k, v, _n_keys = inputs
        time.sleep(config.seconds)
        if config.factor == 0:
            raise RuntimeError("out of resource: shared memory")
        if config.factor < 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        p = torch.softmax(scalars[0] * q @ k.mT, -1)
        return (p @ v * config.factor,), (p.sum(-1),)

    return launch


@pytest.fixture
def trials(monkeypatch):
    """Rows of the trials of these configurations; a second kernel cannot serve the problem."""

    def measure(*configs: Config) -> list[dict]:
        first = Kernel("first", None, prepare, configs=lambda call: configs)
        second = replace(first, name="second", supported=lambda call: "it is not")
        found = {kernel.name: kernel for kernel in (first, second)}
        monkeypatch.setattr(plans, "kernels_of", lambda *_: found)
        rows = tuning.measure_trials(parameters(), time.perf_counter())
        pa.Table.from_pylist(rows, schema=TABLES["trials"])
        return rows

    return measure


def test_every_candidate_is_a_row(trials):
    slow, fast = trials(Config(seconds=0.01), Config(1.00005))
    assert (slow["status"], fast["status"]) == ("ok", "ok")
    assert (slow["is_default"], fast["is_default"]) == (True, False)
    assert (fast["kernel"], json.loads(fast["launch_config"])) == ("first", asdict(Config(1.00005)))
    assert slow["time_ms_min"] >= 10 and fast["time_ms_min"] > 0
    assert slow["n_samples"] == TIMING["min_samples"]
    assert slow["max_relative_error"] == 0
    assert fast["max_relative_error"] == pytest.approx(5e-5, rel=0.01)
    assert min(slow[name] for name in ("setup_s", "compile_s", "measure_s")) > 0


def test_what_fails_is_a_row_and_the_others_are_timed(trials):
    factors = (0, 1, 1.5, math.nan, -1, 1.00005)
    rows = trials(*map(Config, factors))
    assert [row["status"] for row in rows] == ["error", "ok", "error", "error", "oom", "ok"]
    assert rows[0]["reason"] == "RuntimeError: out of resource: shared memory"
    assert rows[2]["max_relative_error"] == pytest.approx(0.5)
    assert "off by 5.00e-01" in rows[2]["reason"] and "time_ms_p50" not in rows[2]
    assert rows[4]["reason"] == "CUDA out of memory."


@pytest.mark.parametrize("operation", tuning.OPERATIONS)
def test_every_operation_runs_as_it_is_launched(operation):
    rows = tuning.measure_trials(parameters(operation=operation), time.perf_counter())
    assert {row["status"] for row in rows} == {"ok"}
    assert {row["capability"] for row in rows} == {0}
    assert [row["is_default"] for row in rows] == [True] + [False] * (len(rows) - 1)


# In every process of the test: a kernel that ends it, then ours.
CRASHING = """
import os
from dataclasses import replace
from tnp.contract import anywhere
from tnp.ops.attention import few_keys, triton_forward

def crash(call, config, inputs):
    os.kill(os.getpid(), 11)

few_keys.FORWARD = replace(
    few_keys.FORWARD, name="crashing", prepare=crash, supported=anywhere,
    configs=triton_forward.FORWARD.configs,
)
"""


def test_a_candidate_that_ends_the_process_is_left_out(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(CRASHING)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    tables = tuning.tune(parameters(n_k=130), 600)
    first, *others = tables["trials"]
    assert (first["kernel"], first["status"]) == ("crashing", "error")
    assert first["reason"] == "crashed by signal SIGSEGV"
    assert others and {row["status"] for row in others} == {"ok"}
    (state,) = tables["environments"]
    for row in tables["trials"]:
        assert (row["device"], row["environment_id"]) == ("cpu", state["environment_id"])
    for table, rows in tables.items():
        pa.Table.from_pylist(rows, schema=TABLES[table])


def test_a_problem_that_is_too_large_is_one_row():
    (row,) = tuning.tune(parameters(batch=10**6, n_q=10**9), 600)["trials"]
    assert (row["status"], row.get("kernel"), row["operation"]) == ("killed", None, "forward")


def test_the_time_limit_is_one_row():
    (row,) = tuning.tune(parameters(), 0.1)["trials"]
    assert (row["status"], row["reason"]) == ("timeout", "not finished after 0.1 s")


def trial(launch_config: str, time_ms: float | str, **columns) -> dict:
    """A row of a trial from its time, or the status it failed with."""
    row = {"device": "gpu", "recorded_at": NOW, "capability": 90, "kernel": "triton"}
    row |= {name: value for name, value in parameters().items() if name in tuning.PROBLEM}
    row |= {"launch_config": launch_config, "is_default": launch_config == "default"}
    if isinstance(time_ms, str):
        return row | {"status": time_ms, "reason": f"because {time_ms}"} | columns
    return row | {"status": "ok", "time_ms_p50": time_ms, "measure_s": 2.0} | columns


@pytest.fixture
def view(tmp_path):
    """Rows of view `tuning` over files of trials."""

    def query(*files: list[dict], origin: str = "runs") -> list[dict]:
        paths = [tmp_path / origin / "gpu/trials" / f"{i}.parquet" for i in range(len(files))]
        for path, rows in zip(paths, files, strict=True):
            write_table(path, "trials", rows)
        database = tmp_path / "results.duckdb"
        build_database(paths, ROOT / "workflow/sql", database)
        with duckdb.connect(str(database), read_only=True) as connection:
            query = "from tuning order by device, shape, operation"
            return connection.sql(query).to_arrow_table().to_pylist()

    return query


@pytest.mark.parametrize(
    ("times", "winner", "default_stays"),
    [
        ((1.0, 0.9, 0.8), "b", False),
        ((1.0, 0.995, 2.0), "default", True),
        ((1.0, 1.2, 2.0), "default", True),
        (("oom", 1.2, 2.0), "a", False),
        ((1.0, "error", "oom"), "default", True),
    ],
)
def test_the_fastest_wins_where_it_is_clearly_faster(view, times, winner, default_stays):
    (row,) = view([trial(name, ms) for name, ms in zip(("default", "a", "b"), times, strict=True)])
    assert (row["launch_config"], row["default_stays"]) == (winner, default_stays)
    assert row["n_trials"] == 3
    assert row["n_ok"] == sum(not isinstance(time, str) for time in times)
    if times == (1.0, 0.9, 0.8):
        assert row["margin"] == pytest.approx(0.25)
        assert (row["default_time_ms"], row["best_time_ms"]) == (1.0, 0.8)


def test_where_nothing_ran_nothing_wins(view):
    (row,) = view([trial(None, "timeout", kernel=None, is_default=None)])
    assert (row["kernel"], row["n_trials"], row["n_ok"]) == (None, 0, 0)
    assert row["first_failure"] == "because timeout"


def test_problems_are_apart_and_the_last_tuning_counts(view):
    later = {"recorded_at": NOW + timedelta(hours=1)}
    rows = view(
        [trial("default", 1.0), trial("gone", 0.1)],
        [trial("default", 3.0, **later), trial("new", 2.0, **later)],
        [trial("default", 7.0, operation="fused")],
        [trial("default", 8.0, device="other")],
    )
    assert [row["best_time_ms"] for row in rows] == [2.0, 7.0, 8.0]
    assert (rows[0]["launch_config"], rows[0]["n_trials"]) == ("new", 2)


CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())


def test_every_operation_at_every_shape_is_a_problem():
    problems = tuning_plan.problems(CONFIG, "cuda", "nvidia-h200")
    shapes, operations = CONFIG["tuning"]["shapes"], CONFIG["tuning"]["operations"]
    assert set(problems) == {f"{op}--{shape}" for op in operations for shape in shapes}
    fused = problems["fused--mid"]
    assert (fused["n_q"], fused["n_k"], fused["head_dim"]) == (11_000, 10_000, 64)
    assert set(tuning.PROBLEM) <= set(fused)


def test_without_a_gpu_or_a_section_there_is_no_problem():
    assert tuning_plan.problems(CONFIG, "cpu", "cpu") == {}
    without = {name: section for name, section in CONFIG.items() if name != "tuning"}
    assert tuning_plan.problems(without, "cuda", "nvidia-h200") == {}


def test_trials_depend_on_the_kernels_and_not_on_the_table():
    files = tuning_plan.source_files()
    assert {"tnp/ops/attention/few_keys.py", "tnp/bench/tuning.py"} <= set(files)
    assert not any(file.endswith((".json", "peers.py")) for file in files)


FAKE_GPU = """
def device_slug():
    return "nvidia-h200"
"""
FAKE_TUNE = """
def tune(parameters, timeout_s):
    import os

    with open("calls", "a") as calls:
        print(parameters["operation"], parameters["shape"], file=calls)
    common = {name: parameters[name] for name in PROBLEM} | {"status": "ok", "capability": 90}
    wide = {"kernel": "triton", "launch_config": '{"block_m": 9}', "time_ms_p50": 1.0}
    narrow = {"kernel": "hopper", "launch_config": '{"block_m": 7}', "time_ms_p50": 2.0}
    trials = [common | narrow | {"is_default": True}, common | wide | {"is_default": False}]
    if parameters["shape"] == "larger":
        trials[1]["time_ms_p50"] = 1.99
    if os.environ.get("FAKE_KILLED") == f"{parameters['operation']} {parameters['shape']}":
        trials[1] |= {"status": "killed", "time_ms_p50": None}
    return with_provenance({"trials": trials, "environments": []}, "nvidia-h200", None)
"""


def test_the_rule_enters_the_winners_in_the_table(tmp_path):
    checkout = Checkout(tmp_path / "checkout")
    checkout.append("tnp/bench/tuning.py", FAKE_TUNE)
    table = checkout.folder / "tnp/tuned/nvidia-h200.json"
    problem = OPERATOR.problem("bfloat16", batch=2, n_heads=2, n_q=64, n_k=64, head_dim=32)
    other = choice.entry("attention.forward", problem, "triton", {})
    before = {"version": choice.VERSION, "capability": 90, "entries": [other]}
    table.write_text(json.dumps(before))
    checkout.config["shapes"]["larger"] = {"batch": 2, "n_context": 30, "n_target": 2}
    checkout.config["tuning"] = {
        "shapes": ["larger", "tiny"],
        "operations": ["forward", "fused"],
        "dtype": "bfloat16",
    }
    status, output = checkout.run("tune")
    assert status == 0 and "nothing to do" in output, output
    assert json.loads(table.read_text()) == before and not checkout.calls()

    checkout.append("tnp/bench/provenance.py", FAKE_GPU)
    checkout.config["device"] = "auto"
    status, output = checkout.run("tune", FAKE_KILLED="fused tiny")
    assert status == 0, output
    assert sorted(checkout.calls()) == [
        "forward larger",
        "forward tiny",
        "fused larger",
        "fused tiny",
    ]
    assert "1 of 4 problems have something better than the default" in output
    # What was killed is timed again, beside the rows that are there.
    checkout.forget_calls()
    status, output = checkout.run("tune")
    assert status == 0, output
    assert checkout.calls() == ["fused tiny"]
    files = sorted(checkout.folder.glob("data/runs/nvidia-h200/trials/fused--tiny*.parquet"))
    statuses = [read_table(file, "trials")["status"].to_pylist() for file in files]
    assert statuses == [["ok", "ok"], ["ok", "killed"]]
    assert [file.stem for file in files] == ["fused--tiny--a2", "fused--tiny"]
    assert "2 of 4 problems have something better than the default" in output
    entries = json.loads(table.read_text())["entries"]
    assert other in entries
    found = {(entry["of"], entry["problem"]["sizes"]["n_k"]): entry for entry in entries}
    for operation in ("forward", "fused"):
        for n_k, kernel, block_m in ((30, "hopper", 7), (24, "triton", 9)):  # larger, tiny
            entry = found[f"attention.{operation}", n_k]
            assert (entry["choice"], entry["config"]) == (kernel, {"block_m": block_m})


FAKE_OPERATORS = """
def run_isolated(kind, parameters, timeout_s):
    tables = failure_rows(kind, parameters, "ok", "")
    for row in tables["ops"]:
        row["time_ms_p50"] = {"sdpa_flash": 3.0, "fused": 2.0}.get(row["implementation"], 1.0)
    tables["environments"] = [{"compute_capability": "9.0"}]
    return with_provenance(tables, "nvidia-h200", "e")
"""


def test_the_rule_enters_the_fastest_implementations(tmp_path):
    checkout = Checkout(tmp_path / "checkout")
    checkout.append("tnp/bench/isolate.py", FAKE_OPERATORS)
    checkout.append("tnp/bench/tuning.py", FAKE_TUNE)
    table = checkout.folder / "tnp/ops/tuned/implementations.json"
    table.write_text("[]")
    checkout.append("tnp/bench/provenance.py", FAKE_GPU)
    checkout.config |= {"device": "cuda", "gates": [*GATES]}
    checkout.config["shapes"]["untuned"] = {"batch": 2, "n_context": 30, "n_target": 2}
    names = ["sdpa_flash", "fused", "fa4", "auto"]
    study = {"devices": ["cuda"], "shapes": ["tiny", "untuned"], "implementations": names}
    checkout.config["ops"]["attention"] = study | {"replicates": 1, "priority": 1}
    checkout.config["tuning"] = {
        "shapes": ["tiny"],
        "operations": ["forward"],
        "dtype": "bfloat16",
    }
    status, output = checkout.run("tune")
    assert status == 0 and "implementations of 1 operators and shapes" in output, output
    assert json.loads(table.read_text()) == [
        {
            "op": "attention",
            "capability": 90,
            "dtype": "bfloat16",
            "sizes": {"batch_heads": 4, "n_q": 32, "n_k": 24, "head_dim": 16},
            "implementation": "fused",
        }
    ]
