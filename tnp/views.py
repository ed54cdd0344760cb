"""The store's views: runs each file of SQL after those that it reads, and says what each is for.

A file begins with a comment, whose first paragraph becomes the comment of all that it creates. So
`select view_name, comment from duckdb_views()` explains the views, and `duckdb_columns()` those of
their columns that `COLUMNS` knows.
"""

import re
from collections.abc import Mapping, Sequence
from itertools import chain, takewhile
from pathlib import Path

import duckdb

from tnp.files import StoreError, first_line

# What a file of SQL reads or calls, as far as words tell: relations, and macros.
READ = re.compile(r"\b(?:from|join)\s+(\w+)|\b(\w+)\(", re.IGNORECASE)
CREATED = re.compile(r"^create (?:or replace )?(view|table|macro) (\w+)", re.MULTILINE)

# Columns that no reader can guess, in whatever table or view they stand.
COLUMNS = {
    "question": "names what was timed: device, sizes, dtype, variant or implementation, switches; "
    "rows of one question answer the same",
    "generation": "a question's rows that ran the same code under the same timing policy",
    "role": "baseline: plain PyTorch; peer: PyTorch's other ways and other packages; own: anything "
    "with an operator of ours",
    "proven": "the gates passed on the very code that was timed; false: a gate is red; null: no "
    "evidence was kept",
    "counts": "the row may be compared: proven, settled and not too hot; false: it may not, see "
    "why_not; null: recorded before evidence was kept",
    "why_not": "why the row does not count",
    "varies": "a stream of tasks whose sizes vary",
    "leads": "of ours at these sizes the step that is surest to be fast",
    "fastest": "no step at these sizes is faster by more than 1 %: several may be",
    "speedup": "how many times as fast as the plain form, with its 95 % interval in _low and _high",
    "speedup_best": "how many times as fast as the fastest of PyTorch and other packages",
    "why_no_speedup": "why a timed step has no speedup",
    "verdict": "on speedup: faster, slower or same (within 1 %), or ambiguous; null: no evidence",
    "verdict_best": "as verdict, on speedup_best",
    "q": "of verdict: the probability of so large a ratio by chance, corrected for all comparisons "
    "that the figure shows on the device",
    "q_best": "as q, of verdict_best",
    "origin": "recorded: in this repository; runs: measured on this machine",
    "sitting": "runs on one GPU without a gap of more than 30 minutes",
}


def create_views(connection: duckdb.DuckDBPyConnection, files: list[Path]) -> None:
    """Runs every one of `files` after those that it reads, and comments on what they create.

    Raises StoreError for a file that cannot be run.
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
    """Sorts files so that each stands behind those that it reads, as far as words tell.

    DuckDB binds much of what a file reads before it misses a view, so the order is worth it. A file
    that comes too early nevertheless waits for the others.
    """
    words = {path.stem: set(chain(*READ.findall(path.read_text()))) for path in files}
    reads = {name: found & words.keys() for name, found in words.items()}
    return sorted(files, key=lambda path: len(_reached(path.stem, reads)))


def _reached(name: str, reads: Mapping[str, set[str]]) -> set[str]:
    """What it reads, and what these read."""
    found: set[str] = set()
    pending = [name]
    while pending:
        new = reads[pending.pop()] - found - {name}
        found |= new
        pending += new
    return found


def _comment(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Gives all that `sql` creates the first paragraph of the comment that it begins with."""
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
