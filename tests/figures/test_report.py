"""Tests that published tables equal those of the recorded rows, and that queries have answers."""

import re
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from tnp.figures import report

QUESTIONS = sorted(Path("workflow/questions").glob("*.sql"))
PAGES = sorted(
    [*Path("docs").rglob("*.md"), *Path("tnp/ops").glob("*/NOTES.md"), Path("README.md")]
)
QUERY = re.compile(r"`(select [^`]+)`|```sql\n(.+?)```", re.DOTALL)


@pytest.fixture(scope="module")
def recorded(recorded_database: Path) -> Iterator[duckdb.DuckDBPyConnection]:
    """Yields the recorded rows. Views that many queries read are computed once."""
    with duckdb.connect(str(recorded_database), read_only=True) as connection:
        for view in ("own_operators", "operator_speedup", "speedup"):
            connection.execute(f"create temp table {view} as from main.{view}")
        yield connection


def test_published_tables_are_those_of_the_recorded_rows_and_topics_have_pages(recorded):
    texts = report.documents(recorded)
    for path, text in texts.items():
        assert path.read_text() == text, f"{path} differs from the recorded rows: run make report"
    for page in report.PAGES.glob("*.md"):
        assert page in texts and f"]({page})" in texts[report.RESULTS]
    assert not any("topic:" in text for text in texts.values())


def test_a_block_is_filled_and_one_that_names_no_query_is_refused(recorded, monkeypatch, tmp_path):
    """Runs one query: all of them take ten seconds."""
    (query,) = report.QUERIES.glob("*_gates.sql")
    (tmp_path / query.name).write_text(query.read_text())
    readme = tmp_path / "README.md"
    monkeypatch.setattr(report, "QUERIES", tmp_path)
    monkeypatch.setattr(report, "WITH_BLOCKS", (readme,))
    readme.write_text("before\n<!-- report: gates -->\nold\n<!-- end -->\nafter\n")
    text = report.documents(recorded)[readme]
    assert text.startswith("before\n<!-- report: gates -->\n\n| device |")
    assert text.endswith("|\n\n<!-- end -->\nafter\n")
    assert "old" not in text
    readme.write_text("<!-- report: gate -->\n<!-- end -->\n")
    with pytest.raises(ValueError, match="'gate'.*must be one of gates, catalog"):
        report.documents(recorded)


def test_text_that_all_rows_share_stands_below_the_table():
    names, rows = (
        ["device", "ms", "n", "verdict"],
        [("a", 1.5, 3, "faster"), ("b", 1.5, 3, "faster")],
    )
    *table, empty, said = report._short(names, rows).splitlines()
    assert table[0] == "| device | ms | n |" and "faster" not in "".join(table)
    assert (empty, said) == ("", "In every row: verdict faster.")
    other = [*rows, ("c", 1.5, 3, "same")]
    assert report._short(names, other) == report._markdown(names, other)
    assert report._short(names, rows[:1]) == report._markdown(names, rows[:1])


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_queries_of_a_page_have_answers(recorded, page):
    for query in map("".join, QUERY.findall(page.read_text())):
        assert recorded.sql(query).fetchall(), query


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda path: path.stem)
def test_a_question_is_short_and_has_an_answer(recorded, question):
    comment, *sql = question.read_text().splitlines()
    assert comment.startswith("-- ") and "?" in comment
    assert len(sql) <= 10
    answer = recorded.sql(question.read_text())
    assert answer.columns
    assert answer.fetchall()


def test_every_row_without_evidence_is_marked(recorded):
    for name in ("steps", "attention", "operators", "memory", "ablation"):
        (path,) = report.QUERIES.glob(f"*_{name}.sql")
        rows = recorded.sql(path.read_text())
        evidence = rows.columns.index("evidence")
        assert all(row[evidence] for row in rows.fetchall()), name


def test_a_time_is_backed_by_the_gates_of_its_own_implementation(recorded):
    answer = recorded.sql(Path("workflow/questions/evidence_of_a_time.sql").read_text())
    rows = [dict(zip(answer.columns, row, strict=True)) for row in answer.fetchall()]
    own = recorded.sql("select distinct config_id from ops where role = 'own'").fetchall()
    own = {config_id for (config_id,) in own}
    assert {row["config_id"] in own for row in rows} == {True, False}
    assert all(bool(row["gates"]) == (row["config_id"] in own) for row in rows)
    sets = recorded.sql("select code_set, list(distinct part) from code_parts group by all")
    parts = {name: {*found} for name, found in sets.fetchall()}
    # Whole modules stand in rows from before definitions were told apart.
    for one in (parts[name] for row in rows for name in row["code_sets"]):
        assert "package" in one and ("module" in one) != ("definition" in one)
