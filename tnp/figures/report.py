"""Writes the published tables and the chart from the recorded rows: `python -m tnp.figures.report`.

A table is a query, a file of workflow/report. Its first comment lines are the section's title and
text. Its columns are the table's, with spaces for underscores. A first line `-- topic: attention`
puts the section on the page results/attention.md; sections without a topic are in RESULTS.md. The
order follows the files' names.

README.md and pages of docs/ have tables where a block names one: `<!-- report: headline -->` to
`<!-- end -->` holds the table of workflow/report/10_headline.sql. Blocks `catalog`, `figures` and
`questions` list operators, figures and ready queries by their own first sentences. One line below
such a table says what all of its rows share.
"""

import argparse
import importlib
import re
import sys
import tempfile
from pathlib import Path

import duckdb
import vl_convert

from tnp.dispatch.registry import OWN, catalog
from tnp.figures import headline
from tnp.figures.story import FIGURES
from tnp.store.files import build_database
from tnp.util.atomic_files import parquet_files

QUERIES, QUESTIONS = Path("workflow/report"), Path("workflow/questions")
RECORDED = Path("data/recorded")
VIEWS = Path("workflow/sql")
RESULTS, PAGES = Path("RESULTS.md"), Path("results")
WITH_BLOCKS = (Path("README.md"), Path("docs/operators.md"), Path("docs/running.md"))
CHART = Path("figures/headline.svg")

