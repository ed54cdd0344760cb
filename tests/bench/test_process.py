"""Tests a child's report, its end with all that it started, and turns on a device."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tests.bench.configurations import step_parameters
from tests.bench.processes import PATIENCE_S, is_alive, past_its_limit, wait_until, without_torch
from tnp.bench import child as child_module
from tnp.bench import process, provenance
from tnp.bench.isolate import run_isolated
from tnp.bench.process import ROOT, DeviceMissing, device_lock, run_child
from workflow import gate_process

CHILD = """
import os, signal, subprocess, sys, time
from tnp.bench.child import reporting

with reporting(*sys.argv[1:]) as (parameters, note):
{body}
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Runs these lines as a child and returns its report."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(*lines: str, timeout_s: float = PATIENCE_S, **parameters) -> dict:
        body = "\n".join(f"    {line}" for line in lines)
        without_torch(tmp_path, lines_of_a_child=CHILD.format(body=body))
        common = {"device": "cpu", "device_slug": "cpu"}
        return run_child(["lines_of_a_child"], common | parameters, timeout_s)

    return run


def test_a_slow_child_is_heard_and_one_that_says_nothing_is_ended(tmp_path, monkeypatch):
    """The child imports nothing of ours, so that short limits do."""
    monkeypatch.setattr(process, "LISTENING_S", 0.1)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    noted = tmp_path / "noted"
    (tmp_path / "slow_child.py").write_text(
        "import json, os, sys, time\n"
        "pause = json.load(sys.stdin)['limit_s'] / 3\n"
        "for i in range(5):\n"
        "    time.sleep(pause)\n"
        "    os.write(int(sys.argv[2]), b'{\"i\": %d}\\n' % i)\n"
        f"open({str(noted)!r}, 'w').close()\n"
        "time.sleep(600)\n"
    )
    heard: list[dict] = []

    def run(limit_s: float) -> dict:
        heard.clear()
        return run_child(
            ["slow_child"],
            {"limit_s": limit_s},
            limit_s,
            heard=lambda known: heard.append({**known}),
        )

    report, limit_s = past_its_limit(run, noted, first_s=1)
    assert report["i"] == 4  # after more than the limit in all
    assert report["failure"] == ("timeout", f"no progress in {limit_s} s")
    assert heard[-1]["i"] == 4 and any(known.get("i", 4) < 4 for known in heard)


def test_what_was_noted_outlives_a_kill_in_the_middle_of_a_line(child):
    report = child(
        "note(known=1)",
        "os.write(int(sys.argv[2]), b'{\"half\": ')",
        "os.kill(os.getpid(), signal.SIGKILL)",
    )
    assert report["known"] == 1 and "half" not in report
    assert report["failure"][0] == "killed"


@pytest.mark.parametrize(
    ("status", "reason"), [(0, "its process ended without a result"), (3, "exit code 3")]
)
def test_an_exit_is_the_failure_and_what_was_noted_stays(child, status, reason):
    """Other ends are rows in `test_isolate.py`."""
    lines = "note(twice=2 * parameters['number'])", "note(name='ä')", f"os._exit({status})"
    report = child(*lines, number=21)
    assert (report["twice"], report["name"]) == (42, "ä")
    assert report["environment"]["environment_id"]
    assert tuple(report["failure"]) == ("error", reason)


