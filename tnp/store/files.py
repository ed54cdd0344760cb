"""The result store: Parquet files that git can keep, and one DuckDB file built from all of them.

A file holds rows of one table and lies at `data/{recorded,runs}/<device>/<table>/<stem>.parquet`:
`recorded` is what was committed, `runs` what this machine measured.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from tnp.dispatch.registry import catalog
from tnp.store import manifest, schemas
from tnp.store import views as store_views
from tnp.store.schemas import SCHEMA_VERSION, TABLES
from tnp.store.views import create_views
from tnp.util.atomic_files import StoreError, cannot_write, first_line, parquet_files, replacing
from tnp.util.cli import Parser

VERSION_KEY = b"tnp_schema_version"
# Of the rows. Parquet's own checksums are of pages, and not of what says which page is whose.
DIGEST_KEY = b"tnp_sha256"

BUILT_FROM = """
comment on table built_from is
'Digests of all that this database was built from, and of its contents: equal ones are kept.'
"""

# The storage format that DuckDB's command line 1.5 reads too.
DUCKDB_FORMAT = {"storage_compatibility_version": "v1.5.0"}


def write_table(path: Path, table: str, rows: list[dict]) -> None:
    """Write `rows` as a file of `table`, all of it or nothing; columns not given are null.

    Raises ValueError for an unknown table or column or a value of another type, and StoreError
    where `path` cannot be written.
    """
    schema = _schema(table)
    for row in rows:
        for column in row:
            if column not in schema.names:
                raise ValueError(
                    f"table {table} has no column {column!r}: see tnp/store/schemas.py"
                )
    try:
        content = pa.Table.from_pylist(rows, schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ValueError(f"a row does not fit the schema of table {table}: {error}") from error
    _write(Path(path), content)


def read_table(path: Path, table: str) -> pa.Table:
    """The rows of `path` with exactly the columns of `table`; those an older file lacks are null.

    Raises StoreError for a file that is missing, damaged, not as recorded, or of another schema.
    """
    schema = _schema(table)
    encoded = _bytes(Path(path))
    is_recorded = manifest.check(Path(path), encoded)
    try:
        file = pq.ParquetFile(pa.BufferReader(encoded), page_checksum_verification=True)
        content = file.read(use_threads=False)  # files are small: threads cost half the time
        names = content.column_names  # may be no text
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _damaged(path, first_line(error)) from None
    _check_version(path, content.schema)
    for name, field in zip(names, content.schema, strict=True):
        if name not in schema.names:
            raise StoreError(
                f"{path} has a column {name!r} that table {table} lacks: update this "
                "checkout if the file is of a newer one, or delete the file"
            )
        if names.count(name) > 1:
            raise StoreError(f"{path} has two columns {name!r}: delete the file and measure again")
        if field.type != schema.field(name).type:
            raise StoreError(
                f"{path} has {name} as {field.type}, table {table} as "
                f"{schema.field(name).type}: delete the file and measure again"
            )
    # The manifest's digest is of all bytes: it says more, and takes a hundredth of the time.
    digest = None if is_recorded else content.schema.metadata.get(DIGEST_KEY)
    if digest is not None and digest != _digest(content):
        raise _damaged(path, "its rows are not those that were written")
    complete = pa.concat_tables([schema.empty_table(), content], promote_options="default")
    return complete.replace_schema_metadata(schema.metadata)


def all_files() -> list[Path]:
    """Every file of rows below the working directory: recorded ones, and those of its runs."""
    return parquet_files(Path("data/recorded")) + parquet_files(Path("data/runs"))


def read_tables(files: Iterable[Path]) -> dict[str, pa.Table]:
    """Table → the rows of all its `files`, with columns `origin` and `file`.

    Raises StoreError for a file that cannot be used, and for two that hold the same run of a table
    with different rows.
    """
    parts = {name: [_with_source(schema.empty_table(), "", "")] for name, schema in TABLES.items()}
    for path in map(Path, files):
        table = path.parent.name
        if table not in TABLES:
            raise StoreError(
                f"{path} lies in a folder {table!r}: it must be one of {', '.join(TABLES)}"
            )
        parts[table].append(_with_source(read_table(path, table), _origin(path), str(path)))
    tables = {table: pa.concat_tables(content) for table, content in parts.items()}
    with duckdb.connect() as connection:
        for table, loaded in tables.items():
            if len(loaded) and "run_id" in loaded.column_names:
                _check_runs(connection, table, loaded)
    return tables


def build_database(files: Iterable[Path], sql_dir: Path, database: Path) -> None:
    """Build `database` from `files`: every table with a column `origin`, every view of `sql_dir`.

    Equal rows count once, however many files hold them; what is recorded says so. `database` is
    replaced at the end, by one that was read back, so that readers keep the old one until then and
    errors leave it alone. A database that `is_current` stays as it is. Raises StoreError for a file
    that cannot be used, before anything is written, and where there is no room for the new one.
    """
    files, database = list(map(Path, files)), Path(database)
    if is_current(database, files, sql_dir):
        return
    views, inputs = _views(sql_dir), _inputs(files, sql_dir)
    tables = read_tables(files)
    with replacing(database) as temporary:
        try:
            _fill(temporary, tables, views, inputs)
        except duckdb.Error as error:
            raise cannot_write(database, error) from error
        # A log that another program left would be played into the new file, and spoil it. It goes
        # before the new file comes, so that a kill in between cannot bring the two together.
        Path(f"{database}.wal").unlink(missing_ok=True)


def is_current(database: Path, files: Iterable[Path], sql_dir: Path) -> bool:
    """Whether `database` is whole, and was built from these files, views and code.

    Contents decide, not times of change. Raises StoreError for a file that cannot be read.
    """
    if not Path(database).is_file() or Path(f"{database}.wal").exists():
        return False
    try:
        with duckdb.connect(str(database), read_only=True) as connection:
            built_from = connection.execute("from built_from").fetchall()
            return built_from == [(_inputs(files, sql_dir), _contents(connection))]
    except duckdb.Error:  # no database, a damaged one, or one of earlier code
        return False


def record(runs: Path, recorded: Path) -> None:
    """Copy the rows under `runs` that `recorded` lacks to `<device>/<table>/<now>.parquet` there.

    Rows stay as they were measured, and every file of `recorded` is listed in its manifest. Raises
    StoreError where `runs` is no folder or one of the files cannot be used.
    """
    runs, recorded = Path(runs), Path(recorded)
    if not runs.is_dir():
        raise StoreError(f"{runs} is no folder: run the workflow to measure something first")
    read_tables(parquet_files(recorded) + parquet_files(runs))
    # To the microsecond: two calls never write the same file.
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
    n_rows = 0
    for folder in sorted({file.parent for file in parquet_files(runs)}):
        table = folder.name
        target = recorded / folder.parent.name / table
        measured, known = (_all_rows(source, table) for source in (folder, target))
        with duckdb.connect() as connection:
            connection.register("measured", measured)
            connection.register("known", known)
            rows = connection.sql("from measured except from known order by all").to_arrow_table()
        if len(rows):
            _write(target / f"{stamp}.parquet", rows.cast(_schema(table)))
            print(f"{target}: {len(rows)} rows")
            n_rows += len(rows)
    manifest.extend(recorded)
    if not n_rows:
        print(f"{runs} holds no row that {recorded} lacks")


def _views(sql_dir: Path) -> list[Path]:
    views = sorted(Path(sql_dir).glob("*.sql"))
    if not views:
        raise StoreError(f"{sql_dir} holds no .sql file: it should be workflow/sql")
    return views


def _inputs(files: Iterable[Path], sql_dir: Path) -> str:
    """A digest of all that a database is built from: rows, manifests, views, code, DuckDB."""
    rows = sorted(set(map(Path, files)))
    manifests = {path.absolute().parents[2] / manifest.NAME for path in rows}
    code = [Path(module.__file__) for module in (schemas, store_views)] + [Path(__file__)]
    digest = hashlib.sha256(f"{duckdb.__version__} {_implementations().to_pylist()}".encode())
    for path in [*rows, *filter(Path.exists, sorted(manifests)), *_views(sql_dir), *code]:
        digest.update(f"{path} {hashlib.sha256(_bytes(path)).hexdigest()}\n".encode())
    return digest.hexdigest()


def _schema(table: str) -> pa.Schema:
    if table not in TABLES:
        raise ValueError(f"unknown table {table!r}: it must be one of {', '.join(TABLES)}")
    return TABLES[table].with_metadata({VERSION_KEY: str(SCHEMA_VERSION).encode()})


def _check_version(path: Path, schema: pa.Schema) -> None:
    text = (schema.metadata or {}).get(VERSION_KEY, b"0").decode(errors="replace")
    if not text.isdecimal():
        raise StoreError(f"{path} has schema version {text!r}, which is no number: delete it")
    version = int(text)
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} has schema version {version}, this checkout reads up to {SCHEMA_VERSION}: "
            "update the checkout"
        )
    if version < 1:
        raise StoreError(f"{path} was not written by tnp.store (no schema version): delete it")


def _bytes(path: Path) -> bytes:
    try:
        if S_ISREG(path.stat().st_mode):  # reading a pipe would wait for a writer
            return path.read_bytes()
        problem = "is no regular file: remove it"
    except FileNotFoundError:
        problem = "does not exist: run the workflow to measure it"
    except OSError as error:
        problem = f"cannot be read ({error.strerror}): make it readable"
    raise StoreError(f"{path} {problem}")


def _digest(rows: pa.Table) -> bytes:
    """SHA-256 of column names and values, as text that depends on no library's version."""
    for index, field in enumerate(rows.schema):
        if pa.types.is_timestamp(field.type):
            rows = rows.set_column(index, field.name, rows.column(index).cast(pa.int64()))
    return hashlib.sha256(json.dumps(rows.to_pydict()).encode()).hexdigest().encode()


