"""Makes children of measurements light, and asks about processes that a test did not start."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_S = 600  # for what takes seconds where nothing else runs
TORCH = """
__version__, get_num_threads = "0", lambda: 1

class OutOfMemoryError(RuntimeError):
    pass
"""


def without_torch(folder: Path, **files: str) -> Path:
    """Writes modules that a child finds in `folder`, and one for PyTorch, whose import is slow."""
    for name, text in {"torch": TORCH, **files}.items():
        folder.joinpath(f"{name}.py").write_text(text)
    return folder


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, timeout_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def past_its_limit(
    run: Callable[[float], Any], started: Path, first_s: float = 4
) -> tuple[Any, float]:
    """Returns what `run` made of a child that does not end, and the time limit that it had.

    `run` takes the limit in seconds, `first_s` at first. The child writes `started`; where a busy
    machine has not brought it so far within the limit, it runs once more with a longer one.
    """
    for limit_s in (first_s, 10 * first_s, 50 * first_s):
        found = run(limit_s)
        if started.exists():
            return found, limit_s
    raise AssertionError(f"no child has started in {limit_s} s")
