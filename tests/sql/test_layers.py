"""Tests the SQL: who reads recorded rows, how deep views lie, and what is explained."""

import re

import duckdb

from tests.sql.conftest import FILES
from tests.sql.depths import depths
from tnp.store.schemas import TABLES
from tnp.store.views import READ

PRIVATE = re.compile(r"\b(sittings?|standing|counts|questions?|proven|told|spot|opaque)\b")


def test_only_staging_reads_recorded_tables():
    for path in FILES:
        text = re.sub(r"--.*", "", path.read_text())
        common = set(re.findall(r"\b(\w+) as \(\n", text))
        read = (set(READ.findall(text)) - common) & TABLES.keys()
        assert path.stem.startswith("stg_") or not read, f"{path.name} reads {read}"


def test_no_view_is_more_than_eight_levels_above_recorded_tables():
    found = depths(FILES)
    for path in FILES:  # `depths` takes a common table expression for what its name says
        common = re.findall(r"\b(\w+) as \(\n", path.read_text())
        assert not found.keys() & common, path.name
    assert max(found.values()) == 8


def test_every_table_view_and_column_is_explained_in_plain_words(empty_store):
    with duckdb.connect(str(empty_store), read_only=True) as connection:
        relations = connection.execute(
            "select table_name, comment from duckdb_tables() where not internal "
            "union select view_name, comment from duckdb_views() where not internal"
        ).fetchall()
        columns = connection.execute(
            "select table_name || '.' || column_name, comment from duckdb_columns() "
            "where not internal and table_name != 'built_from'"
        ).fetchall()
    assert len(relations) > 60 and len(columns) > 1000
    for name, comment in [*relations, *columns]:
        assert comment, f"{name} has no comment"
        assert not PRIVATE.search(comment), f"{name}: {comment}"
        assert not PRIVATE.search(name.split(".")[-1].replace("_", " ")), name
