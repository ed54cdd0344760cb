"""Tests the store: what is written is read back, and nothing that is wrong gets in."""

import os
import shutil
import signal
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.sql import conftest as of_sql
from tests.store import SQL
from tnp.store.files import StoreError, build_database, read_table, record, write_table
from tnp.store.schemas import SCHEMA_VERSION, TABLES
from tnp.util.atomic_files import parquet_files

ROOT = Path(__file__).parents[2]
NOW = datetime(2026, 2, 1, 10, 0, tzinfo=UTC)
ROW = {
    "device": "cpu",
    "recorded_at": NOW,
    "config_id": "tiny--separate",
    "replicate": 1,
    "pass": "step",
    "sample": 0,
    "time_ms": 1.5,
}
MISSING = dict.fromkeys(set(TABLES["samples"].names) - set(ROW))
VERSION = {"tnp_schema_version": str(SCHEMA_VERSION)}


def samples(root: Path, origin: str = "runs", stem: str = "tiny") -> Path:
    return root / "data" / origin / "cpu" / "samples" / f"{stem}.parquet"


def foreign(path: Path, columns: dict, metadata: dict = VERSION) -> Path:
    """A Parquet file that `write_table` would not write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns).replace_schema_metadata(metadata), path)
    return path


@pytest.mark.parametrize("table", TABLES)
def test_empty_tables_of_every_kind_come_back(tmp_path: Path, table: str) -> None:
    path = tmp_path / "new" / "folder.parquet"
    write_table(path, table, [])
    assert read_table(path, table).schema.equals(TABLES[table])


def test_rows_come_back_and_missing_columns_are_null(tmp_path: Path) -> None:
    write_table(samples(tmp_path), "samples", [ROW, ROW | {"sample": 1, "time_ms": float("inf")}])
    first, second = read_table(samples(tmp_path), "samples").to_pylist()
    assert first == ROW | MISSING
    assert second["time_ms"] == float("inf")


def test_wrong_rows_are_refused_and_leave_the_file_alone(tmp_path: Path) -> None:
    path = samples(tmp_path)
    write_table(path, "samples", [ROW])
    for row, message in (
        (ROW | {"tiem_ms": 1.0}, "samples has no column 'tiem_ms'"),
        (ROW | {"time_ms": "fast"}, "does not fit the schema of table samples"),
    ):
        with pytest.raises(ValueError, match=message):
            write_table(path, "samples", [ROW, row])
    with pytest.raises(ValueError, match="unknown table 'sample': it must be one of environments"):
        write_table(path, "sample", [])
    assert len(read_table(path, "samples")) == 1


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = samples(tmp_path)
    write_table(path, "samples", [ROW])
    before = path.read_bytes()

    write = Path.write_bytes

    def full(where: Path, content: bytes) -> None:
        assert where.suffix != ".parquet" and where.parent.parent == path.parent
        write(where, b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(StoreError, match="cannot write .*tiny.parquet .*No space left"):
        write_table(path, "samples", [])
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_killed_write_leaves_no_parquet_file(tmp_path: Path) -> None:
    killed = """
import os, signal, sys
from pathlib import Path
from tnp.store.files import write_table

write = Path.write_bytes

def half(where, content):
    write(where, b"half")
    os.kill(os.getpid(), signal.SIGKILL)