@pytest.mark.parametrize("end", ["pass", "os._exit(1)", "time.sleep(600)"])
def test_what_a_child_started_ends_with_it(child, tmp_path, end):
    pid_file = tmp_path / "pid"
    lines = (
        "started = subprocess.Popen(['sleep', '600'])",
        f"open({str(pid_file)!r}, 'w').write(str(started.pid))",
        end,
    )
    past_its_limit(lambda limit_s: child(*lines, timeout_s=limit_s), pid_file)
    wait_until(lambda: not is_alive(int(pid_file.read_text())))


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_what_a_child_started_ends_with_who_waits_for_it(tmp_path, end):
    """A grandchild, such as a compile worker, whatever ends the process that measures."""
    pid_file = tmp_path / "pid"
    body = "    started = subprocess.Popen(['sleep', '600'])\n"
    body += f"    open({str(pid_file)!r}, 'w').write(str(started.pid))\n    time.sleep(600)\n"
    without_torch(tmp_path, started_by_a_child=CHILD.format(body=body))
    # Whatever started the tests may ignore SIGINT, as a shell's background jobs do.
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from tnp.bench.process import run_child; run_child(['started_by_a_child'], "
    code += "{'device': 'cpu', 'device_slug': 'cpu'}, 600)"
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    parent = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": paths},
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    wait_until(lambda: pid_file.exists() and pid_file.read_text())
    grandchild = int(pid_file.read_text())
    assert is_alive(grandchild)
    parent.send_signal(end)
    parent.wait()
    wait_until(lambda: not is_alive(grandchild))


def with_gates(run_gate: str, folder: Path, monkeypatch) -> None:
    """Puts a module with this source of `run_gate` in the place of `tnp.gates`."""
    (folder / "sitecustomize.py").write_text(
        f"{run_gate}"
        "import sys, types\n"
        "gates = types.ModuleType('tnp.gates')\n"
        "gates.run_gate, gates.Share, gates.NOT_FINISHED = run_gate, lambda *of: of, ()\n"
        "gates.Blocked = gates.blocked = gates.ended = gates.gates_of = None\n"
        f"gates.__path__ = [{str(ROOT / 'tnp/gates')!r}]\n"
        "sys.modules['tnp.gates'] = gates\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_what_a_gate_started_ends_when_its_time_is_over(tmp_path, monkeypatch):
    pid_file = tmp_path / "pid"
    stub = (
        "import subprocess, sys, time\n"
        "def run_gate(gate, device, progress):\n"
        "    started = subprocess.Popen(['sleep', '600'])\n"
        f"    open({str(pid_file)!r}, 'w').write(str(started.pid))\n"
        "    time.sleep(600)\n"
    )
    with_gates(stub, tmp_path, monkeypatch)
    tables, limit_s = past_its_limit(
        lambda limit_s: gate_process.run(
            "baseline", "cpu", "cpu", {}, limit_s, tmp_path / "a", print
        ),
        pid_file,
    )
    (row,) = tables["gates"]
    assert (row["status"], row["reason"]) == ("timeout", f"no progress in {limit_s} s")
    wait_until(lambda: not is_alive(int(pid_file.read_text())))


def test_the_last_process_of_a_gate_takes_what_its_shares_finished(tmp_path, monkeypatch):
    stub = (
        "def run_gate(gate, device, progress, share=None):\n"
        "    if share is None:\n"
        "        return {'gates': [*progress.rows, {'status': 'ok', 'whose': 'the last'}]}\n"
        "    progress.row({'status': 'ok', 'whose': share})\n"
        "    progress.finish(str(share), 2, [])\n"
        "    raise SystemExit(3 if share == (1, 2) else 0)\n"
    )
    with_gates(stub, tmp_path, monkeypatch)
    file = tmp_path / "runs/unfinished/a.jsonl"
    tables = gate_process.run("baseline", "cpu", "cpu", {}, 60, file, print, n_shares=2)
    assert [row["whose"] for row in tables["gates"]] == [[0, 2], [1, 2], "the last"]
    assert list(file.parent.iterdir()) == []


def test_a_kill_leaves_no_files_behind(own_temporary_folder, tmp_path):
    """Ends the measuring process by `kill -9`."""
    code = "from tests.bench.configurations import step_parameters as p; "
    code += "from tnp.bench.isolate import run_isolated; run_isolated('step', p(), 600)"
    started = tmp_path / "started"
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\n"
        "if 'tnp.bench.child' in sys.orig_argv:\n"
        f"    open({str(started)!r}, 'w').close()\n"
        "    time.sleep(600)\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths}
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment)
    wait_until(started.exists)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert list(own_temporary_folder.iterdir()) == []


def test_a_device_that_is_not_here_gives_no_row(tmp_path, monkeypatch):
    child_module.require_device("cpu")
    if provenance.device_slug() != "nvidia-h200":
        parameters = step_parameters(device="cuda", device_slug="nvidia-h200")
        sentence = "device 'nvidia-h200' is not here: "
        with pytest.raises(DeviceMissing, match=sentence):
            run_isolated("step", parameters, 60)
        with pytest.raises(DeviceMissing, match=sentence):
            gate_process.run("baseline", "cuda", "nvidia-h200", {}, 60, tmp_path / "a", print)
    monkeypatch.setattr(provenance, "device_slug", lambda: "nvidia-a100")
    with pytest.raises(DeviceMissing, match="is not here: the first GPU is 'nvidia-a100'"):
        child_module.require_device("nvidia-h200")


def test_one_timing_job_a_device():
    entered, said = threading.Event(), []

    def second():
        with device_lock("nvidia-h200", say=said.append):
            entered.set()

    with device_lock("nvidia-h200"), device_lock("cpu"):
        waiting = threading.Thread(target=second)
        waiting.start()
        assert not entered.wait(0.3)
        (sentence,) = said
    waiting.join(PATIENCE_S)
    assert entered.is_set()
    assert f"waiting for another job on nvidia-h200 (process {os.getpid()}, lock " in sentence


def test_who_holds_a_lock_without_saying_so_is_unknown(own_temporary_folder):
    lock = own_temporary_folder / "tnp-cpu.lock"
    lock.write_text("4194305")  # no process has this number: it was somebody before
    holder = subprocess.Popen(
        ["flock", "-x", lock, "-c", "echo held; sleep 1"], stdout=subprocess.PIPE
    )
    holder.stdout.readline()
    said: list[str] = []
    with device_lock("cpu", say=said.append):
        assert said[0].startswith("waiting for another job on cpu (an unknown process, lock ")
    holder.wait()


def test_two_gpus_of_one_model_have_locks_of_their_own(monkeypatch, own_temporary_folder):
    with device_lock("nvidia-h200"):
        monkeypatch.setattr(process, "gpu_uuid", lambda: "GPU-2")
        with device_lock("nvidia-h200", say=pytest.fail):
            assert (own_temporary_folder / "tnp-GPU-2.lock").exists()
        # Jobs that time nothing share the device.
        with device_lock("cpu", shared=True), device_lock("cpu", shared=True, say=pytest.fail):
            assert (own_temporary_folder / "tnp-cpu.lock").exists()
