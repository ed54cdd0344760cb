"""Creates the store's views from SQL files, and comments on the views and their columns.

A file runs after the files that it reads. The first paragraph of its first comment becomes the
comment of each view that it creates: see `select view_name, comment from duckdb_views()`. The
comments of columns come from `COLUMNS`: see `duckdb_columns()`.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from pathlib import Path

import duckdb

from tnp.util.atomic_files import StoreError, first_line

# Finds the relations that a SQL file reads and the macros that it calls. It finds some other words
# too.
READ = re.compile(r"\b(?:from|join)\s+(\w+)|\b(\w+)\(", re.IGNORECASE)
CREATED = re.compile(r"^create (?:or replace )?(view|table|macro) (\w+)", re.MULTILINE)

# Comments of columns that no reader can guess, in any table or view.
COLUMNS = {
    "question": "names what was timed: device, sizes, dtype, variant or implementation, switches; "
    "rows with one question measured the same thing",
    "generation": "a question's rows that ran the same code under the same timing policy",
    "role": "baseline: plain PyTorch; peer: PyTorch's other ways and other packages; own: anything "
    "with an operator of ours",
    "proven": "the gates passed on the very code that was timed; false: a gate is red; null: no "
    "evidence was kept",
    "counts": "the row may be compared: proven, settled and not too hot; false: it may not, see "
    "why_not; null: recorded before evidence was kept",
    "why_not": "why the row does not count",
    "varies": "a stream of tasks whose sizes vary",
    "leads": "the step of ours at these sizes that is surest to be fast",
    "fastest": "no step at these sizes is faster by more than 1 %: several may be",
    "speedup": "how many times as fast as the plain form, with its 95 % interval in _low and _high",
    "speedup_best": "how many times as fast as the fastest of PyTorch and other packages",
    "why_no_speedup": "why a timed step has no speedup",
    "verdict": "on speedup: faster, slower or same (within 1 %), or ambiguous; null: no evidence",
    "verdict_best": "as verdict, on speedup_best",
    "q": "for verdict: the probability of so large a ratio by chance, corrected for all "
    "comparisons that the figure shows on the device",
    "q_best": "as q, for verdict_best",
    "origin": "recorded: in this repository; runs: measured on this machine",
    "sitting": "runs on one GPU without a gap of more than 30 minutes",
}


def create_views(connection: duckdb.DuckDBPyConnection, files: list[Path]) -> None:
    """Runs each file after the files that it reads, and comments on the views that they create.

    Raises:
        StoreError: a file cannot be run.
    """
    pending = in_order(files)
    while pending:
        waiting, problem = [], ""
        for path in pending:
            try:
                connection.execute(path.read_text())
            except duckdb.CatalogException as error:
                waiting.append(path)
                problem = f"{path}: {first_line(error)}"
            except duckdb.Error as error:
                raise StoreError(f"{path} cannot be run: {error}") from error
        if waiting == pending:
            raise StoreError(f"{problem}: no file in {waiting[0].parent} creates it")
        pending = waiting
    for path in files:
        _comment(connection, path.read_text())
    _comment_on_columns(connection)


def in_order(files: Sequence[Path]) -> list[Path]:
    """Returns the files sorted so that each comes after the files that it reads.

    The order saves time only: `create_views` runs a file again if it came too early. DuckDB does
    much work on a file before it misses a view.
    """
    words = {path.stem: set(chain(*READ.findall(path.read_text()))) for path in files}
    reads = {name: found & words.keys() for name, found in words.items()}
    return sorted(files, key=lambda path: len(_reached(path.stem, reads)))


def _reached(name: str, reads: Mapping[str, set[str]]) -> set[str]:
    """Returns all names that `name` reads, directly or through others."""
    found: set[str] = set()
    pending = [name]
    while pending:
        new = reads[pending.pop()] - found - {name}
        found |= new
        pending += new
    return found


def _comment(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Sets the first paragraph of the file's first comment on everything that `sql` creates."""
    paragraph = takewhile(lambda line: line.startswith("-- "), sql.splitlines())
    text = " ".join(line.removeprefix("-- ") for line in paragraph)
    for kind, name in CREATED.findall(sql) if text else ():
        connection.execute(f"comment on {kind} {name} is {_quoted(text)}")


def _comment_on_columns(connection: duckdb.DuckDBPyConnection) -> None:
    columns = connection.execute(
        "select table_name, column_name from duckdb_columns() where not internal"
    )
    for relation, column in columns.fetchall():
        if column in COLUMNS:
            text = _quoted(COLUMNS[column])
            connection.execute(f'comment on column {relation}."{column}" is {text}')


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
