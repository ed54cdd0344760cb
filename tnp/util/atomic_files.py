"""Writes files whole or not at all, and removes the leftovers of killed processes."""

import errno
import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class StoreError(RuntimeError):
    """Says that a file of results cannot be used. The message names it and a remedy."""


def user_cache() -> Path:
    """Returns this user's cache folder, with tuned tables and compiled CUDA C++."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tnp"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary file that replaces `path` if the block ends without error.

    It lies in its own folder beside `path`, with DuckDB's write-ahead log. Raises StoreError if the
    folder is not writable or full; `path` is then unchanged.
    """
    path = Path(path)
    folder = path.with_name(f".{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(path.parent)
        shutil.rmtree(folder, ignore_errors=True)  # an earlier process had our number
        folder.mkdir()
        try:
            yield folder / "new"
            os.replace(folder / "new", path)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise cannot_write(path, error) from error


def parquet_files(root: Path) -> list[Path]:
    """Returns the files `root/<device>/<table>/<stem>.parquet` that are not hidden."""
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
    """Removes temporary folders of this machine's processes that have ended."""
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
