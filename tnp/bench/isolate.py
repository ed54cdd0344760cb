"""One process per measurement: its memory, its compile state and its crash stay its own."""

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from tnp.bench.outcome import Rows, failure_rows, one_line, only, together

ROOT = Path(__file__).parents[2]
STDERR_LINES = 30
SHOW_LOG_OF = ("error", "killed", "timeout")
_PR_SET_PDEATHSIG = 1


def run_isolated(kind: str, parameters: dict, timeout_s: float) -> Rows:
    """Measure one configuration in a child process; table → rows, provenance included.

    Never raises for what the measurement does: running out of memory, missing support, a crash, a
    kill and the time limit are rows with that status and the reason. The device is locked while the
    child lives, and waiting for the lock does not count against `timeout_s`.

    Where one of an operator's implementations ends the process, that is its result, and the others
    are measured together without it; where it is not known which, each is measured alone.

    Args:
        kind: "step" (`tnp.bench.steps.measure_step`) or "op" (`tnp.bench.operators.measure_op`).
        parameters: the configuration, as JSON can hold it.
        timeout_s: seconds until a child is killed.
    """
    tables, suspects = _run_once(kind, parameters, timeout_s)
    names = list(parameters.get("implementations", []))
    if not suspects or len(names) == 1:
        return tables
    if len(suspects) == 1:
        groups = [[name for name in names if name not in suspects]]
        tables["ops"] = [row for row in tables["ops"] if row["implementation"] in suspects]
    else:
        groups, tables = [[name] for name in names], {}
    rest = (run_isolated(kind, only(parameters, group), timeout_s) for group in groups)
    return together([tables, *rest])


def _run_once(kind: str, parameters: dict, timeout_s: float) -> tuple[Rows, list[str]]:
    """What one child process gives: table → rows, and who may have ended it before its time."""
    device = parameters["device_slug"]
    with tempfile.TemporaryDirectory(prefix="tnp-bench-") as folder, device_lock(device):
        result, log = Path(folder, "result.json"), Path(folder, "log")
        ended = _run_child(kind, parameters, timeout_s, result, log)
        report = json.loads(result.read_text()) if result.exists() else {}
        # A process that dies while it is being taken down has measured all the same.
        failure = None if "tables" in report else ended or report["failure"]
        tables: Rows = failure_rows(kind, parameters, *failure) if failure else report["tables"]
        if any(row["status"] in SHOW_LOG_OF for row in tables[f"{kind}s"]):
            print("\n".join(_tail(log)), file=sys.stderr)
    environment = report.get("environment")  # null where the child died before it looked
    if environment is not None:
        tables["environments"] = [environment]
    identity = environment and environment["environment_id"]
    suspects = report.get("suspects", []) if failure else []
    return with_provenance(tables, device, identity), suspects


def with_provenance(tables: Rows, device: str, environment_id: str | None) -> Rows:
    """The same rows with the columns every table starts with."""
    provenance = {
        "device": device,
        "environment_id": environment_id,
        "recorded_at": datetime.now(UTC),
    }
    return {table: [row | provenance for row in rows] for table, rows in tables.items()}


@contextmanager
def device_lock(device: str, shared: bool = False) -> Iterator[None]:
    """One timing job on a device at a time on this machine, whoever started it; waits its turn.

    What times nothing may share the device with others of its kind. The lock goes with the process
    that holds it, however that ends.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    path = Path(tempfile.gettempdir(), f"tnp-{device}.lock")
    # Reading is all that flock needs, and all that another user's lock file may allow.
    descriptor = os.open(path, os.O_RDONLY | (0 if path.exists() else os.O_CREAT), 0o644)
    try:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another timing job on {device} (lock {path})", file=sys.stderr)
            fcntl.flock(descriptor, kind)
        yield
    finally:
        os.close(descriptor)


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent`, which started it, ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def _run_child(
    kind: str, parameters: dict, timeout_s: float, result: Path, log: Path
) -> tuple[str, str] | None:
    """Status and reason if the child did not report rows itself."""
    configuration = result.with_name("parameters.json")
    configuration.write_text(json.dumps(parameters))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "tnp.bench.child", kind, configuration, result, os.getpid()]
    with log.open("wb") as output:
        child = subprocess.Popen(
            [str(argument) for argument in command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # so that its compile workers can be killed with it
        )
        try:
            code = child.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return "timeout", f"not finished after {timeout_s:g} s"
        finally:
            _kill_group(child)
    if code == 0:
        return None
    if code == -signal.SIGKILL:
        return "killed", "killed by signal SIGKILL, as the kernel does when host memory runs out"
    if code < 0:
        return "error", f"crashed by signal {signal.Signals(-code).name}"
    return "error", _last_line(log) or f"exit code {code}"


def _kill_group(child: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _tail(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-STDERR_LINES:]


def _last_line(log: Path) -> str | None:
    lines = [line for line in _tail(log) if line.strip()]
    return one_line(lines[-1]) if lines else None
