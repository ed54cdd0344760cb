"""RESULTS.md, and README.md's tables and chart, from the recorded rows: `python -m
tnp.figures.report`.

Every table is a query, a file of workflow/report. Its first comment lines are the section's title
and text, and its columns are the table's, with spaces for underscores. RESULTS.md has all sections,
in the order of the files' names. README.md has tables where a block names one:
`<!-- report: headline -->` to `<!-- end -->` is the table of workflow/report/10_headline.sql.
README.md says once, below a table, what all of its rows have in common.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

import duckdb
import vl_convert

from tnp.figures import headline
from tnp.store.files import build_database
from tnp.util.atomic_files import parquet_files

QUERIES = Path("workflow/report")
RECORDED = Path("data/recorded")
VIEWS = Path("workflow/sql")
README, RESULTS = Path("README.md"), Path("RESULTS.md")
CHART = Path("figures/headline.svg")

BLOCK = re.compile(r"(<!-- report: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBERED = re.compile(r"\d+_")

Table = tuple[list[str], list[tuple]]  # names of columns, rows

INTRODUCTION = """\
# Results

Written by `make report` from the rows in `data/recorded`: no number here was typed. Each table is
a query in [`workflow/report`](workflow/report).

A row has **evidence** where it says which code ran on which GPU, the gates of that very code were
green there, its times had settled, and the GPU was not too hot. A gate is a set of checks that a
kernel must pass. Times have settled where the first and the last third of them differ by less than
1 %. Of operators, whole rounds are judged: all implementations of an operator are timed in turn in
one job, and a round is one turn of each.

Two rows with evidence that were timed beside each other are compared: their ratio has a 95 %
interval and a verdict. *Faster* and *slower* mean by more than 1 %, with all comparisons of a table
taken into account; *same* means within 1 %; *ambiguous* means that more runs are needed.

A ratio without an interval is of two plain medians, because evidence is missing or because the two
were timed on different occasions. It proves nothing, and has a dash in place of a verdict. Any
other dash is a value that does not exist.
"""


def documents(connection: duckdb.DuckDBPyConnection) -> dict[Path, str]:
    """Returns what README.md and RESULTS.md should hold, by the rows of an open store.

    Raises ValueError for a block of README.md that names no query.
    """
    queries = {NUMBERED.sub("", path.stem, count=1): path for path in sorted(QUERIES.glob("*.sql"))}
    queries = {name: path.read_text() for name, path in queries.items()}
    tables = {name: _rows(connection, sql) for name, sql in queries.items()}
    sections = [f"{_heading(sql)}\n\n{_markdown(*tables[name])}" for name, sql in queries.items()]
    return {
        README: _filled(README.read_text(), tables),
        RESULTS: "\n".join([INTRODUCTION, *sections]),
    }


def _heading(sql: str) -> str:
    """The comment that `sql` begins with, as Markdown: a title of second level, and text."""
    lines = []
    for line in sql.splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    title, *text = lines
    return f"#{title}\n" + "\n".join(text)


def _rows(connection: duckdb.DuckDBPyConnection, sql: str) -> Table:
    """Returns the names of the columns of `sql`, as a reader sees them, and its rows."""
    cursor = connection.execute(sql)
    return [name.replace("_", " ") for name, *_ in cursor.description], cursor.fetchall()


def _markdown(names: list[str], rows: list[tuple]) -> str:
    """Returns a Markdown table; numbers are aligned to the right."""
    if not rows:
        return "Nothing.\n"
    numeric = [
        any(isinstance(row[i], int | float) and not isinstance(row[i], bool) for row in rows)
        for i in range(len(names))
    ]
    rule = ["---:" if right else "---" for right in numeric]
    lines = [names, rule, *([_cell(value) for value in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _short(names: list[str], rows: list[tuple]) -> str:
    """Returns a Markdown table; one line below it says what columns of text say in every row."""
    shared = {
        i: rows[0][i]
        for i in range(len(names))
        if len(rows) > 1 and isinstance(rows[0][i], str) and len({row[i] for row in rows}) == 1
    }
    kept = [i for i in range(len(names)) if i not in shared]
    table = _markdown([names[i] for i in kept], [tuple(row[i] for i in kept) for row in rows])
    if not shared:
        return table
    said = ", ".join(f"{names[i]} {_cell(value)}" for i, value in shared.items())
    return f"{table}\nIn every row: {said}.\n"


def _cell(value: object) -> str:
    """`value` as a reader wants it: four significant digits, thousands apart, a dash for null."""
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return str(value).replace("|", "\\|")


def _filled(text: str, tables: dict[str, Table]) -> str:
    """Returns `text` with the table of each block in it."""

    def table(block: re.Match[str]) -> str:
        start, name, end = block.groups()
        if name not in tables:
            raise ValueError(
                f"{README} has a block {name!r}: it must be one of {', '.join(tables)}"
            )
        return f"{start}\n{_short(*tables[name])}\n{end}"

    return BLOCK.sub(table, text)


def main() -> None:
    """Write both files, or with `--check` say which differ from what would be written."""
    parser = argparse.ArgumentParser(
        prog="python -m tnp.figures.report", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail where one differs"
    )
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder, "results.duckdb")
        build_database(parquet_files(RECORDED), VIEWS, database)
        with duckdb.connect(str(database), read_only=True) as connection:
            texts = documents(connection)
            if not check:  # not compared: where its letters stand depends on a machine's fonts
                svg = vl_convert.vegalite_to_svg(headline.draw(connection).to_dict())
                CHART.write_text(svg)
    differing = [
        path for path, text in texts.items() if not path.exists() or path.read_text() != text
    ]
    if not check:
        for path in differing:
            path.write_text(texts[path])
    elif differing:
        names = " and ".join(map(str, differing))
        sys.exit(f"not as the recorded rows say: {names}; run make report")


if __name__ == "__main__":
    main()
