"""The store: what is written is read back, and nothing that is wrong gets in."""

import json
import os
import random
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

from tests.sql.conftest import SQL, VIEWS
from tnp.store.files import StoreError, build_database, read_table, record, write_table
from tnp.store.schemas import SCHEMA_VERSION, TABLES

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

    def full(content: pa.Table, where: Path, **options: object) -> None:
        assert where.suffix != ".parquet" and where.parent.parent == path.parent
        where.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(StoreError, match="cannot write .*tiny.parquet .*No space left"):
        write_table(path, "samples", [])
    assert path.read_bytes() == before
    assert os.listdir(path.parent) == [path.name]


def test_a_killed_write_leaves_no_parquet_file(tmp_path: Path) -> None:
    killed = """
import os, signal, sys
from pathlib import Path
import pyarrow.parquet as pq
from tnp.store.files import write_table

def write(content, where, **options):
    Path(where).write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)

pq.write_table = write
write_table(Path(sys.argv[1]), "samples", [])
"""
    path = samples(tmp_path)
    command = [sys.executable, "-c", killed, str(path)]
    assert subprocess.run(command, cwd=SQL.parents[1]).returncode == -signal.SIGKILL
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


def truncated(path: Path) -> None:
    write_table(path, "samples", [ROW])
    path.write_bytes(path.read_bytes()[:-20])


def garbled(path: Path) -> None:
    write_table(path, "samples", [ROW] * 1000)
    content = bytearray(path.read_bytes())
    content[8:200] = bytes(192)
    path.write_bytes(content)


FAULTS = {
    "does not exist": lambda path: None,
    "is not a whole Parquet file": truncated,
    "not a whole": garbled,
    "is not a whole": lambda path: (path.parent.mkdir(parents=True), path.touch()),
    "schema version 2, this checkout reads up to 1": lambda path: foreign(
        path, {"time_ms": [1.0]}, {"tnp_schema_version": "2"}
    ),
    "schema version 'abc', which is no number": lambda path: foreign(
        path, {"time_ms": [1.0]}, {"tnp_schema_version": "abc"}
    ),
    "is no regular file": lambda path: (path.parent.mkdir(parents=True), os.mkfifo(path)),
    "not written by tnp.store": lambda path: foreign(path, {"time_ms": [1.0]}, {}),
    "time_ms as string, table samples as double": lambda path: foreign(path, {"time_ms": ["1"]}),
    "a column 'speed' that table samples lacks": lambda path: foreign(path, {"speed": [1.0]}),
}


@pytest.mark.parametrize("message", FAULTS)
def test_a_file_at_fault_is_named_and_the_database_stays(tmp_path: Path, message: str) -> None:
    database = tmp_path / "results.duckdb"
    build_database([], SQL, database)
    before = database.read_bytes()
    path = samples(tmp_path)
    FAULTS[message](path)
    with pytest.raises(StoreError, match=f"{path}.*{message}") as caught:
        build_database([path], SQL, database)
    assert "\n" not in str(caught.value)
    assert database.read_bytes() == before
    assert not list(tmp_path.glob(".*"))


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
    write_table(samples(tmp_path, "runs", "other"), "samples", [ROW | {"replicate": 2}])
    files.append(samples(tmp_path, "runs", "other"))
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


def test_files_without_rows_load_beside_others(tmp_path: Path) -> None:
    files = [samples(tmp_path, stem=stem) for stem in ("empty", "tiny")]
    write_table(files[0], "samples", [])
    write_table(files[1], "samples", [ROW])
    build_database(files, SQL, tmp_path / "results.duckdb")
    with duckdb.connect(str(tmp_path / "results.duckdb"), read_only=True) as store:
        assert len(store.sql("from samples").fetchall()) == 1


def test_a_file_in_a_folder_of_no_table_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data" / "runs" / "cpu" / "sampels" / "tiny.parquet"
    write_table(path, "samples", [ROW])
    with pytest.raises(StoreError, match="in a folder 'sampels': it must be one of"):
        build_database([path], SQL, tmp_path / "results.duckdb")


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


def test_flipped_bits_never_give_other_rows(tmp_path: Path) -> None:
    path = samples(tmp_path)
    draw = random.Random(0)
    rows = [ROW | {"sample": i, "time_ms": draw.random()} for i in range(200)]
    write_table(path, "samples", rows)
    content, written = path.read_bytes(), read_table(path, "samples")
    n_refused = 0
    for bit in draw.sample(range(8 * len(content)), 600):
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            assert read_table(path, "samples").equals(written), f"bit {bit} of {path}"
        except StoreError:
            n_refused += 1
    assert n_refused > 200


def test_a_file_that_may_not_be_read_says_so(tmp_path: Path) -> None:
    path = samples(tmp_path)
    write_table(path, "samples", [ROW])
    path.chmod(0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)  # root may read anything
    try:
        with pytest.raises(StoreError, match=r"cannot be read \(Permission denied\): make it"):
            read_table(path, "samples")
    finally:
        os.seteuid(user)


def test_record_adds_what_is_new_and_changes_no_row(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    runs, recorded = tmp_path / "data" / "runs", tmp_path / "data" / "recorded"
    rows = [ROW | {"replicate": i, "time_ms": i / 3} for i in range(3)]
    for row in rows:
        write_table(samples(tmp_path, stem=f"r{row['replicate']}"), "samples", [row])
    (runs / "cpu" / "checkpoints").mkdir()
    samples(tmp_path, stem=".half").write_bytes(b"half")  # hidden: some program's own
    command = [sys.executable, "-m", "tnp.store", "record", str(runs), str(recorded)]
    subprocess.run(command, check=True, cwd=SQL.parents[1])
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
    done = subprocess.run(command, cwd=SQL.parents[1], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{tmp_path}/rnus is no folder") and done.stderr.count("\n") == 1


@pytest.mark.skipif(not shutil.which("duckdb"), reason="no duckdb command line")
def test_the_command_line_reads_every_view(tmp_path: Path) -> None:
    database = tmp_path / "results.duckdb"
    build_database([], SQL, database)
    for view in VIEWS:
        done = subprocess.run(
            ["duckdb", "-readonly", "-json", str(database), f"from {view}"],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{view}: {done.stderr}"
        if view != "families":  # a list, of nothing measured
            assert not any(json.loads(done.stdout or "[]"))
