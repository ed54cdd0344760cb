"""Gives the workflow's scripts messages, a log, their GPU, and an end when the workflow ends."""

import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from workflow.gpus import Part, take

# Set by the rules: the process id of the workflow, and "12/34" of the job that is started next.
WORKFLOW_PID = "TNP_WORKFLOW_PID"
PROGRESS = "TNP_PROGRESS"


@contextmanager
def job(
    name: str, log: str | Path, part: Part | None = None, *, capture: bool = True
) -> Iterator[Callable[[str], None]]:
    """Runs a job's body; yields `say(text)`, which prints "[12/34] name: text" to the terminal.

    `part` is all that the job sees of the host's GPUs and cores; None leaves it everything.

    Everything else that is printed goes to the file `log` (with `capture=False` to the terminal).
    An error is one line on the terminal and a traceback in the log.
    """
    _end_with_workflow()
    if part is not None:
        take(part)
    terminal = os.fdopen(os.dup(2), "w", buffering=1)
    prefix = f"[{os.environ[PROGRESS]}] " if PROGRESS in os.environ else ""

    def say(text: str) -> None:
        print(f"{prefix}{name}: {text}", file=terminal)

    Path(log).parent.mkdir(parents=True, exist_ok=True)
    with open(log, "w", buffering=1) as file:
        if capture:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        try:
            yield say
        except Exception as error:
            traceback.print_exc(file=file)
            say(f"{type(error).__name__}: {error} (traceback in {log})")
            sys.exit(1)


def write(files: Mapping[str, str], tables: Mapping[str, list[dict]]) -> None:
    """Writes each table's rows to its file. The first, written last, says that the job is done."""
    from tnp.store.files import write_table

    for table, file in reversed(list(files.items())):
        write_table(Path(file), table, tables.get(table, []))


def _end_with_workflow() -> None:
    """Ends this job when the workflow is killed: a `kill -9` leaves no orphan on the device.

    Linux's parent-death signal does not help: the parent is a shell, which survives the workflow.
    """
    pid = int(os.environ.get(WORKFLOW_PID, 0))
    if not pid or not hasattr(os, "pidfd_open"):  # not started by the workflow, or not Linux
        return
    try:
        workflow = os.pidfd_open(pid)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)

    def wait() -> None:
        select.select([workflow], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, daemon=True).start()