def _origin(path: Path) -> str:
    """ "recorded" or "runs": the folder that holds `<device>/<table>/<stem>.parquet`."""
    return "recorded" if path.absolute().parents[2].name == "recorded" else "runs"


def _all_rows(folder: Path, table: str) -> pa.Table:
    files = [file for file in parquet_files(folder.parents[1]) if file.parent == folder]
    return pa.concat_tables(
        [_schema(table).empty_table(), *(read_table(file, table) for file in files)]
    )


def _damaged(path: Path, why: str) -> StoreError:
    return StoreError(
        f"{path} is not a whole Parquet file ({why}): restore it from git, or delete it and run "
        "the workflow again"
    )


def _with_source(rows: pa.Table, origin: str, file: str) -> pa.Table:
    for name, value in (("origin", origin), ("file", file)):
        rows = rows.append_column(name, pa.array([value] * len(rows), pa.string()))
    return rows


def _check_runs(connection: duckdb.DuckDBPyConnection, table: str, loaded: pa.Table) -> None:
    """StoreError where two files hold one run of `table` with different rows."""
    connection.register("loaded", loaded)
    # All rows of a run must lie in the same files. Most runs lie in one.
    altered = connection.sql(
        """
        with shared as (
            select run_id from loaded group by run_id having count(distinct file) > 1
        ),

        run_rows as (
            select * exclude (origin, file), list_sort(list(distinct file)) as files
            from loaded where run_id in (from shared) group by all
        )

        select run_id, min(files), max(files)
        from run_rows group by run_id having count(distinct files) > 1 order by run_id
        """
    ).fetchall()
    connection.unregister("loaded")
    for run, first, last in altered:
        one = min(set(first) ^ set(last))
        other = (last if one in first else first)[0]
        raise StoreError(
            f"{one} and {other} hold run {run} of table {table} with different rows: a run is "
            "never changed, so restore both from git, or remove the one that is not as measured"
        )


