"""Tests measurements that do not end well."""

import tempfile

import pyarrow as pa
import pytest
import torch

from tests.bench.configurations import op_parameters, step_parameters
from tests.bench.processes import PATIENCE_S, is_alive, past_its_limit, without_torch
from tnp.bench.isolate import run_isolated
from tnp.experiment.failures import TRANSIENT, Unsupported, classify
from tnp.store.schemas import TABLES

STUB = """
import sys, types
steps = types.ModuleType("tnp.bench.steps")
source = '''
import os, signal, sys, time
def measure_step(parameters, started, note):
{body}
'''
exec(source, steps.__dict__)
sys.modules["tnp.bench.steps"] = steps
"""


@pytest.fixture(autouse=True)
def own_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def instead_of_a_step(tmp_path, monkeypatch):
    """Makes the child run these lines instead of measuring a step."""

    def install(*lines: str) -> None:
        body = "\n".join(f"    {line}" for line in lines)
        without_torch(tmp_path, sitecustomize=STUB.format(body=body))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


def the_row(tables: dict) -> dict:
    """Returns the single row of table "steps"; every table fits its schema."""
    for name, rows in tables.items():
        for row in rows:
            assert set(row) <= set(TABLES[name].names)
        pa.Table.from_pylist(rows, schema=TABLES[name])
    (row,) = tables["steps"]
    assert row["config_id"] == step_parameters()["config_id"]
    assert row["device"] == "cpu" and row["recorded_at"] is not None
    (environment,) = tables["environments"]
    assert row["environment_id"] == environment["environment_id"] is not None
    return row


def test_without_a_fault_it_is_measured():
    tables = run_isolated("step", step_parameters(), PATIENCE_S)
    assert the_row(tables)["status"] == "ok"
    assert set(tables) == {"steps", "samples", "code", "environments"}


DIES = "os.kill(os.getpid(), signal.{})"
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 20 GiB."
ENDS = {
    "while it looks for stages, the step is measured": (
        "ok", "", "step = {'config_id': parameters['config_id'], 'status': 'ok', 'reason': ''}",
        "note({'steps': [step]})", DIES.format("SIGSEGV"),
    ),
    "after the result, nothing is lost": (
        "ok", "no reason given", "import atexit", "from tnp.bench.outcome import failure_rows",
        "atexit.register(os.kill, os.getpid(), signal.SIGSEGV)",
        "return failure_rows('step', parameters, 'ok', '')",
    ),
    "by an exception": (
        "oom", OUT_OF_MEMORY,
        f"import torch; raise torch.OutOfMemoryError('{OUT_OF_MEMORY}\\\\nmore')",
    ),
    "by an exit without a result": (
        "error", "CUDA error: illegal access",
        "print('CUDA error: illegal access', file=sys.stderr)", "os._exit(3)",
    ),
    "by a crash": ("error", "crashed by signal SIGSEGV", DIES.format("SIGSEGV")),
    "by kill -9": (
        "killed", "killed by signal SIGKILL, as the kernel does when host memory runs out",
        DIES.format("SIGKILL"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("end", ENDS)
def test_the_end_of_a_process_is_a_row(end, instead_of_a_step, capfd):
    status, reason, *lines = ENDS[end]
    instead_of_a_step(*lines)
    row = the_row(run_isolated("step", step_parameters(), PATIENCE_S))
    assert (row["status"], row["reason"]) == (status, reason)
    assert ("Traceback" in capfd.readouterr().err) == (status == "oom")


def too_much() -> None:
    torch.empty(10**16)


def missing() -> None:
    raise Unsupported("needs a CUDA device")


@pytest.mark.parametrize(
    ("raising", "status", "reason"),
    [
        (too_much, "killed", "host memory ran out: "),
        (missing, "unsupported", "needs a CUDA device"),
        (lambda: {}["no such weight"], "error", "KeyError: 'no such weight'"),
    ],
)
def test_an_exception_has_a_status_and_a_reason(raising, status, reason):
    with pytest.raises(Exception) as raised:
        raising()
    found, said = classify(raised.value)
    assert found == status and said.startswith(reason)
    assert (status in TRANSIENT) == (status == "killed")


def test_the_time_limit_is_a_row_and_nothing_runs_on(instead_of_a_step, tmp_path):
    instead_of_a_step(
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))", "time.sleep(600)"
    )
    tables, limit_s = past_its_limit(
        lambda limit_s: run_isolated("step", step_parameters(), limit_s), tmp_path / "pid"
    )
    row = the_row(tables)
    assert (row["status"], row["reason"]) == ("timeout", f"no progress in {limit_s} s")
    assert not is_alive(int((tmp_path / "pid").read_text()))


# Measures in no time, and ends the process as `how` says.
OP_STUB = """
import os, signal, sys, types
from tnp.bench.outcome import failure_rows

contenders = types.ModuleType("tnp.bench.contenders")
contenders.listed = lambda parameters: {{}}

def measure_op(parameters, started, suspect):
    names = list(parameters["implementations"])
    with open({calls!r}, "a") as calls:
        print(*names, file=calls)
    for name in names:
        suspect([name])
        if (name, {how!r}) == ("sdpa_cudnn", "preparing"):
            os.kill(os.getpid(), signal.SIGSEGV)
        if (name, {how!r}) == ("sdpa_cudnn", "losing the device"):
            raise RuntimeError("CUDA error: an illegal memory access")
    suspect(names)
    if "sdpa_cudnn" in names and {how!r} == "in the rounds":
        os.kill(os.getpid(), signal.SIGSEGV)
    return failure_rows("op", parameters, "ok", "")

measure = types.ModuleType("tnp.bench.measure")
measure.measure_op = measure_op
sys.modules |= {{"tnp.bench.measure": measure, "tnp.bench.contenders": contenders}}
"""
ALL, CRASHED = "sdpa_flash sdpa_cudnn flex", "crashed by signal SIGSEGV"


@pytest.mark.parametrize(
    ("how", "reason", "groups"),
    [
        ("preparing", CRASHED, [ALL, "sdpa_flash flex"]),
        ("losing the device", "RuntimeError: CUDA error: an illegal", [ALL, "sdpa_flash flex"]),
        # Nobody knows who it was.
        ("in the rounds", CRASHED, [ALL, *ALL.split()]),
    ],
)
def test_who_ends_a_job_is_left_out_and_the_others_are_measured_again(
    tmp_path, monkeypatch, how, reason, groups
):
    """Three implementations are measured, of which the second ends the process."""
    calls, ids = tmp_path / "calls", {name: f"attention--tiny--{name}" for name in ALL.split()}
    without_torch(tmp_path, sitecustomize=OP_STUB.format(calls=str(calls), how=how))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    rows = run_isolated("op", op_parameters(implementations=ids), PATIENCE_S)["ops"]
    pa.Table.from_pylist(rows, schema=TABLES["ops"])
    assert calls.read_text().splitlines() == groups
    assert len(rows) == 6 and {row["config_id"] for row in rows} == set(ids.values())
    found = {row["implementation"]: row for row in rows if row["pass"] == "forward"}
    assert {name: row["status"] for name, row in found.items()} == {
        "sdpa_flash": "ok", "sdpa_cudnn": "error", "flex": "ok"
    }  # fmt: skip
    assert found["sdpa_cudnn"]["reason"].startswith(reason)
    together = found["sdpa_flash"]["recorded_at"] == found["flex"]["recorded_at"]
    assert together == (len(groups) == 2)
