"""Keeps results in Parquet files, and builds one DuckDB file from all of them.

A file holds rows of one table and lies at `data/{recorded,runs}/<device>/<table>/<stem>.parquet`:
`recorded` holds committed rows, `runs` the rows that this machine measured.
"""

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from stat import S_ISREG

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from tnp.dispatch.registry import catalog
from tnp.store import code_sets, manifest, schemas
from tnp.store import views as store_views
from tnp.store.schemas import SCHEMA_VERSION, TABLES
from tnp.store.views import create_views
from tnp.util.atomic_files import StoreError, cannot_write, first_line, parquet_files, replacing
from tnp.util.cli import Parser

# Published figures, whose columns `schemas.LITERATURE` declares.
LITERATURE = Path(__file__).parents[2] / "data/literature/decoding.csv"

VERSION_KEY = b"tnp_schema_version"
# Repeated strings are read as dictionaries, which is faster.
DICTIONARY = pa.dictionary(pa.int32(), pa.string())

BUILT_FROM = """
comment on table built_from is
'Digests of everything that this database was built from, and of its contents. A database with
equal digests is kept.'
"""

# The storage format that DuckDB's command line 1.5 reads too.
DUCKDB_FORMAT = {"storage_compatibility_version": "v1.5.0"}


def write_table(path: Path, table: str, rows: list[dict]) -> None:
    """Writes `rows` as a file of `table`, whole or not at all; columns not given are null.

    Rows of table `code` give the parts of each set of code. A set that is new to the device becomes
    a file of table `code_parts`, and the rows hold its name.

    Raises:
        ValueError: the table or a column is unknown, or a value has another type.
        StoreError: `path` cannot be written.
    """
    schema, path = _schema(table), Path(path)
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
    if table == "code":
        content, parts = code_sets.split(content)
        for name in parts["code_set"].unique().to_pylist():
            file = path.parents[1] / "code_parts" / f"{name}.parquet"
            if not file.exists():
                _write(file, "code_parts", parts.filter(pc.field("code_set") == name))
    _write(path, table, content)


def read_table(path: Path, table: str) -> pa.Table:
    """Returns the rows of `path` with exactly the columns of `table`; missing ones are null.

    Raises:
        StoreError: the file is missing, damaged, not as recorded, or of another schema.
    """
    return _read(path, table).cast(_schema(table))


def _read(path: Path, table: str) -> pa.Table:
    """Returns the rows of `path`, its strings encoded as dictionaries: see `read_table`."""
    schema = _schema(table)
    encoded = _bytes(Path(path))
    manifest.check(Path(path), encoded)
    try:
        file = pq.ParquetFile(pa.BufferReader(encoded))
        found = file.schema_arrow
        _check_columns(path, table, found, schema)
        strings = [field.name for field in found if field.type == pa.string()]
        file = pq.ParquetFile(
            pa.BufferReader(encoded),
            metadata=file.metadata,
            read_dictionary=strings,
            page_checksum_verification=True,
        )
        content = file.read(use_threads=False)  # files are small: threads cost half the time
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise manifest.damaged(path, first_line(error)) from None
    return pa.concat_tables([_encoded(schema).empty_table(), content], promote_options="default")


def _encoded(schema: pa.Schema) -> pa.Schema:
    """Returns a schema whose strings are dictionaries."""
    return pa.schema(
        [field.with_type(DICTIONARY) if field.type == pa.string() else field for field in schema]
    )


def _check_columns(path: Path, table: str, found: pa.Schema, schema: pa.Schema) -> None:
    """Raises StoreError where the columns `found` in a file are not of the table's `schema`."""
    _check_version(path, found)
    for name, field in zip(found.names, found, strict=True):
        if name not in schema.names:
            raise StoreError(
                f"{path} has a column {name!r} that table {table} lacks: update this "
                "checkout if the file is of a newer one, or delete the file"
            )
        if found.names.count(name) > 1:
            raise StoreError(f"{path} has two columns {name!r}: delete the file and measure again")
        if field.type != schema.field(name).type:
            raise StoreError(
                f"{path} has {name} as {field.type}, table {table} as "
                f"{schema.field(name).type}: delete the file and measure again"
            )


def all_files() -> list[Path]:
    """Returns every file of rows below the working directory, recorded ones first."""
    return parquet_files(Path("data/recorded")) + parquet_files(Path("data/runs"))