def _fill(database: Path, tables: dict[str, pa.Table], views: list[Path], inputs: str) -> None:
    """Write `tables` and `views` to the new file `database` and hold it against what was meant.

    Closing a database swallows that its checkpoint failed, for want of space; `checkpoint` raises.
    """
    with duckdb.connect(str(database), config=DUCKDB_FORMAT) as connection:
        _load(connection, tables)
        create_views(connection, views)
        meant = _contents(connection)
        connection.execute("create table built_from (inputs varchar, contents varchar)")
        connection.execute("insert into built_from values (?, ?)", [inputs, meant])
        connection.execute(BUILT_FROM)
        connection.execute("checkpoint")
    with duckdb.connect(str(database), read_only=True) as connection:
        if _contents(connection) != meant:
            raise duckdb.IOException("it reads back otherwise than it was written")


def _load(connection: duckdb.DuckDBPyConnection, tables: Mapping[str, pa.Table]) -> None:
    """Create each of `tables`, with equal rows once, and the table of implementations.

    `tables` have columns `origin` and `file`. A table that is there already is replaced.
    """
    for table, rows in tables.items():
        connection.register("loaded", rows)
        connection.execute(
            f"create or replace table {table} as select * exclude (origin, file), "
            "min(origin) as origin from loaded group by all order by all"
        )
        connection.unregister("loaded")
    connection.register("known", _implementations())
    connection.execute(
        "create or replace table implementations as select * from known order by all"
    )
    connection.unregister("known")


