"""A new database takes the old one's place whole and read back, or not at all."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from tests.store import SQL
from tests.store.test_files import ROW, query, samples
from tnp.store.files import StoreError, build_database, write_table


def test_readers_keep_their_database_while_it_is_replaced(tmp_path: Path) -> None:
    database, path = tmp_path / "results.duckdb", samples(tmp_path)
    build_database([], SQL, database)
    with duckdb.connect(str(database), read_only=True) as reader:
        write_table(path, "samples", [ROW])
        build_database([path], SQL, database)
        assert reader.sql("from samples").fetchall() == []


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_kill_as_a_database_is_replaced_leaves_one_that_opens(tmp_path: Path, when: str) -> None:
    """With the log of another program beside the old one, just before and just after the rename."""
    database = tmp_path / "results.duckdb"
    killed = """
import os, signal, sys
from pathlib import Path
import duckdb
from tnp.store.files import build_database

database, sql, when = map(Path, sys.argv[1:])
if not os.fork():
    connection = duckdb.connect(str(database))
    connection.execute("create table notes as select 1")
    os._exit(0)
os.wait()
assert Path(f"{database}.wal").exists()
rename = os.replace

def replace(new, old):
    if str(when) == "after":
        rename(new, old)
    os.kill(os.getpid(), signal.SIGKILL)

os.replace = replace
build_database([], sql, database)
"""
    build_database([], SQL, database)
    command = [sys.executable, "-c", killed, str(database), str(SQL), when]
    assert subprocess.run(command, cwd=Path(__file__).parents[2]).returncode == -signal.SIGKILL
    assert query(database, "from samples") == []


@pytest.mark.parametrize("table", ["samples", "slowest"])
def test_a_database_that_reads_back_otherwise_takes_no_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """A table of rows, and one that a file of SQL creates."""
    database, path = tmp_path / "results.duckdb", samples(tmp_path)
    build_database([], SQL, database)
    write_table(path, "samples", [ROW])
    before = database.read_bytes()
    connect = duckdb.connect

    def forgetful(path: str = ":memory:", **options: object) -> duckdb.DuckDBPyConnection:
        if options.get("read_only") and path != str(database):
            with connect(path) as damaged:
                damaged.execute(f"insert into {table} (device) values ('gpu')")
        return connect(path, **options)

    monkeypatch.setattr(duckdb, "connect", forgetful)
    with pytest.raises(StoreError, match="it reads back otherwise than it was written"):
        build_database([path], SQL, database)
    assert database.read_bytes() == before


def test_a_database_of_the_same_inputs_is_kept_and_any_other_is_built_anew(tmp_path: Path) -> None:
    database, path, views = tmp_path / "results.duckdb", samples(tmp_path), tmp_path / "sql"
    views.mkdir()
    view = views / "slow.sql"
    view.write_text("-- Grain: sample.\ncreate view slow as select 1 as role")
    write_table(path, "samples", [ROW])

    def is_kept() -> bool:
        before = os.stat(database).st_ino
        build_database([path], views, database)
        return os.stat(database).st_ino == before

    build_database([path], views, database)
    assert is_kept()
    commented = "select comment from duckdb_views() where view_name = 'slow'"
    assert query(database, commented) == [("Grain: sample.",)]
    unchanged = os.stat(path)
    write_table(path, "samples", [ROW | {"time_ms": 2.5}])
    os.utime(path, ns=(unchanged.st_atime_ns, unchanged.st_mtime_ns))
    assert not is_kept() and query(database, "select time_ms from samples") == [(2.5,)]
    view.write_text("create view slow as select 2 as role")
    assert not is_kept() and query(database, "from slow") == [(2,)]
    with duckdb.connect(str(database)) as connection:
        connection.execute("delete from samples")
    assert not is_kept() and query(database, "select time_ms from samples") == [(2.5,)]
    content = bytearray(database.read_bytes())
    content[len(content) // 2 :] = bytes(len(content) // 2)
    database.write_bytes(content)
    assert not is_kept() and query(database, "select time_ms from samples") == [(2.5,)]
    assert is_kept()
