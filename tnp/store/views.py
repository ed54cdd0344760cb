"""Creates the store's tables and views from SQL files, and comments on them and their columns.

A file may create several, each below a comment. The comment's first paragraph becomes that of the
view, table or macro: see `select view_name, comment from duckdb_views()`. The comments of columns
come from table `column_meanings`, if a file creates it: see `duckdb_columns()`.
"""

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import duckdb

from tnp.util.atomic_files import StoreError, first_line

# Names that a statement reads and calls. Both find some other words too.
READ = re.compile(r"\b(?:from|join|pivot)\s+(\w+)", re.IGNORECASE)
CALLED = re.compile(r"\b(\w+)\(")
# A block of comment lines, and what the statement below it creates.
CREATED = re.compile(
    r"((?:^--.*\n)*)^create (?:or replace )?(view|table|macro) (\w+)", re.MULTILINE
)
MEANINGS = "column_meanings"


def create_views(connection: duckdb.DuckDBPyConnection, files: list[Path]) -> None:
    """Runs each file after the files that it reads, and comments on what they create.

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
    comments = [
        f"comment on {kind} {name} is {_quoted(_first_paragraph(comment))}"
        for path in files
        for comment, kind, name in CREATED.findall(path.read_text())
    ]
    if (MEANINGS,) in connection.execute("select table_name from duckdb_tables()").fetchall():
        comments += _comments_on_columns(connection)
    # One transaction for all comments is faster than one for each.
    connection.execute(";\n".join(["begin", *comments, "commit"]))


def in_order(files: Sequence[Path]) -> list[Path]:
    """Returns the files sorted so that each comes after the files that it reads.

    The order saves time only: `create_views` runs a file again if it came too early. DuckDB does
    much work on a file before it misses a view.
    """
    texts = {path: path.read_text() for path in files}
    home = {name: path for path in files for _, _, name in CREATED.findall(texts[path])}
    reads = {
        path: {home[word] for word in READ.findall(text) + CALLED.findall(text) if word in home}
        for path, text in texts.items()
    }
    return sorted(files, key=lambda path: len(_reached(path, reads)))


def _reached(start: Path, reads: Mapping[Path, set[Path]]) -> set[Path]:
    """Returns all files that `start` reads, directly or through others."""
    found: set[Path] = set()
    pending = [start]
    while pending:
        new = reads[pending.pop()] - found - {start}
        found |= new
        pending += new
    return found


def _first_paragraph(comment: str) -> str:
    """Returns the text of `comment` up to its first line without any."""
    lines = [line.removeprefix("--").strip() for line in comment.splitlines()]
    return " ".join(lines[: lines.index("")] if "" in lines else lines)


def _comments_on_columns(connection: duckdb.DuckDBPyConnection) -> list[str]:
    """Returns statements that comment on each column: by its name, or its view, or its ending."""
    statements = []
    meanings = dict(connection.execute(f"from {MEANINGS}").fetchall())
    patterns = {name.replace("%", "*"): name for name in meanings if "%" in name}
    columns = connection.execute(
        "select table_name, column_name from duckdb_columns() where not internal"
    )
    for relation, column in columns.fetchall():
        full = f"{relation}.{column}"
        exact = [name for name in (full, column) if name in meanings]
        matching = [known for pattern, known in patterns.items() if fnmatchcase(full, pattern)]
        of_view = [known for known in matching if known.startswith(f"{relation}.")]
        for name in [*exact, *of_view, *sorted(matching, key=len, reverse=True)][:1]:
            text = _quoted(meanings[name])
            statements.append(f'comment on column {relation}."{column}" is {text}')
    return statements


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