BLOCK = re.compile(r"(<!-- report: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
NUMBERED = re.compile(r"\d+_")
TOPIC = re.compile(r"-- topic: (\w+)\n")

Table = tuple[list[str], list[tuple]]  # names of columns, rows

INTRODUCTION = """\
# Results

`make report` writes this page from the rows in `data/recorded`. No number here was typed. Each
table is a query in [`workflow/report`](workflow/report).

- **Evidence.** A row with evidence names its code and its GPU. The gates passed on that very code,
  its times are precise enough, and heat did not slow the GPU. A gate is a set of checks that a
  kernel must pass. Times are precise enough if their first and last third differ by less than 1 %.
- **Interval and verdict.** They need two rows with evidence that were timed beside each other. The
  interval is one of 95 %. *Faster* and *slower* mean by more than 1 %, corrected for the number of
  comparisons in the table. *Same* means within 1 %. *Ambiguous* means that more runs are needed.
- **A ratio without an interval** divides two medians. Evidence is missing, or the two were not
  timed together. It proves nothing, so its verdict is a dash.
- **Any other dash** stands for a value that does not exist.

[docs/glossary.md](docs/glossary.md) explains the words. Longer tables have pages of their own:

"""

PAGE = """\
# Results: {topic}

`make report` writes this page. [RESULTS.md](../RESULTS.md) says what evidence and verdicts are.
"""


def documents(connection: duckdb.DuckDBPyConnection) -> dict[Path, str]:
    """Returns the text of every generated document, by its path, from an open store.

    Raises ValueError for a block that names no query.
    """
    queries = {NUMBERED.sub("", path.stem, count=1): path for path in sorted(QUERIES.glob("*.sql"))}
    queries = {name: path.read_text() for name, path in queries.items()}
    tables = {name: _rows(connection, sql) for name, sql in queries.items()}
    pages: dict[str, list[str]] = {}
    for name, sql in queries.items():
        topic = TOPIC.match(sql)
        section = f"{_heading(sql)}\n\n{_markdown(*tables[name])}"
        pages.setdefault(topic[1] if topic else "", []).append(section)
    main = pages.pop("", [])
    links = [_link(topic, sections) for topic, sections in pages.items()]
    tables |= {"catalog": _operators(), "figures": _figures(), "questions": _questions()}
    return {
        **{path: filled(path, tables) for path in WITH_BLOCKS},
        RESULTS: "\n".join([f"{INTRODUCTION}{''.join(links)}", *main]),
        **{
            PAGES / f"{topic}.md": "\n".join([PAGE.format(topic=topic), *sections])
            for topic, sections in pages.items()
        },
    }


def _heading(sql: str) -> str:
    """Returns the comment that `sql` begins with as Markdown: a title of second level, and text."""
    lines = []
    for line in TOPIC.sub("", sql, count=1).splitlines():
        if not line.startswith("--"):
            break
        lines.append(line.removeprefix("--").strip())
    title, *text = lines
    return f"#{title}\n" + "\n".join(text)


def _link(topic: str, sections: list[str]) -> str:
    """Returns a line of RESULTS.md that links to a page and lists its sections."""
    titles = [section.partition("\n")[0].removeprefix("## ") for section in sections]
    return f"- [{PAGES}/{topic}.md]({PAGES}/{topic}.md): {'; '.join(titles)}\n"


def _operators() -> Table:
    """Returns a row for each package of `tnp.ops`: functions, what they compute, names of ours."""
    packages: dict[str, list] = {}
    for operator in catalog().operators.values():
        package = ".".join(operator.describe.__module__.split(".")[:3])
        if package.startswith("tnp.ops."):
            packages.setdefault(package, []).append(operator)
    rows = []
    for package, operators in packages.items():
        text = _summary(package)
        ours = [one.name for op in operators for one in op.implementations if one.provider == OWN]
        names = [operator.name for operator in operators]
        rows.append((code(names), code([package]), text, code(list(dict.fromkeys(ours)))))
    return ["operators", "package", "what it computes", "ours"], rows


def _figures() -> Table:
    """Returns a row for each figure, in the order of the index: its name, and what it shows."""
    return ["figure", "shows"], [(code([one]), _summary(f"tnp.figures.{one}")) for one in FIGURES]


def _questions() -> Table:
    """Returns a row for each ready query: its question, and a link from a page of docs/."""
    rows = []
    for path in sorted(QUESTIONS.glob("*.sql")):
        question, mark, _ = path.read_text().removeprefix("-- ").partition("?")
        rows.append((question + mark, f"[`{path.name}`](../{path})"))
    return ["question", "file"], rows


def _summary(module: str) -> str:
    """Returns the first paragraph of a module's docstring, in one line."""
    return " ".join(importlib.import_module(module).__doc__.split("\n\n")[0].split())


def code(names: list[str]) -> str:
    """Returns `names` as a list of code in Markdown."""
    return ", ".join(f"`{name}`" for name in names)


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
    """Returns a Markdown table. A line below it says which text columns are equal in all rows."""
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
    """Returns `value` for a reader: four significant digits or a whole number with commas, and a
    dash for null.
    """
    match value:
        case None:
            return "–"
        case bool():
            return "yes" if value else "no"
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"
    return str(value).replace("|", "\\|")


def filled(path: Path, tables: dict[str, Table]) -> str:
    """Returns the text of `path` with the table of each block in it."""

    def table(block: re.Match[str]) -> str:
        start, name, end = block.groups()
        if name not in tables:
            raise ValueError(f"{path} has a block {name!r}: it must be one of {', '.join(tables)}")
        return f"{start}\n{_short(*tables[name])}\n{end}"

    return BLOCK.sub(table, path.read_text())


def main() -> None:
    """Writes all documents. With `--check`, names those that differ from the recorded rows."""
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
            if not check:  # the chart is not compared: its letters depend on a machine's fonts
                svg = vl_convert.vegalite_to_svg(headline.draw(connection).to_dict())
                CHART.write_text(svg)
    stale = set(PAGES.glob("*.md")) - texts.keys()
    differing = [
        path for path, text in texts.items() if not path.exists() or path.read_text() != text
    ]
    if not check:
        PAGES.mkdir(exist_ok=True)
        for path in stale:
            path.unlink()
        for path in differing:
            path.write_text(texts[path])
    elif differing or stale:
        names = " and ".join(map(str, [*differing, *sorted(stale)]))
        sys.exit(f"{names} differ from the recorded rows: run make report")


if __name__ == "__main__":
    main()
