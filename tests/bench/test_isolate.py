"""What happens to a measurement that does not end well."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow as pa
import pytest

from tests.bench.configurations import op_parameters, step_parameters
from tests.bench.processes import PATIENCE_S, is_alive, past_its_limit, wait_until
from tnp.bench.isolate import run_isolated
from tnp.bench.process import ROOT
from tnp.experiment.failures import TRANSIENT
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
    """Have the child run these lines instead of measuring a step."""

    def install(*lines: str) -> None:
        body = "\n".join(f"    {line}" for line in lines)
        Path(tmp_path, "sitecustomize.py").write_text(STUB.format(body=body))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    return install


def the_row(tables: dict) -> dict:
    """The single row of table "steps"; every table fits its schema."""
    for name, rows in tables.items():
        for row in rows:
            assert set(row) <= set(TABLES[name].names)
        pa.Table.from_pylist(rows, schema=TABLES[name])
    (row,) = tables["steps"]
    assert row["config_id"] == step_parameters()["config_id"]
    assert row["device"] == "cpu" and row["recorded_at"] is not None
    return row


def test_without_a_fault_it_is_measured():
    tables = run_isolated("step", step_parameters(), PATIENCE_S)
    assert the_row(tables)["status"] == "ok"
    assert set(tables) == {"steps", "samples", "code", "environments"}


def test_a_process_that_dies_while_it_looks_for_stages_has_measured_all_the_same(instead_of_a_step):
    instead_of_a_step(
        "step = {'config_id': parameters['config_id'], 'status': 'ok', 'reason': ''}",
        "note({'steps': [step]})",
        "os.kill(os.getpid(), signal.SIGSEGV)",
    )
    assert the_row(run_isolated("step", step_parameters(), PATIENCE_S))["status"] == "ok"


def test_running_out_of_device_memory_is_a_row(instead_of_a_step):
    instead_of_a_step(
        "import torch",
        "raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 20 GiB.\\\\nmore')",
    )
    tables = run_isolated("step", step_parameters(), PATIENCE_S)
    row = the_row(tables)
    assert row["status"] == "oom" and row["status"] not in TRANSIENT
    assert row["reason"] == "CUDA out of memory. Tried to allocate 20 GiB."
    assert row["environment_id"] == tables["environments"][0]["environment_id"] is not None


def test_running_out_of_host_memory_is_a_row():
    row = the_row(run_isolated("step", step_parameters(batch=10**6, n_context=10**9), PATIENCE_S))
    assert row["status"] == "killed" and row["status"] in TRANSIENT
    assert row["reason"].startswith("host memory ran out: ")


def test_an_exception_is_a_row_and_its_traceback_is_shown(instead_of_a_step, capfd):
    instead_of_a_step("raise KeyError('no such weight')")
    row = the_row(run_isolated("step", step_parameters(), PATIENCE_S))
    assert row["status"] == "error"
    assert row["reason"] == "KeyError: 'no such weight'"
    assert "Traceback" in capfd.readouterr().err


def test_an_exit_without_a_result_is_a_row(instead_of_a_step):
    instead_of_a_step("print('CUDA error: illegal access', file=sys.stderr)", "os._exit(3)")
    row = the_row(run_isolated("step", step_parameters(), PATIENCE_S))
    assert (row["status"], row["reason"]) == ("error", "CUDA error: illegal access")


def test_a_segmentation_fault_is_a_row(instead_of_a_step):
    instead_of_a_step("os.kill(os.getpid(), signal.SIGSEGV)")
    row = the_row(run_isolated("step", step_parameters(), PATIENCE_S))
    assert (row["status"], row["reason"]) == ("error", "crashed by signal SIGSEGV")


def test_kill_9_is_a_row(instead_of_a_step):
    instead_of_a_step("os.kill(os.getpid(), signal.SIGKILL)")
    row = the_row(run_isolated("step", step_parameters(), PATIENCE_S))
    assert row["status"] == "killed"
    assert row["environment_id"] is not None


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


def test_what_a_device_cannot_run_is_a_row():
    row = the_row(run_isolated("step", step_parameters(cuda_graph=True), PATIENCE_S))
    assert row["status"] == "unsupported"
    assert "CUDA graph" in row["reason"]


def test_an_operator_that_cannot_run_is_two_rows():
    names = {"sdpa_cudnn": "attention--tiny--sdpa_cudnn"}
    tables = run_isolated("op", op_parameters(implementations=names), PATIENCE_S)
    assert [row["pass"] for row in tables["ops"]] == ["forward", "backward"]
    assert {row["status"] for row in tables["ops"]} == {"unsupported"}
    pa.Table.from_pylist(tables["ops"], schema=TABLES["ops"])


# Measures in no time, and ends the process as `how` says.
OP_STUB = """
import os, signal, sys, types
from tnp.bench.outcome import failure_rows

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
sys.modules["tnp.bench.measure"] = measure
"""
THREE = {name: f"attention--tiny--{name}" for name in ("sdpa_flash", "sdpa_cudnn", "flex")}


@pytest.fixture
def ended_by_the_second(tmp_path, monkeypatch):
    """Have three implementations measured, of which the second ends the process."""

    def measure(how: str) -> tuple[dict[str, dict], list[str]]:
        """Forward rows by implementation, and which were measured together."""
        calls = tmp_path / "calls"
        stub = OP_STUB.format(calls=str(calls), how=how)
        Path(tmp_path, "sitecustomize.py").write_text(stub)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        tables = run_isolated("op", op_parameters(implementations=THREE), PATIENCE_S)
        pa.Table.from_pylist(tables["ops"], schema=TABLES["ops"])
        assert len(tables["ops"]) == 6
        assert {row["config_id"] for row in tables["ops"]} == set(THREE.values())
        rows = {row["implementation"]: row for row in tables["ops"] if row["pass"] == "forward"}
        return rows, calls.read_text().splitlines()

    return measure


def test_who_crashes_a_job_is_left_out_and_the_others_stay_together(ended_by_the_second):
    rows, groups = ended_by_the_second("preparing")
    assert groups == ["sdpa_flash sdpa_cudnn flex", "sdpa_flash flex"]
    assert (rows["sdpa_cudnn"]["status"], rows["sdpa_cudnn"]["reason"]) == (
        "error",
        "crashed by signal SIGSEGV",
    )
    assert rows["sdpa_flash"]["status"] == rows["flex"]["status"] == "ok"
    assert rows["sdpa_flash"]["recorded_at"] == rows["flex"]["recorded_at"]


def test_who_loses_the_device_is_left_out_too(ended_by_the_second):
    rows, groups = ended_by_the_second("losing the device")
    assert groups == ["sdpa_flash sdpa_cudnn flex", "sdpa_flash flex"]
    assert rows["sdpa_cudnn"]["reason"] == "RuntimeError: CUDA error: an illegal memory access"
    assert rows["sdpa_flash"]["status"] == rows["flex"]["status"] == "ok"


def test_where_nobody_knows_who_ended_a_job_each_is_measured_alone(ended_by_the_second):
    rows, groups = ended_by_the_second("in the rounds")
    assert groups == ["sdpa_flash sdpa_cudnn flex", "sdpa_flash", "sdpa_cudnn", "flex"]
    assert {name: row["status"] for name, row in rows.items()} == {
        "sdpa_flash": "ok",
        "sdpa_cudnn": "error",
        "flex": "ok",
    }
    assert rows["sdpa_flash"]["recorded_at"] != rows["flex"]["recorded_at"]


def test_dying_after_the_result_loses_nothing(instead_of_a_step):
    instead_of_a_step(
        "import atexit",
        "from tnp.bench.outcome import failure_rows",
        "atexit.register(os.kill, os.getpid(), signal.SIGSEGV)",
        "return failure_rows('step', parameters, 'ok', '')",
    )
    assert the_row(run_isolated("step", step_parameters(), PATIENCE_S))["status"] == "ok"


def test_the_child_dies_with_its_parent(instead_of_a_step, tmp_path):
    pid_file = tmp_path / "pid"
    instead_of_a_step(f"open({str(pid_file)!r}, 'w').write(str(os.getpid()))", "time.sleep(600)")
    code = "from tests.bench.configurations import step_parameters as p; "
    code += "from tnp.bench.isolate import run_isolated; run_isolated('step', p(), 600)"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    try:
        wait_until(lambda: pid_file.exists() and pid_file.read_text())
        child = int(pid_file.read_text())
        assert is_alive(child)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_until(lambda: not is_alive(child))
