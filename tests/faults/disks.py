"""A disk that fills while something is written: what was there before can still be read, and what
was written is there whole.

The disk is a small tmpfs, which takes a mount namespace; where none may be made, it is a limit on
the size of a file. Both are a child process's own.
"""

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from random import Random
from typing import NamedTuple

import duckdb

from tests.faults.files import contents, rows_of, write_store
from tests.store import SQL
from tnp.store.files import StoreError, build_database, read_table, record, write_table
from tnp.train import recorded_runs
from tnp.train.loop import load_state

ROOT = Path(__file__).parents[2]
CAPACITY = 64 * 2**20
NAMESPACE = ("unshare", "--map-root-user", "--mount")

PARAMETERS = {
    "config_id": "gp",
    "run": "gp",
    "source": "gaussian_process",
    "batch": 2,
    "n_context": 8,
    "n_target": 8,
    "variant": "sdpa_flash",
    "variant_spec": {"attention": "sdpa_flash"},
    "model": {"d_model": 32, "n_layers": 1, "n_heads": 2, "d_ff": 48, "n_components": 2},
    "dtype": "float32",
    "steps": 4,
    "learning_rate": 1e-3,
    "warmup_steps": 1,
    "eval_every": 2,
    "seed": 0,
}


class Operation(NamedTuple):
    """Something written on the disk; `elsewhere` there is room."""

    prepare: Callable[[Path, Path], None]  # (disk, elsewhere): what is there before
    write: Callable[[Path, Path], None]
    read: Callable[[Path], object]
    allowed: Callable[[object, object, object], bool] = lambda found, old, new: found == old


def _rows(disk: Path) -> list[dict]:
    files = sorted(disk.glob("data/*/*/*/*.parquet"))
    rows = [row for file in files for row in read_table(file, file.parent.name).to_pylist()]
    return sorted(rows, key=str)


def _write_samples(disk: Path, n: int) -> None:
    rows = rows_of("samples", n) * n
    write_table(disk / "data/runs/cpu/samples/tiny.parquet", "samples", rows)


def _build(disk: Path, elsewhere: Path) -> None:
    files = sorted(elsewhere.glob("data/*/*/*/*.parquet"))
    build_database(files, SQL, disk / "results.duckdb")


def _stored(disk: Path) -> object:
    with duckdb.connect(str(disk / "results.duckdb"), read_only=True) as store:
        views = store.sql("select view_name from duckdb_views() where not internal order by all")
        return views.fetchall(), contents(disk / "results.duckdb")


class _Interrupted(Exception):
    pass


def _train(disk: Path, until: int | None = None) -> None:
    def interrupt(row: dict) -> None:
        if row["step"] == until:
            raise _Interrupted

    recorded_runs.run(PARAMETERS, "cpu", disk / "checkpoints", interrupt)


def _begin_training(disk: Path, elsewhere: Path) -> None:
    try:
        _train(disk, until=2)
    except _Interrupted:
        return


def _checkpoint(disk: Path) -> int:
    files = (disk / "checkpoints" / name for name in ("final.pt", "latest.pt"))
    return load_state(next(filter(Path.exists, files)), "cpu")["step"]


def _record(disk: Path, elsewhere: Path) -> None:
    with redirect_stdout(StringIO()):
        record(elsewhere / "data/runs", disk / "data/recorded")


def _begin_record(disk: Path, elsewhere: Path) -> None:
    source = elsewhere / "data/recorded"
    with redirect_stdout(StringIO()):
        record(source, disk / "data/recorded")


def _nothing_else(found: list, old: list, new: list) -> bool:
    """A copy that ends early has added some of the new files and lost no old row."""
    return all(row in found for row in old) and all(row in new for row in found)


OPERATIONS = {
    "write_table": Operation(
        lambda disk, _: _write_samples(disk, 1), lambda disk, _: _write_samples(disk, 100), _rows
    ),
    "build_database": Operation(
        lambda disk, _: build_database([], SQL, disk / "results.duckdb"), _build, _stored
    ),
    "training's checkpoint": Operation(_begin_training, lambda disk, _: _train(disk), _checkpoint),
    "make record": Operation(_begin_record, _record, _rows, _nothing_else),
}


def run(n: int, folder: Path, random: Random) -> list[str]:
    """Every operation on `n` disks, from none to more than enough room; what was lost or false."""
    del random  # the sizes are spread evenly
    command = [sys.executable, "-m", "tests.faults.disks", str(n), str(folder)]
    if subprocess.run([*NAMESPACE, "true"], capture_output=True).returncode == 0:
        command = [*NAMESPACE, *command, "mount"]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {child.stderr}")
    return json.loads(child.stdout)


@contextmanager
def _tmpfs(disk: Path, free: int) -> Iterator[None]:
    """Fills the disk up to `free` bytes."""
    state = os.statvfs(disk)
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, state.f_bavail * state.f_bsize - free))
    try:
        yield
    finally:
        filler.unlink()


@contextmanager
def files_up_to(n_bytes: int) -> Iterator[None]:
    """A disk of this size, as far as a file notices: what goes past it fails to be written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _limit(disk: Path, free: int) -> AbstractContextManager[None]:
    return files_up_to(free)


def main(n: int, folder: Path, filled: Callable) -> list[str]:
    elsewhere, disks = folder / "elsewhere", folder / "disk"
    write_store(elsewhere / "data")
    found = []
    for name, operation in OPERATIONS.items():
        # What is there before, and after with room enough.
        before, after = folder / name / "before", folder / name / "after"
        before.mkdir(parents=True)
        operation.prepare(before, elsewhere)
        shutil.copytree(before, after)
        operation.write(after, elsewhere)
        old, new = operation.read(before), operation.read(after)
        needed = sum(file.stat().st_size for file in after.rglob("*") if file.is_file())
        for number in range(n):
            free = 3 * needed * number // (2 * n)
            disk = disks / str(number)
            shutil.copytree(before, disk)
            problem = _harm(operation, disk, elsewhere, filled(disks, free), old, new)
            if problem is not None:
                found.append(f"{name} with {free} bytes free: {problem}")
            shutil.rmtree(disk)
    return found


def _harm(operation, disk: Path, elsewhere: Path, filled, old: object, new: object) -> str | None:
    before = set(disk.rglob("*"))
    said = None
    with filled:
        try:
            operation.write(disk, elsewhere)
        except (StoreError, OSError, RuntimeError) as error:
            said = str(error)
    try:
        found = operation.read(disk)
    except Exception as error:
        return f"what is left cannot be read: {type(error).__name__}: {error}"
    if said is None:
        return None if found == new else "it reported success, and what it wrote is not there"
    if not operation.allowed(found, old, new):
        return f"what was there before is lost ({said!r})"
    if "\n" in said or str(disk) not in said:
        return f"the failure is no sentence that names the file: {said!r}"
    left = {path for path in set(disk.rglob("*")) - before if path.suffix != ".parquet"}
    left = {path for path in left if path.is_file()}
    return f"it left {sorted(map(str, left))}" if left else None


if __name__ == "__main__":
    count, where, *mount = sys.argv[1:]
    place = Path(where)
    (place / "disk").mkdir()
    if mount:
        options = ["-t", "tmpfs", "-o", f"size={CAPACITY}", "tnp", str(place / "disk")]
        subprocess.run(["mount", *options], check=True)
    print(json.dumps(main(int(count), place, _tmpfs if mount else _limit)))