def _implementations() -> pa.Table:
    """What the catalog knows of every implementation, for views to join with."""
    rows = [
        {
            "op": op,
            "family": operator.family or op,
            "implementation": name,
            "provider": (listed := catalog().listed(op, name)).provider,
            "rank": listed.rank,
            "chosen_from": listed.own is not None and listed.own.chosen_from,
        }
        for op, operator in catalog().operators.items()
        for name in catalog().names(op)
    ]
    return pa.Table.from_pylist(rows)


def _contents(connection: duckdb.DuckDBPyConnection) -> str:
    """A digest of the names of the views, and of the number and the rows of every table.

    Tables are those of rows and those that a file of SQL creates; views follow from them.
    """
    views = connection.execute("select view_name from duckdb_views() where not internal")
    found: dict[str, object] = {"views": sorted(views.fetchall())}
    tables = connection.execute(
        "select table_name from duckdb_tables() where table_name != 'built_from' order by all"
    )
    for (table,) in tables.fetchall():
        digest = f"select count(*), bit_xor(hash(stored)) from {table} as stored"
        found[table] = connection.execute(digest).fetchall()
    return hashlib.sha256(str(found).encode()).hexdigest()


def _write(path: Path, content: pa.Table) -> None:
    content = content.replace_schema_metadata(
        content.schema.metadata | {DIGEST_KEY: _digest(content)}
    )
    with replacing(path) as temporary:
        pq.write_table(content, temporary, compression="zstd", write_page_checksum=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Exit code 2 for arguments that are wrong, 1 where rows cannot be recorded."""
    parser = Parser(prog="python -m tnp.store", description="Keeps rows that a run has written.")
    commands = parser.add_subparsers(dest="command", required=True)
    of_record = commands.add_parser("record", help="add a folder's rows to those recorded")
    of_record.add_argument("runs", type=Path, help="as a run left them: data/runs")
    of_record.add_argument("recorded", type=Path, help="where they are kept: data/recorded")
    wanted = parser.parse_args(arguments)
    try:
        record(wanted.runs, wanted.recorded)
    except StoreError as error:
        sys.exit(str(error))