def read_tables(files: Iterable[Path]) -> dict[str, pa.Table]:
    """Returns table → the rows of all its `files`, with columns `origin` and `file`.

    Rows of `code` have one row for each set of code, whatever the layout of their file.

    Raises:
        StoreError: a file cannot be used, two files hold the same run of a table with different
            rows, or a set of code is missing.
    """
    parts = {
        table: [_with_source(_encoded(schema).empty_table(), "", "")]
        for table, schema in TABLES.items()
    }
    for path in map(Path, files):
        table = path.parent.name
        if table not in TABLES:
            raise StoreError(
                f"{path} lies in a folder {table!r}: it must be one of {', '.join(TABLES)}"
            )
        parts[table].append(_with_source(_read(path, table), _origin(path), str(path)))
    tables = {table: pa.concat_tables(content) for table, content in parts.items()}
    tables["code"], sets = code_sets.split(tables["code"])
    sets = _with_source(sets, "recorded", "").cast(tables["code_parts"].schema)
    tables["code_parts"] = pa.concat_tables([tables["code_parts"], sets])
    code_sets.check(tables["code"], tables["code_parts"])
    with duckdb.connect() as connection:
        for table, loaded in tables.items():
            if len(loaded) and "run_id" in loaded.column_names:
                _check_runs(connection, table, loaded)
    return tables


def build_database(files: Iterable[Path], sql_dir: Path, database: Path) -> None:
    """Builds `database` from `files`: every table with a column `origin`, every view of `sql_dir`.

    Equal rows count once, however many files hold them; `origin` is "recorded" if one of these is.
    The new database is read back, and then replaces the old one at once. A database that
    `is_current` stays as it is.

    Raises:
        StoreError: a file cannot be used (nothing has been written then), or there is no room.
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
        # first, so that a kill in between cannot bring the two together.
        Path(f"{database}.wal").unlink(missing_ok=True)


def is_current(database: Path, files: Iterable[Path], sql_dir: Path) -> bool:
    """Returns whether `database` is whole, and was built from these files, views and code.

    Contents decide, not times of change.

    Raises:
        StoreError: a file cannot be read.
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
    """Copies the rows under `runs` that `recorded` lacks to `<device>/<table>/<now>.parquet` there.

    Rows stay as they were measured. Every file of `recorded` is then listed in its manifest.

    Raises:
        StoreError: `runs` is no folder, or one of the files cannot be used.
    """
    runs, recorded = Path(runs), Path(recorded)
    if not runs.is_dir():
        raise StoreError(f"{runs} is no folder: run the workflow to measure something first")
    read_tables(parquet_files(recorded) + parquet_files(runs))
    # To the microsecond: two calls never write the same file.
    stamp = f"{datetime.now(UTC):%Y%m%dT%H%M%S%fZ}"
    n_rows = 0
    folders = {file.parent for file in parquet_files(runs)}
    # Sets of code come before the rows that name them: a copy that ends early can be read.
    for folder in sorted(folders, key=lambda folder: (folder.name != "code_parts", folder)):
        table = folder.name
        target = recorded / folder.parent.name / table
        measured, known = (_all_rows(source, table) for source in (folder, target))
        with duckdb.connect() as connection:
            connection.register("measured", measured)
            connection.register("known", known)
            rows = connection.sql("from measured except from known order by all").to_arrow_table()
        if len(rows):
            _write(target / f"{stamp}.parquet", table, rows)
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
    """Returns a digest of all inputs of a database: rows, manifests, views, code, DuckDB."""
    rows = sorted(set(map(Path, files)))
    manifests = {path.absolute().parents[2] / manifest.NAME for path in rows}
    modules = (schemas, store_views, code_sets, manifest)
    code = [Path(__file__), *(Path(module.__file__) for module in modules)]
    known = f"{duckdb.__version__} {_implementations().to_pylist()} {_literature().to_pylist()}"
    digest = hashlib.sha256(known.encode())
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


def _origin(path: Path) -> str:
    """Returns "recorded" or "runs", the folder that holds `<device>/<table>/<stem>.parquet`."""
    return "recorded" if path.absolute().parents[2].name == "recorded" else "runs"