Path.write_bytes = half
write_table(Path(sys.argv[1]), "samples", [])
"""
    path = samples(tmp_path)
    command = [sys.executable, "-c", killed, str(path)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL
    assert list(path.parent.iterdir()) and not list(tmp_path.rglob("*.parquet"))
    of_the_living = path.with_name(f".other.{socket.gethostname()}-{os.getppid()}.tmp")
    of_another_machine = path.with_name(".other.far.away-1.tmp")
    of_the_living.mkdir(), of_another_machine.mkdir()
    write_table(path, "samples", [ROW])
    assert set(path.parent.iterdir()) == {path, of_the_living, of_another_machine}


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "data").write_text("a file where the folder should be")
    with pytest.raises(StoreError, match=f"cannot write {samples(tmp_path)}"):
        write_table(samples(tmp_path), "samples", [ROW])


def test_files_of_an_older_schema_load_with_nulls(tmp_path: Path) -> None:
    path = foreign(samples(tmp_path), {"device": ["cpu"], "time_ms": [2.5]})
    write_table(samples(tmp_path, stem="new"), "samples", [ROW])
    build_database([path, samples(tmp_path, stem="new")], SQL, tmp_path / "results.duckdb")
    with duckdb.connect(str(tmp_path / "results.duckdb"), read_only=True) as store:
        rows = store.sql("select time_ms, sample from samples order by time_ms").fetchall()
    assert rows == [(1.5, 0), (2.5, None)]


def query(database: Path, sql: str) -> list[tuple]:
    with duckdb.connect(str(database), read_only=True) as connection:
        return connection.execute(sql).fetchall()


def test_equal_rows_count_once_and_recorded_ones_say_so(tmp_path: Path) -> None:
    database = tmp_path / "results.duckdb"
    files = [
        samples(tmp_path, "recorded"),
        samples(tmp_path, "recorded", "copied"),
        samples(tmp_path, "runs"),
    ]
    for file in files:
        write_table(file, "samples", [ROW, ROW | {"sample": 1, "time_ms": float("nan")}])
    for stem, rows in (("other", [ROW | {"replicate": 2}]), ("empty", [])):
        files.append(samples(tmp_path, "runs", stem))
        write_table(files[-1], "samples", rows)
    build_database(files, SQL, database)
    rows = query(database, "select origin, replicate, sample from samples order by all")
    assert rows == [("recorded", 1, 0), ("recorded", 1, 1), ("runs", 2, 0)]


def test_a_run_with_two_contents_is_refused_by_both_names(tmp_path: Path) -> None:
    database = tmp_path / "results.duckdb"
    run = [ROW | {"run_id": "r", "sample": i} for i in range(3)]
    one, copied, other = (samples(tmp_path, stem=stem) for stem in ("one", "copied", "other"))
    write_table(one, "samples", run)
    write_table(copied, "samples", run)
    write_table(other, "samples", [row | {"run_id": "another"} for row in run])
    build_database([one, copied, other], SQL, database)
    extra = run[0] | {"sample": 3}
    for altered in (run[:2], [*run[:2], run[2] | {"time_ms": 2.0}], [*run, extra], [extra]):
        write_table(other, "samples", altered)
        with pytest.raises(StoreError, match="hold run r of table samples") as caught:
            build_database([one, copied, other], SQL, database)
        assert str(other) in str(caught.value) and "\n" not in str(caught.value)
        assert str(one) in str(caught.value) or str(copied) in str(caught.value)


def test_a_view_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    view = tmp_path / "broken.sql"
    view.write_text("create view broken as from no_such_table")
    with pytest.raises(StoreError, match="broken.sql.*no_such_table"):
        build_database([], tmp_path, tmp_path / "results.duckdb")
    view.write_text("create view broken as selekt 1")
    with pytest.raises(StoreError, match="broken.sql"):
        build_database([], tmp_path, tmp_path / "results.duckdb")
    assert os.listdir(tmp_path) == [view.name]


def test_a_folder_without_views_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="sqll holds no .sql file"):
        build_database([], tmp_path / "sqll", tmp_path / "results.duckdb")
    assert not list(tmp_path.iterdir())


def test_a_file_edited_by_another_program_is_refused(tmp_path: Path) -> None:
    """A sound Parquet file, written by a program that keeps the metadata of the old one."""
    path = samples(tmp_path)
    write_table(path, "samples", [ROW])
    edited = pq.ParquetFile(path).read()
    edited = edited.set_column(edited.column_names.index("time_ms"), "time_ms", pa.array([1.0]))
    pq.write_table(edited, path)
    with pytest.raises(StoreError, match="its bytes are not those that were written"):
        read_table(path, "samples")


CODE = [
    {"device": "cpu", "recorded_at": NOW, "run_id": run, "implementation": name}
    | {"part": "definition", "name": of, "hash": hash_}
    for run, name, hash_ in (("a", "", "1"), ("b", "", "1"), ("b", "fused", "2"))
    for of in ("tnp.y:f", "tnp.x:f")
]


def code(root: Path, origin: str = "runs", stem: str = "tiny") -> Path:
    return root / "data" / origin / "cpu" / "code" / f"{stem}.parquet"


def stored_code(files: list[Path], database: Path) -> tuple[list[tuple], list[tuple]]:
    build_database(files, SQL, database)
    rows = query(database, "select run_id, implementation, code_set, origin from code order by all")
    return rows, query(database, "select code_set, part, name, hash from code_parts order by all")


def test_a_set_of_code_is_written_once_and_earlier_layouts_give_the_same(tmp_path: Path) -> None:
    write_table(code(tmp_path), "code", CODE)
    sets = code(tmp_path).parents[1] / "code_parts"
    assert len(list(sets.iterdir())) == 2 and len(read_table(code(tmp_path), "code")) == 3
    written = {file: file.stat().st_mtime_ns for file in sets.iterdir()}
    write_table(code(tmp_path, stem="again"), "code", [row | {"run_id": "c"} for row in CODE[:2]])
    assert {file: file.stat().st_mtime_ns for file in sets.iterdir()} == written
    new = [*sets.iterdir(), code(tmp_path)]
    rows, parts = stored_code(new, tmp_path / "new.duckdb")
    assert [row[:2] for row in rows] == [("a", ""), ("b", ""), ("b", "fused")]
    assert rows[0][2] == rows[1][2] != rows[2][2]
    assert [row[1:] for row in parts if row[0] == rows[2][2]] == [
        ("definition", "tnp.x:f", "2"),
        ("definition", "tnp.y:f", "2"),
    ]
    columns = {
        name: [row[name] for row in reversed(CODE)] for name in CODE[0] if name != "recorded_at"
    }
    old = foreign(code(tmp_path, stem="old"), columns)
    assert stored_code([old], tmp_path / "old.duckdb") == (rows, parts)
    with pytest.raises(
        StoreError, match=f"{code(tmp_path)} names the set of code {rows[0][2]}, wh"
    ):
        build_database([code(tmp_path)], SQL, tmp_path / "new.duckdb")


def test_sets_of_code_are_recorded_with_the_rows_that_name_them(tmp_path: Path) -> None:
    runs, recorded = tmp_path / "data" / "runs", tmp_path / "data" / "recorded"
    write_table(code(tmp_path), "code", CODE[:4])
    record(runs, recorded)
    write_table(code(tmp_path, stem="new"), "code", [row | {"run_id": "c"} for row in CODE])
    record(runs, recorded)
    files = parquet_files(recorded)
    assert [len(read_table(file, file.parent.name)) for file in files] == [2, 2, 2, 2]
    assert len(stored_code(files, tmp_path / "results.duckdb")[0]) == 4


def test_record_adds_what_is_new_and_changes_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    runs, recorded = tmp_path / "data" / "runs", tmp_path / "data" / "recorded"
    rows = [ROW | {"replicate": i, "time_ms": i / 3} for i in range(3)]
    for row in rows:
        write_table(samples(tmp_path, stem=f"r{row['replicate']}"), "samples", [row])
    (runs / "cpu" / "checkpoints").mkdir()
    samples(tmp_path, stem=".half").write_bytes(b"half")  # hidden: some program's own
    record(runs, recorded)
    record(runs, recorded)
    assert f"{runs} holds no row that {recorded} lacks" in capsys.readouterr().out
    (file,) = recorded.glob("cpu/*/*.parquet")
    copied = read_table(file, "samples").to_pylist()
    assert sorted(copied, key=lambda row: row["replicate"]) == [row | MISSING for row in rows]
    write_table(samples(tmp_path, stem="r3"), "samples", [ROW | {"replicate": 3}])
    record(runs, recorded)
    (new,) = set(recorded.glob("cpu/*/*.parquet")) - {file}
    assert [row["replicate"] for row in read_table(new, "samples").to_pylist()] == [3]


def test_recording_what_is_not_there_says_so(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tnp.store", "record", str(tmp_path / "rnus"), str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{tmp_path}/rnus is no folder") and done.stderr.count("\n") == 1


@pytest.mark.skipif(not shutil.which("duckdb"), reason="no duckdb command line")
def test_the_command_line_reads_every_view(tmp_path: Path) -> None:
    database = tmp_path / "results.duckdb"
    build_database([], of_sql.SQL, database)
    queries = [f"select '{view}' from {view};" for view in of_sql.VIEWS]
    done = subprocess.run(
        ["duckdb", "-readonly", "-bail", "-list", "-noheader", str(database)],
        input="\n".join(queries),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert not done.stdout  # nothing was measured
