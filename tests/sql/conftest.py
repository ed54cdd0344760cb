"""A store of a few rows, written as the store writes them, and what builds such rows."""

import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from itertools import product
from pathlib import Path

import duckdb
import numpy as np
import pytest

from tests.sql.depths import depths
from tnp.bench.outcome import together
from tnp.store.files import _load, build_database, read_tables, write_table
from tnp.store.views import CREATED, MEANINGS, in_order
from tnp.util.atomic_files import parquet_files

SQL = Path(__file__).parents[2] / "workflow" / "sql"
FILES = sorted(SQL.glob("*.sql"))
VIEWS = sorted(depths(FILES).keys() - {MEANINGS})
TEXTS = {path: re.sub(r"--.*", "", path.read_text()) for path in in_order(FILES)}
HOME = {name: path for path, text in TEXTS.items() for _, _, name in CREATED.findall(text)}
NOW = datetime(2026, 2, 1, 10, 0, tzinfo=UTC)
PROVENANCE = {"device": "gpu", "environment_id": "e", "recorded_at": NOW}
SIZES = {"shape": "mid", "batch": 4, "n_context": 100, "n_target": 10, "dtype": "bfloat16"}
SIZES_OF_MLP = {"batch": 4, "n_q": 110, "d_model": 512, "d_ff": 1365, "d_ff_storage": 1408}