def _all_rows(folder: Path, table: str) -> pa.Table:
    files = [file for file in parquet_files(folder.parents[1]) if file.parent == folder]
    return pa.concat_tables(
        [_schema(table).empty_table(), *(read_table(file, table) for file in files)]
    )


def _with_source(rows: pa.Table, origin: str, file: str) -> pa.Table:
    for name, value in (("origin", origin), ("file", file)):
        first = pa.repeat(pa.scalar(0, pa.int32()), len(rows))
        rows = rows.append_column(name, pa.DictionaryArray.from_arrays(first, [value]))
    return rows


def _check_runs(connection: duckdb.DuckDBPyConnection, table: str, loaded: pa.Table) -> None:
    """Raises StoreError where two files hold one run of `table` with different rows."""
    connection.register("loaded", loaded)
    in_two_files = "select run_id from loaded group by run_id having count(distinct file) > 1"
    shared = [run for (run,) in connection.sql(in_two_files).fetchall() if run is not None]
    if not shared:  # most runs lie in one file
        return
    is_shared = pc.is_in(loaded["run_id"].cast(pa.string()), pa.array(shared, pa.string()))
    connection.register("shared", loaded.filter(is_shared))
    # All rows of a run must lie in the same files.
    altered = connection.sql(
        """
        select run_id, min(files), max(files)
        from (
            select * exclude (origin, file), list_sort(list(distinct file)) as files
            from shared group by all
        ) as run_rows
        group by run_id having count(distinct files) > 1 order by run_id
        """
    ).fetchall()
    for run, first, last in altered:
        one = min(set(first) ^ set(last))
        other = (last if one in first else first)[0]
        raise StoreError(
            f"{one} and {other} hold run {run} of table {table} with different rows: a run is "
            "never changed, so restore both from git, or remove the one that is not as measured"
        )


def _fill(database: Path, tables: dict[str, pa.Table], views: list[Path], inputs: str) -> None:
    """Writes `tables` and `views` to the new file `database`, and reads it back.

    Closing a database hides that its checkpoint found no space; `checkpoint` raises.
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
    """Creates `tables`, with equal rows once, and the tables of implementations and literature.

    `tables` have columns `origin` and `file`. A table that exists is replaced.
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
    connection.register("published", _literature())
    connection.execute("create or replace table literature as select * from published order by all")
    connection.unregister("published")


def _implementations() -> pa.Table:
    """Returns a row for every implementation of the catalog, for views to join with."""
    rows = [
        {
            "op": op,
            "family": operator.family or op,
            "implementation": name,
            "provider": (listed := catalog().listed(op, name)).provider,
            "rank": listed.rank,
            "chosen_from": listed.own is not None and listed.own.chosen_from,
            "phase": operator.phase_of(listed.own),
        }
        for op, operator in catalog().operators.items()
        for name in catalog().names(op)
    ]
    return pa.Table.from_pylist(rows)


def _literature() -> pa.Table:
    """Returns the rows of `LITERATURE`. An installed package has none: it comes without data/."""
    if not LITERATURE.exists():
        return schemas.LITERATURE.empty_table()
    types = {field.name: field.type for field in schemas.LITERATURE}
    options = csv.ConvertOptions(column_types=types, strings_can_be_null=True)
    return csv.read_csv(LITERATURE, convert_options=options).cast(schemas.LITERATURE)


def _contents(connection: duckdb.DuckDBPyConnection) -> str:
    """Returns a digest of the names of the views, and of the rows of every table.

    Files of SQL create some of the tables; views follow from tables.
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


def _write(path: Path, table: str, content: pa.Table) -> None:
    """Writes a file of `table`, sealed with its digest; columns that `content` lacks are null."""
    schema = _schema(table)
    given = {name: content[name] for name in content.column_names}
    columns = [given.get(f.name, pa.nulls(len(content), f.type)).cast(f.type) for f in schema]
    encoded = pa.BufferOutputStream()
    options = {"compression": "zstd", "write_page_checksum": True}
    with pq.ParquetWriter(encoded, schema, **options) as writer:
        writer.write_table(pa.table(columns, schema=schema))
        writer.add_key_value_metadata({manifest.KEY: manifest.ZEROS})
    with replacing(path) as temporary:
        temporary.write_bytes(manifest.sealed(encoded.getvalue().to_pybytes()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Exits with 2 for wrong arguments, and with 1 if rows cannot be recorded."""
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
