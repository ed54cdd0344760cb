"""Digests of every table and view over the rows recorded by a date, to see a change's effect.

    python -m tests.sql.cells           compares with tests/sql/cells.json
    python -m tests.sql.cells --write   replaces tests/sql/cells.json

Rows that were recorded later are left out, so that a new measurement changes no digest.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pyarrow as pa

from tnp.figures import report
from tnp.store import files
from tnp.store.schemas import TABLES
from tnp.util.atomic_files import parquet_files

EXPECTED = Path(__file__).with_name("cells.json")
RECORDED_BY = datetime(2026, 11, 22, tzinfo=UTC)
# Sums may run in another order, so a number is rounded to so many digits and decimals.
DIGITS, DECIMALS = 7, 12
# The catalog's tables depend on which packages are installed, and the last bits of sums in
# `built_from` on the processor: neither says anything of what was recorded.
LEFT_OUT = ("implementations", "column_meanings", "built_from")

Digests = dict[str, dict[str, str]]  # table or view → column → digest of its cells


def digests(recorded: Path, known: Digests | None = None) -> Digests:
    """Returns digests of all columns, or of those in `known`, for a database of recorded rows."""
    with duckdb.connect(str(recorded), read_only=True) as connection:
        tables = {
            table: connection.sql(
                f"select *, '' as file from {table}"
                + (f" where recorded_at < '{RECORDED_BY}'" if "recorded_at" in schema.names else "")
            ).to_arrow_table()
            for table, schema in TABLES.items()
        }
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "results.duckdb"
        files._fill(database, tables, sorted(report.VIEWS.glob("*.sql")), inputs="")
        with duckdb.connect(str(database), read_only=True) as connection:
            names = connection.sql(
                "select view_name from duckdb_views() where not internal "
                "union select table_name from duckdb_tables() order by all"
            ).fetchall()
            return {
                name: digest(
                    connection.sql(f"select * from {name}").to_arrow_table(),
                    None if known is None else known.get(name, {}),
                )
                for (name,) in names
                if name not in LEFT_OUT
            }


def digest(rows: pa.Table, columns: Iterable[str] | None = None) -> dict[str, str]:
    """Returns a digest of each of these columns that exists, with the rows in a fixed order."""
    wanted = sorted(rows.column_names if columns is None else columns)
    rows = rows.select([name for name in wanted if name in rows.column_names])
    lines = sorted(tuple(map(_text, row)) for row in zip(*rows.to_pydict().values(), strict=True))
    return {
        name: hashlib.sha256("\n".join(line[at] for line in lines).encode()).hexdigest()[:8]
        for at, name in enumerate(rows.column_names)
    }


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{round(value, DECIMALS):.{DIGITS}g}"
    if isinstance(value, list):
        return repr([_text(one) for one in value])
    if isinstance(value, dict):
        return repr({key: _text(one) for key, one in value.items()})
    return str(value)


def changed(recorded: Path) -> list[str]:
    """Returns a sentence for each table, view or column that differs from the expected digests."""
    expected: Digests = json.loads(EXPECTED.read_text())
    found = digests(recorded, expected)
    sentences = [f"{name} is gone" for name in sorted(expected.keys() - found.keys())]
    for name in sorted(expected.keys() & found.keys()):
        for column, cells in expected[name].items():
            if column not in found[name]:
                sentences.append(f"{name}.{column} is gone")
            elif found[name][column] != cells:
                sentences.append(f"{name}.{column} has other cells")
    return sentences


def write(found: Digests) -> None:
    """Writes the expected digests, a line for each table or view."""
    lines = [f"{json.dumps(name)}: {json.dumps(cells)}" for name, cells in sorted(found.items())]
    EXPECTED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "results.duckdb"
        files.build_database(parquet_files(report.RECORDED), report.VIEWS, database)
        if sys.argv[1:] == ["--write"]:
            write(digests(database))
        else:
            print(*changed(database), sep="\n")
