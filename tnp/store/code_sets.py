"""Splits rows of table `code` into sets of code and their parts.

A set has the kernels, packages and definitions that a gate or a measurement ran. A digest of its
contents names it. Rows of table `code` hold this name, and table `code_parts` holds each set once.
Files of earlier layouts repeat the whole set for every run.
"""

import hashlib
from collections.abc import Iterable
from itertools import chain

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from tnp.store.schemas import TABLES
from tnp.util.atomic_files import StoreError

PART = TABLES["code_parts"].names[1:]

# Parts are numbered first, because numbers compare faster than text.
_RUNS = """
select * exclude (id), list_sort(list_distinct(list(id))) as ids
from loaded group by all order by all
"""


def split(rows: pa.Table) -> tuple[pa.Table, pa.Table]:
    """Returns `rows` of table `code`, one for each run and implementation, and the `code_parts`.

    Args:
        rows: may have any layout, and further columns such as `file`. Rows that already name their
            set stay as they are, and the returned parts leave out these sets.
    """
    has_part = pc.is_valid(rows["part"])
    earlier, named = rows.filter(has_part), rows.filter(pc.invert(has_part))
    ids, parts = _numbered(earlier)
    with duckdb.connect() as connection:
        of_runs = earlier.drop_columns([*PART, "code_set"]).append_column("id", ids)
        connection.register("loaded", of_runs)
        runs = connection.sql(_RUNS).to_arrow_table()
    held = list(map(tuple, runs["ids"].to_pylist()))
    texts = ["\t".join(part) for part in parts]
    name_of = {ids: _name(texts[id_] for id_ in ids) for ids in dict.fromkeys(held)}
    names = pa.array(map(name_of.get, held), pa.string())
    runs = runs.drop_columns(["ids"]).append_column("code_set", names)
    named = named.select(runs.column_names)
    rows = pa.concat_tables([runs.cast(named.schema), named])
    every = pa.Table.from_pylist(
        [dict(zip(PART, part, strict=True)) for part in parts], TABLES["code_parts"]
    )
    listed = every.take(pa.array(chain.from_iterable(name_of), pa.int32()))
    of_parts = [name for ids, name in name_of.items() for _ in ids]
    return rows, listed.set_column(0, "code_set", pa.array(of_parts, pa.string()))


def _name(texts: Iterable[str]) -> str:
    """Returns the name of a set, 16 hexadecimal digits, from the sorted texts of its parts."""
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _numbered(rows: pa.Table) -> tuple[pa.Array, list[tuple[str, ...]]]:
    """Returns all distinct parts, sorted, and for each row the index of its part."""
    columns = [rows[name].combine_chunks().dictionary_encode() for name in PART]
    numbers = pa.repeat(0, len(rows))
    for column in columns:
        numbers = pc.add(pc.multiply(numbers, len(column.dictionary)), column.indices)
    texts = [column.dictionary.to_pylist() for column in columns]

    def part_of(number: int) -> tuple[str, ...]:
        part = []
        for text in reversed(texts):
            number, place = divmod(number, len(text))
            part.insert(0, text[place])
        return tuple(part)

    parts = {number: part_of(number) for number in numbers.unique().to_pylist()}
    ordered = sorted(parts, key=parts.__getitem__)
    places = pc.index_in(numbers, pa.array(ordered, pa.int64()))
    return places, [parts[number] for number in ordered]


def check(code: pa.Table, parts: pa.Table) -> None:
    """Checks that `parts` holds every set that a row of `code` names.

    Raises:
        StoreError: a set is missing. Column `file` of `code` says which file names it.
    """
    missing = set(code["code_set"].to_pylist()) - set(parts["code_set"].unique().to_pylist())
    for name, file in zip(code["code_set"].to_pylist(), code["file"].to_pylist(), strict=True):
        if name in missing:
            raise StoreError(
                f"{file} names the set of code {name}, which no file of table code_parts holds: "
                f"restore code_parts/{name}.parquet, or delete {file} and run the workflow again"
            )
