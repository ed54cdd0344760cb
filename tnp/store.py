"""The result store: Parquet files that git can keep, and one DuckDB file built from all of them.

A file holds rows of one table and lies at `data/{recorded,runs}/<device>/<table>/<stem>.parquet`:
`recorded` is what was committed, `runs` what this machine measured.
"""

import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from tnp.schemas import SCHEMA_VERSION, TABLES

VERSION_KEY = b"tnp_schema_version"

# The storage format that DuckDB's command line 1.5 reads too.
DUCKDB_FORMAT = {"storage_compatibility_version": "v1.5.0"}


class StoreError(RuntimeError):
    """A file of the store cannot be used; the message names it and says what to do."""


def write_table(path: Path, table: str, rows: list[dict]) -> None:
    """Write `rows` as a file of `table`, all of it or nothing; columns not given are null.

    Raises ValueError for an unknown table or column or a value of another type, and StoreError
    where `path` cannot be written.
    """
    schema = _schema(table)
    for row in rows:
        for column in row:
            if column not in schema.names:
                raise ValueError(f"table {table} has no column {column!r}: see tnp/schemas.py")
    try:
        content = pa.Table.from_pylist(rows, schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"a row does not fit the schema of table {table}: {error}") from error
    _write(Path(path), content)


def read_table(path: Path, table: str) -> pa.Table:
    """The rows of `path` with exactly the columns of `table`; those an older file lacks are null.

    Raises StoreError for a file that is missing, cut short, or of another schema.
    """
    schema = _schema(table)
    try:
        content = pq.ParquetFile(path).read()
    except FileNotFoundError:
        raise StoreError(f"{path} does not exist: run the workflow to measure it") from None
    except (pa.ArrowException, OSError) as error:
        raise StoreError(
            f"{path} is not a whole Parquet file ({_first_line(error)}): restore it from git, or "
            "delete it and run the workflow again"
        ) from None
    _check_version(path, content.schema)
    for field in content.schema:
        if field.name not in schema.names:
            raise StoreError(
                f"{path} has a column {field.name!r} that table {table} lacks: update this "
                "checkout if the file is of a newer one, or delete the file"
            )
        if field.type != schema.field(field.name).type:
            raise StoreError(
                f"{path} has {field.name} as {field.type}, table {table} as "
                f"{schema.field(field.name).type}: delete the file and measure again"
            )
    complete = pa.concat_tables([schema.empty_table(), content], promote_options="default")
    return complete.replace_schema_metadata(schema.metadata)


def build_database(files: Iterable[Path], sql_dir: Path, database: Path) -> None:
    """Build `database` from `files`: every table with a column `origin`, every view of `sql_dir`.

    `database` is replaced at the end, so that readers keep the old one until then and errors leave
    it alone. Raises StoreError for a file that cannot be used, before anything is written.
    """
    views = sorted(Path(sql_dir).glob("*.sql"))
    if not views:
        raise StoreError(f"{sql_dir} holds no .sql file: it should be workflow/sql")
    contents: dict[str, list[pa.Table]] = {table: [] for table in TABLES}
    for path in map(Path, files):
        table = path.parent.name
        if table not in TABLES:
            raise StoreError(
                f"{path} lies in a folder {table!r}: it must be one of {', '.join(TABLES)}"
            )
        rows = read_table(path, table)
        origin = pa.repeat(_origin(path), len(rows))
        contents[table].append(rows.append_column("origin", origin))
    with (
        _replacing(Path(database)) as temporary,
        duckdb.connect(str(temporary), config=DUCKDB_FORMAT) as connection,
    ):
        for table, schema in TABLES.items():
            empty = schema.append(pa.field("origin", pa.string())).empty_table()
            connection.register("loaded", pa.concat_tables([empty, *contents[table]]))
            connection.execute(f"create table {table} as from loaded")
            connection.unregister("loaded")
        _create_views(connection, views)


def record(runs: Path, recorded: Path) -> None:
    """Copy the rows under `runs` that `recorded` lacks to `<device>/<table>/<now>.parquet` there.

    Rows stay as they were measured; without new rows nothing is written. Raises StoreError where
    `runs` is no folder or one of the files cannot be used.
    """
    if not Path(runs).is_dir():
        raise StoreError(f"{runs} is no folder: run the workflow to measure something first")
    # To the microsecond: two calls never write the same file.
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
    n_rows = 0
    for folder in sorted(path for path in Path(runs).glob("*/*") if path.name in TABLES):
        table = folder.name
        target = Path(recorded) / folder.parent.name / table
        measured, known = (_all_rows(source, table) for source in (folder, target))
        query = "from measured except all from known order by recorded_at"
        with duckdb.connect() as connection:
            connection.register("measured", measured)
            connection.register("known", known)
            rows = connection.sql(query).to_arrow_table()
        if len(rows):
            _write(target / f"{stamp}.parquet", rows.cast(_schema(table)))
            print(f"{target}: {len(rows)} rows")
            n_rows += len(rows)
    if not n_rows:
        print(f"{runs} holds no row that {recorded} lacks")


def _schema(table: str) -> pa.Schema:
    if table not in TABLES:
        raise ValueError(f"unknown table {table!r}: it must be one of {', '.join(TABLES)}")
    return TABLES[table].with_metadata({VERSION_KEY: str(SCHEMA_VERSION).encode()})


def _check_version(path: Path, schema: pa.Schema) -> None:
    version = int((schema.metadata or {}).get(VERSION_KEY, 0))
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}, this checkout reads up to {SCHEMA_VERSION}: "
            "update the checkout"
        )
    if version < 1:
        raise StoreError(f"{path} was not written by tnp.store (no schema version): delete it")


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0].rstrip(".")


def _origin(path: Path) -> str:
    """ "recorded" or "runs": the folder that holds `<device>/<table>/<stem>.parquet`."""
    return "recorded" if path.absolute().parents[2].name == "recorded" else "runs"


def _all_rows(folder: Path, table: str) -> pa.Table:
    files = sorted(file for file in folder.glob("*.parquet") if not file.name.startswith("."))
    return pa.concat_tables(
        [_schema(table).empty_table(), *(read_table(file, table) for file in files)]
    )


def _write(path: Path, content: pa.Table) -> None:
    with _replacing(path) as temporary:
        pq.write_table(content, temporary, compression="zstd")


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file that takes the place of `path` where the block ends without error.

    It lies in a folder of its own beside `path`, which DuckDB's write-ahead log shares.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as folder:
            temporary = Path(folder, "new")
            yield temporary
            os.replace(temporary, path)
    except (OSError, duckdb.IOException) as error:
        raise StoreError(
            f"cannot write {path} ({_first_line(error)}): {path.parent}/ must be a writable "
            "folder with free space"
        ) from error


def _create_views(connection: duckdb.DuckDBPyConnection, pending: list[Path]) -> None:
    """Run every .sql file; one that reads a view not there yet waits for the others."""
    while pending:
        waiting, problem = [], ""
        for path in pending:
            try:
                connection.execute(path.read_text())
            except duckdb.CatalogException as error:
                waiting.append(path)
                problem = f"{path}: {_first_line(error)}"
            except duckdb.Error as error:
                raise StoreError(f"{path} cannot be run: {error}") from error
        if waiting == pending:
            raise StoreError(f"{problem}: no file in {waiting[0].parent} creates it")
        pending = waiting


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["record", runs, recorded]:
            try:
                record(Path(runs), Path(recorded))
            except StoreError as error:
                sys.exit(str(error))
        case _:
            sys.exit("usage: python -m tnp.store record data/runs data/recorded")
