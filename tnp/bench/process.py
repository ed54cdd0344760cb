"""Runs a measurement in its own process, and lets jobs take turns on a device.

A kernel that crashes its process, or never ends, then affects one measurement only. Gates,
benchmarks and tuning trials all start their processes here.
"""

import ctypes
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from tnp.bench.provenance import gpu_uuid
from tnp.experiment.failures import one_line

ROOT = Path(__file__).parents[2]
SHOWN_LINES = 30
LISTENING_S = 1.0  # between two readings of a child's notes
_PR_SET_PDEATHSIG = 1


class DeviceMissing(RuntimeError):
    """Says that the device under which rows would be recorded is not here."""


def run_child(
    command: Sequence[str],
    parameters: dict,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
    heard: Callable[[dict], None] = lambda known: None,
) -> dict:
    """Runs `python -m COMMAND… PARENT REPORT` and returns its report, however it ended.

    The child reads `parameters` as JSON from standard input, and writes to the file descriptor
    REPORT (`tnp.bench.child.reporting`). All files are anonymous: a kill leaves none behind. The
    child leads a process group with all that it starts. The group ends with the child, and with
    this process, for any reason. The last lines that the child printed are printed here.

    Args:
        command: the module and its arguments.
        timeout_s: seconds without a note until the child is killed. A slow machine may take longer
            in all, a process that hangs may not.
        environment: variables besides those of this process.
        heard: called about once a second with the child's notes so far.

    Returns:
        The child's notes. "failure", a status and a one-line reason, is the child's own note, or
        says why the child ended.

    Raises:
        DeviceMissing: the child did not find the device of its parameters.
    """
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with (
        tempfile.TemporaryFile() as asked,
        tempfile.TemporaryFile() as report,
        tempfile.TemporaryFile() as log,
    ):
        asked.write(json.dumps(parameters).encode())
        asked.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-m", *command, str(os.getpid()), str(report.fileno())],
            stdin=asked,
            stdout=log,
            stderr=log,
            pass_fds=[report.fileno()],
            env=os.environ | {"PYTHONPATH": paths} | (environment or {}),
            start_new_session=True,  # so that its compile workers can be killed with it
        )
        notes = _Notes(report)
        try:
            code = _watched(child, notes, timeout_s, heard)
        finally:
            _kill_group(child)
        lines = _lines(log)
        print("\n".join(lines[-SHOWN_LINES:]), file=sys.stderr)
        notes.read()
        known = notes.known
    if "missing" in known:
        raise DeviceMissing(known["missing"])
    if code is None:
        known["failure"] = "timeout", f"no progress in {timeout_s:g} s"
    elif code == -signal.SIGKILL:
        known["failure"] = (
            "killed",
            "killed by signal SIGKILL, as the kernel does when host memory runs out",
        )
    elif code < 0:
        known["failure"] = "error", f"crashed by signal {signal.Signals(-code).name}"
    elif code > 0:
        spoken = [line for line in lines if line.strip()]
        known["failure"] = "error", one_line(spoken[-1]) if spoken else f"exit code {code}"
    else:
        known.setdefault("failure", ("error", "its process ended without a result"))
    return known


class _Notes:
    """Reads a child's notes from its report. Reader and writer keep separate positions."""

    def __init__(self, report: BinaryIO) -> None:
        self.known: dict = {}
        self._report, self._at = report.fileno(), 0

    def read(self) -> bool:
        """Reads the new whole lines. Returns whether there was one."""
        new = b""
        while more := os.pread(self._report, 1 << 20, self._at + len(new)):
            new += more
        *lines, _ = new.split(b"\n")  # the last was not written whole, or is empty
        for line in lines:
            self.known |= json.loads(line)
            self._at += len(line) + 1
        return bool(lines)


def _watched(
    child: subprocess.Popen, notes: _Notes, timeout_s: float, heard: Callable[[dict], None]
) -> int | None:
    """Returns the child's exit code, or None if it noted nothing for `timeout_s` seconds."""
    last = time.monotonic()
    while True:
        with suppress(subprocess.TimeoutExpired):
            return child.wait(min(LISTENING_S, timeout_s))
        if notes.read():
            last = time.monotonic()
        elif time.monotonic() - last >= timeout_s:
            return None
        heard(notes.known)


def _kill_group(child: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _lines(file: BinaryIO) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").splitlines()


def die_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when `parent`, which started it, ends.

    If this process leads a group, the group ends with it, for any reason. Call this before there
    are threads.
    """
    _watch_group()
    _signal_at_end_of(parent, signal.SIGKILL)


def _signal_at_end_of(parent: int, number: int) -> None:
    """Lets the kernel signal this process when its parent ends, or at once if it has ended."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def _watch_group() -> None:
    """Starts a process that kills this process's group when this process has ended.

    `run_child` kills the group too, but it may be killed itself.
    """
    leader = os.getpid()
    if os.getpgrp() != leader or os.fork():
        return
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # The signal is blocked: a handler could run just before the wait, which then never ends.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        _signal_at_end_of(leader, signal.SIGTERM)
        signal.sigwait({signal.SIGTERM})
        os.killpg(leader, signal.SIGKILL)
    finally:
        os._exit(1)


def say_on_stderr(text: str) -> None:
    print(text, file=sys.stderr)


@contextmanager
def device_lock(
    device: str, shared: bool = False, say: Callable[[str], None] = say_on_stderr
) -> Iterator[None]:
    """Waits until no other timing job of this machine uses the device, then holds it.

    `device` is "cpu" or the slug of the first visible GPU. The GPU's UUID names the lock, so that
    jobs on several GPUs of one model run side by side.

    Jobs that time nothing may share the device (`shared`). The lock ends with the process that
    holds it. `say` is called before waiting.
    """
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    lock = (None if device == "cpu" else gpu_uuid()) or device
    path = Path(tempfile.gettempdir(), f"tnp-{lock}.lock")
    with _lock_file(path) as descriptor:
        try:
            fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another job on {device} ({_holder(descriptor)}, lock {path})")
            fcntl.flock(descriptor, kind)
        # The next waiter reads this. If several share the device, the last is named.
        with suppress(OSError):  # another user's file
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield


@contextmanager
def _lock_file(path: Path) -> Iterator[int]:
    """Yields a descriptor of `path`, which is created if it does not exist."""
    try:
        descriptor = os.open(path, os.O_RDWR | (0 if path.exists() else os.O_CREAT), 0o644)
    except PermissionError:  # another user's: flock needs no more than to read it
        descriptor = os.open(path, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _holder(descriptor: int) -> str:
    """Describes the process that holds a lock file, if its number is a live process."""
    pid = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
    alive = pid.isdigit() and Path("/proc", pid).exists()
    return f"process {pid}" if alive else "an unknown process"
