"""Bad files in a small store: it is refused in one sentence that names the file, or has the same
rows as before.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from tests.store import SQL
from tnp.store.files import StoreError, build_database, write_table
from tnp.store.schemas import SCHEMA_VERSION, TABLES
from tnp.util.atomic_files import parquet_files

ROWS_A_FILE = 40
HANGS_AFTER_S = 20
NOBODY = 65534
VALUES: dict[pa.DataType, Callable[[int], object]] = {
    pa.string(): lambda i: f'{{"text": {i}}}',  # columns of JSON are read by views
    pa.bool_(): lambda i: i % 3 == 0,
    pa.float64(): lambda i: i / 7,
    pa.timestamp("us", tz="UTC"): lambda i: datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=i),
}


def rows_of(table: str, first: int) -> list[dict]:
    """Rows without meaning and without nulls, no two alike."""
    fields = [field for field in TABLES[table] if table != "code" or field.name != "code_set"]
    return [
        {field.name: VALUES.get(field.type, int)(first + i) for field in fields}
        for i in range(ROWS_A_FILE)
    ]


def write_store(data: Path) -> list[Path]:
    """A file of every table under `recorded` and under `runs`, each with rows of its own."""
    for origin, first in (("recorded", 0), ("runs", 1000)):
        for table in TABLES.keys() - {"code_parts"}:  # which rows of `code` bring with them
            write_table(
                data / origin / "cpu" / table / "sound.parquet", table, rows_of(table, first)
            )
    return parquet_files(data / "recorded") + parquet_files(data / "runs")


def flip(path: Path, random: Random, n: int) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(n):
        content[random.randrange(len(content))] ^= 1 << random.randrange(8)
    path.write_bytes(content)


def replace(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table], version: object = 1) -> None:
    """Writes it as another program would, which knows no digest of a file."""
    metadata = {} if version is None else {"tnp_schema_version": str(version), "other": ""}
    changed = change(pq.ParquetFile(path).read())
    pq.write_table(changed.replace_schema_metadata(metadata), path)


def version(path: Path, said: object) -> None:
    rewrite(path, lambda table: table, said)


def instead(path: Path, make: Callable[[Path], None]) -> None:
    path.unlink()
    make(path)


def other_content(path: Path) -> None:
    """A second file with the same runs and another number in them, or another text."""
    table = path.parent.name
    rows = pq.ParquetFile(path).read().to_pylist()
    numbers = [field.name for field in TABLES[table] if field.type == pa.float64()]
    if numbers:
        rows[0][numbers[0]] += 1.0
    else:  # table "code"
        rows[0][TABLES[table].names[-1]] += "0"
    write_table(path.with_name("altered.parquet"), table, rows)


def other_type(table: pa.Table) -> pa.Table:
    return table.set_column(0, table.column_names[0], pa.array(range(len(table))))


def zeros(content: bytes) -> bytes:
    third = len(content) // 3
    return content[:third] + bytes(third) + content[2 * third :]


def moved(path: Path) -> Path:
    other = "steps" if path.parent.name != "steps" else "gates"
    return path.parents[1] / other / "moved.parquet"


WHOLE = "is not a whole Parquet file"
UNREADABLE, OTHER_CONTENT = "not to be read", "one run with two contents"
SAME_ROWS = None
# Name → what makes a file bad, and what the sentence says. Of "there twice" the rows must stay as
# they are; where the sentence is "" they may.
FAULTS: dict[str, tuple[Callable[[Path, Random], object], str | None]] = {
    "missing": (lambda p, r: p.unlink(), "does not exist"),
    "cut short": (lambda p, r: replace(p, p.read_bytes()[: r.randrange(p.stat().st_size)]), WHOLE),
    "without its last byte": (lambda p, r: replace(p, p.read_bytes()[:-1]), WHOLE),
    "empty": (lambda p, r: replace(p, b""), WHOLE),
    "one bit flipped": (lambda p, r: flip(p, r, 1), ""),
    "eight bits flipped": (lambda p, r: flip(p, r, 8), ""),
    "zeros in the middle": (lambda p, r: replace(p, zeros(p.read_bytes())), WHOLE),
    "text": (lambda p, r: replace(p, b"step,time_ms\n1,2.0\n"), WHOLE),
    "two files in one": (lambda p, r: replace(p, p.read_bytes()[:-8] + p.read_bytes()), ""),
    "a pipe": (lambda p, r: instead(p, os.mkfifo), "is no regular file"),
    "a folder": (lambda p, r: instead(p, Path.mkdir), "is no regular file"),
    "a link to nothing": (lambda p, r: instead(p, lambda q: q.symlink_to("x")), "does not exist"),
    "a link to itself": (lambda p, r: instead(p, lambda q: q.symlink_to(q.name)), "cannot be read"),
    UNREADABLE: (lambda p, r: p.chmod(0), "cannot be read (Permission denied): make it"),
    "a column of another type": (lambda p, r: rewrite(p, other_type), " as int64, table "),
    "a column that no table has": (
        lambda p, r: rewrite(p, lambda t: t.append_column("speed", pa.array(range(len(t))))),
        "a column 'speed' that table ",
    ),
    "a column twice": (
        lambda p, r: rewrite(p, lambda t: t.append_column(t.column_names[0], t.column(0))),
        "has two columns ",
    ),
    "of a newer version": (
        lambda p, r: version(p, str(SCHEMA_VERSION + 1)),
        f"schema version {SCHEMA_VERSION + 1}, this checkout reads up to {SCHEMA_VERSION}",
    ),
    "of version abc": (lambda p, r: version(p, "abc"), "version 'abc', which is no number"),
    "of version -1": (lambda p, r: version(p, "-1"), "version '-1', which is no number"),
    "of no version": (lambda p, r: version(p, None), "was not written by tnp.store"),
    "in another table's folder": (lambda p, r: shutil.copy(p, moved(p)), "has "),
    "in a folder of no table": (
        lambda p, r: shutil.copytree(p.parent, p.parents[1] / "tables"),
        "in a folder 'tables': it must be one of",
    ),
    "there twice": (lambda p, r: shutil.copy(p, p.with_name("copy.parquet")), SAME_ROWS),
    "there twice, once recorded": (
        lambda p, r: shutil.copy(
            p, Path(str(p).replace("/runs/", "/recorded/")).with_name("stamp.parquet")
        ),
        SAME_ROWS,
    ),
    OTHER_CONTENT: (lambda p, r: other_content(p), "hold run "),
}


def run(n: int, folder: Path, random: Random) -> list[str]:
    """Makes `n` files bad, one at a time; every time that rows changed or nothing was said."""
    sound = folder / "sound"
    files = write_store(sound / "data")
    build_database(files, SQL, sound / "results.duckdb")
    rows = contents(sound / "results.duckdb")
    found = []
    folder.chmod(0o755)  # for whoever is refused a file in it
    names = [name for name in FAULTS if name != UNREADABLE or _can_be_nobody(folder)]
    for number in range(n):
        name = names[number % len(names)]
        broken = folder / f"broken{number}"
        shutil.copytree(sound, broken)
        can_be = [file for file in files if name != OTHER_CONTENT or _has_runs(file)]
        target = broken / random.choice(can_be).relative_to(sound)
        before = set(broken.rglob("*"))
        FAULTS[name][0](target, random)
        # A file that was added is at fault itself, and the one it was made from may be named too.
        at_fault = {target, *(set(broken.rglob("*")) - before)}
        given = [broken / file.relative_to(sound) for file in files]
        problem = _harm(
            sorted({*given, *broken.glob("data/*/*/*/*.parquet")}), name, at_fault, rows
        )
        if problem is not None:
            found.append(f"{target.relative_to(broken)} {name}: {problem}")
        shutil.rmtree(broken)
    return found


def contents(database: Path) -> dict[str, list[tuple]]:
    """Every row of every table but for `origin`, which a recorded copy changes."""
    with duckdb.connect(str(database), read_only=True) as store:
        return {
            table: store.sql(f"select * exclude (origin) from {table} order by all").fetchall()
            for table in TABLES
        }


def _harm(files: list[Path], name: str, at_fault: set[Path], rows: dict) -> str | None:
    broken, wanted = files[0].parents[4], FAULTS[name][1]
    database = broken / "results.duckdb"
    before = database.read_bytes()
    try:
        with _nobody(broken, name == UNREADABLE), _unblocked(at_fault) as waited:
            build_database(files, SQL, database)
    except StoreError as error:
        said = str(error)
        if waited:
            return f"it waited for {HANGS_AFTER_S} s and more"
        if wanted is SAME_ROWS or wanted not in said:
            return f"it was refused otherwise than by {wanted!r}: {said!r}"
        if "\n" in said or not any(str(path) in said for path in at_fault):
            return f"the sentence does not name it: {said!r}"
        if database.read_bytes() != before:
            return "the database from before was changed"
        return None
    except Exception as error:
        return f"{type(error).__name__} in place of a sentence: {error}"
    if contents(database) != rows:
        return "other rows, and nothing was said"
    return "nothing was said" if wanted else None


def _has_runs(file: Path) -> bool:
    return "run_id" in TABLES[file.parent.name].names


def _can_be_nobody(folder: Path) -> bool:
    """Whether another user may pass through all folders above; root can be refused no file."""
    return os.geteuid() != 0 or all(above.stat().st_mode & 1 for above in folder.parents)


@contextmanager
def _nobody(folder: Path, wanted: bool) -> Iterator[None]:
    """As a user without root's rights, to whom the folder is given."""
    if not wanted or os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


@contextmanager
def _unblocked(paths: set[Path]) -> Iterator[list[Path]]:
    """Writes to a pipe that somebody has waited at for too long, and says at which."""
    waited: list[Path] = []

    def unblock() -> None:
        for path in paths:
            with suppress(OSError):  # nobody is reading it
                if path.is_fifo():
                    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
                    waited.append(path)

    timer = threading.Timer(HANGS_AFTER_S, unblock)
    timer.start()
    try:
        yield waited
    finally:
        timer.cancel()