Row = dict[str, object]
Tables = dict[str, list[Row]]


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a database without rows, which tests copy."""
    database = tmp_path_factory.mktemp("empty") / "results.duckdb"
    build_database([], SQL, database)
    return database


def files_of(sql: str) -> set[Path]:
    """Returns the files that create what a text names, and what those files name."""
    found: set[Path] = set()
    pending = [sql]
    while pending:
        new = {HOME[word] for word in re.findall(r"\w+", pending.pop()) if word in HOME} - found
        found |= new
        pending += [TEXTS[path] for path in new]
    return found


class Query:
    """Returns the rows of SQL over `database`, in which only the recorded tables are filled yet.

    Tables that files of SQL create take most of the time: each is filled when SQL that reads it,
    directly or through views, first asks for it.
    """

    def __init__(self, database: Path) -> None:
        self.connection = duckdb.connect(str(database))
        self.connection.execute("pragma disable_checkpoint_on_shutdown")  # nobody opens it again
        self._pending = [
            path
            for path, text in TEXTS.items()
            if "create or replace table" in text and MEANINGS not in text
        ]

    def __call__(self, sql: str) -> list[Row]:
        needed = files_of(sql)
        for path in [path for path in self._pending if path in needed]:
            self.connection.execute(TEXTS[path])
            self._pending.remove(path)
        return self.connection.sql(sql).to_arrow_table().to_pylist()


Store = Callable[..., Query]


@pytest.fixture
def store(empty_store: Path, tmp_path: Path) -> Iterator[Store]:
    """Builds a database from tables and returns a function from SQL to rows.

    `parts` were measured on this machine, `recorded` elsewhere; there are `copies` of each file.
    """
    built: list[Query] = []

    def build(*parts: Tables, recorded: Sequence[Tables] = (), copies: int = 1) -> Query:
        files = []
        for origin, tables in (("runs", together(parts)), ("recorded", together(recorded))):
            shutil.rmtree(tmp_path / origin, ignore_errors=True)  # an earlier call's rows
            for (table, rows), copy in product(tables.items(), range(copies)):
                write_table(tmp_path / origin / "gpu" / table / f"{copy}.parquet", table, rows)
            files += parquet_files(tmp_path / origin)
        read = read_tables(files)
        # A copy has the views, which take long to create.
        built.append(Query(shutil.copyfile(empty_store, tmp_path / f"store{len(built)}.duckdb")))
        _load(built[-1].connection, {table: rows for table, rows in read.items() if rows})
        return built[-1]

    yield build
    for query in built:
        query.connection.close()


def step(
    variant: str,
    times: list[float] | str,
    *,
    replicate: int = 1,
    checkpoint: bool = False,
    cuda_graph: bool = False,
    **columns: object,
) -> Tables:
    """Returns one replicate of a step, from its timings in ms or the status it failed with."""
    config_id = f"mid--{variant}" + "--ckpt" * checkpoint + "--graph" * cuda_graph
    at = {"recorded_at": NOW + timedelta(seconds=replicate)}  # each replicate is a process
    identity = PROVENANCE | at | {"config_id": config_id, "replicate": replicate}
    row = identity | SIZES | {"study": "matrix", "variant": variant, "optimizer": True}
    row |= {"checkpoint": checkpoint, "cuda_graph": cuda_graph}
    if isinstance(times, str):
        return {"steps": [row | {"status": times, "reason": f"because {times}"} | columns]}
    row |= {"status": "ok", "step_ms_p50": float(np.median(times)), "peak_memory_bytes": 2 << 30}
    samples = [
        identity | {"pass": "step", "sample": i, "time_ms": time} for i, time in enumerate(times)
    ]
    at = {name: value for name, value in columns.items() if name in PROVENANCE}
    return {"steps": [row | columns], "samples": [sample | at for sample in samples]}


def steps(variant: str, median_ms: float, spread: float = 0.01, **columns: object) -> list[Tables]:
    """Returns three replicates around `median_ms`, of nine timings each, `spread` apart."""
    generator = np.random.default_rng(len(variant))
    return [
        step(
            variant,
            list(median_ms * (1 + spread * (i - 2)) * generator.normal(1, spread, 9)),
            replicate=i,
            **columns,
        )
        for i in (1, 2, 3)
    ]


def operator(implementation: str, op: str = "attention", status: str = "ok", **columns) -> Tables:
    row = PROVENANCE | {"config_id": f"{op}--{implementation}", "op": op, "pass": "forward"}
    row |= {"implementation": implementation, "shape": "mid", "dtype": "bfloat16", "replicate": 1}
    row |= {"status": status} | columns
    sample = {name: row[name] for name in (*PROVENANCE, "config_id", "replicate", "pass")}
    sample |= {"sample": 0, "time_ms": columns.get("time_ms_p50")}
    return {"ops": [row], "samples": [sample]}


def both_passes(implementation: str, op: str, forward: float, backward: float, **columns) -> Tables:
    """Returns rows of both passes. A backward pass without a time has failed."""
    parts = [
        operator(implementation, op, **columns | {"pass": pass_}, time_ms_p50=time)
        if time
        else operator(implementation, op, "oom", **columns | {"pass": pass_})
        for pass_, time in (("forward", forward), ("backward", backward))
    ]
    return {table: [row for part in parts for row in part[table]] for table in parts[0]}


def check(gate: str, name: str, value: float | None, bound: float | None, **columns) -> Tables:
    row = PROVENANCE | {"gate": gate, "phase": 2, "implementation": "", "check": name}
    row |= {"metric": "error", "value": value, "bound": bound, "mode": "gpu", "status": "ok"}
    return {"gates": [row | columns]}


ROLES = {"sdpa_flash": "baseline", "torch": "baseline", "sdpa_cudnn": "peer", "fa4": "peer"}
CODE = {"kernel": {"_kernel": "1"}, "module": {"tnp.model": "1"}}


def run(
    run_id: str,
    *parts: Tables,
    minutes: float = 0,
    code: dict[str, dict[str, str]] = CODE,
    gpu: str = "GPU-1",
    torch: str = "2.13.0",
    **columns: object,
) -> Tables:
    """Returns the rows of `parts` as one process writes them, with their evidence.

    It wrote them `minutes` after NOW. `code` (part → name → hash) is that of all it measured or
    tested. `columns` override those of its steps and operators. Otherwise these are settled,
    of the role in `ROLES` or "own", and wait for gate "proof" (PyTorch's operators for none).
    """
    code = code | {"package": {"torch": torch}}
    common = {"environment_id": f"{gpu} {torch}", "recorded_at": NOW + timedelta(minutes=minutes)}
    tables = together(parts)
    for table, rows in tables.items():
        tables[table] = [row | common | {"run_id": run_id} for row in rows]
    implementations = {row.get("implementation", "") for row in tables.get("ops", [{}])}
    tables["code"] = [
        PROVENANCE
        | common
        | {"run_id": run_id, "implementation": name, "part": part}
        | {"name": of, "hash": hash_}
        for name in implementations
        for part, hashes in code.items()
        for of, hash_ in hashes.items()
    ]
    hashes = {"kernels_hash": str([code.get("kernel"), torch])}
    hashes |= {"source_hash": str(code.get("module"))}
    hashes |= {"spec_hash": "s", "timing_hash": "t"}
    for table in ("steps", "ops"):
        for i, row in enumerate(tables.get(table, [])):
            role = ROLES.get(row["variant" if table == "steps" else "implementation"], "own")
            waits = {"gates": "" if table == "ops" and role != "own" else "proof", "role": role}
            checked = {"max_abs_error": 0.0, "twin": False} if table == "ops" else {}
            tables[table][i] = hashes | waits | checked | {"settled": True} | row | columns
    device = {"device": next(iter(tables.values()))[0]["device"]}
    environment = (
        PROVENANCE | common | device | {"gpu_uuid": gpu, "torch": torch, "triton": "3.7.1"}
    )
    return tables | {"environments": [environment]}


def gate(run_id: str, passed: bool | None = True, **columns: object) -> Tables:
    """Returns a run of gate "proof": green, red, or with nothing that it could check."""
    outcome = {"status": "unsupported"} if passed is None else {"passed": passed}
    return run(run_id, check("proof", "far", 0.5 if passed else 3.0, 1.0, **outcome), **columns)


def runs(
    variant: str, medians_ms: list[float], minutes: float = 0, name: str = "", **columns: object
) -> list[Tables]:
    """Returns runs of a step, one for each median, a minute apart, with evidence if gate "proof" is
    green.

    `columns` are of the step or, as `run` has them, of the runs.
    """
    of_runs = {
        key: columns.pop(key) for key in ("code", "gpu", "torch", "settled") if key in columns
    }
    parts = [step(variant, [median], replicate=i, **columns) for i, median in enumerate(medians_ms)]
    named = parts[0]["steps"][0]["config_id"]
    return [
        run(f"{named} {minutes + i} {name}", part, minutes=minutes + i, **of_runs)
        for i, part in enumerate(parts)
    ]


def one(query: Query, sql: str) -> Row:
    """Returns the only row of the answer."""
    (row,) = query(sql)
    return row
