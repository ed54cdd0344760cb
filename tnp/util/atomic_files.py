"""Writing result files so that nobody meets half of one, and nothing stays of a killed attempt."""

import errno
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StoreError(RuntimeError):
    """A file of results cannot be used; the message names it and says what to do."""


def user_cache() -> Path:
    """The folder for what this user's processes keep: tuned tables, compiled CUDA C++."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tnp"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of `path` where the block ends without error.

    It lies in a folder of its own beside `path`, which DuckDB's write-ahead log shares. Raises
    StoreError where the folder is not writable or full; `path` then is as it was.
    """
    path = Path(path)
    folder = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        shutil.rmtree(folder, ignore_errors=True)  # of an earlier process with our number
        folder.mkdir()
        try:
            yield folder / "new"
            os.replace(folder / "new", path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def parquet_files(root: Path) -> list[Path]:
    """All that lies at `root/<device>/<table>/<stem>.parquet`, but what is hidden."""
    files = Path(root).glob("*/*/*.parquet")
    return sorted(file for file in files if not file.name.startswith("."))


def cannot_write(path: Path, error: Exception) -> StoreError:
    return StoreError(
        f"cannot write {path} ({first_line(error)}): {path.parent}/ must be a writable folder with "
        "free space"
    )


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")


def _remove_leftovers(folder: Path) -> None:
    """Temporary folders of processes of this machine that have ended; the others' are theirs."""
    name = re.compile(rf"\..+\.{re.escape(socket.gethostname())}-(\d+)\.tmp")
    for path in folder.glob(".*.tmp"):
        owner = name.fullmatch(path.name)
        if owner and not _lives(int(owner[1])):
            shutil.rmtree(path, ignore_errors=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.EPERM
    return True
