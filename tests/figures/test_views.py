"""The views of workflow/sql have the columns that the figures read, and feed them."""

from pathlib import Path

import duckdb
import pytest
import vl_convert

from tests.figures.conftest import GPU, VIEWS, title
from tnp.figures import FIGURES, draw
from tnp.schemas import TABLES

SQL = Path(__file__).parents[2] / "workflow" / "sql"


def raw_tables(connection: duckdb.DuckDBPyConnection) -> None:
    """Every table of the store, empty, with the column that loading adds."""
    for name, schema in TABLES.items():
        connection.register("empty", schema.empty_table())
        connection.execute(f"create table {name} as select *, '' as origin from empty")
        connection.unregister("empty")


def insert(connection: duckdb.DuckDBPyConnection, table: str, **row: object) -> None:
    row = {"device": GPU, "environment_id": "e", "origin": "recorded", **row}
    row["recorded_at"] = "2026-02-01 10:00:00+00"
    names = ", ".join(f'"{name}"' for name in row)
    marks = ", ".join("?" * len(row))
    connection.execute(f"insert into {table} ({names}) values ({marks})", list(row.values()))


def measured(connection: duckdb.DuckDBPyConnection) -> None:
    """Two variants of a step and of attention in two replicates, and one evaluated training run."""
    insert(connection, "environments", device_name="NVIDIA H200", memory_bytes=150 << 30)
    sizes = {"shape": "mid", "batch": 4, "dtype": "bfloat16"}
    for replicate in (0, 1):
        for variant, time in (("sdpa_flash", 200.0), ("separate", 100.0)):
            key = {"config_id": f"matrix--mid--{variant}", "replicate": replicate, **sizes}
            step = key | {"study": "matrix", "variant": variant, "n_context": 10000}
            step |= {"n_target": 1000, "checkpoint": False, "cuda_graph": False, "optimizer": True}
            insert(
                connection, "steps", **step, status="ok", reason="", step_ms_p50=time,
                peak_memory_bytes=8 << 30, n_samples=2, throttled=False,
            )  # fmt: skip
            for stage, share in (("attention", 0.3), ("backward", 0.7)):
                insert(connection, "stages", **step, stage=stage, time_ms_p50=share * time)
            for pass_, flops in (("forward", 1e12), ("backward", 2.5e12)):
                insert(
                    connection, "ops", **key | {"config_id": f"attention--mid--{variant}"},
                    op="attention", **{"pass": pass_}, implementation=variant, n_q=11000,
                    n_k=10000, n_heads=8, head_dim=64, status="ok", reason="", flops=flops,
                    bytes=1e8, time_ms_p50=time / 50, tflops=flops / time / 2e7, n_samples=2,
                )  # fmt: skip
            for name, pass_ in (("matrix", "step"), ("attention", "forward")):
                for sample in (0, 1):
                    insert(
                        connection, "samples", config_id=f"{name}--mid--{variant}",
                        replicate=replicate, **{"pass": pass_}, sample=sample,
                        time_ms=(time if pass_ == "step" else time / 50) * (1 + 0.001 * sample),
                    )  # fmt: skip
        for op, column, rate in (("matmul", "tflops", 700.0), ("copy", "gb_per_s", 4000.0)):
            insert(
                connection, "ops", config_id=f"ceilings--{op}", op=op, **{"pass": "forward"},
                implementation="torch", replicate=replicate, status="ok", reason="",
                dtype="bfloat16", time_ms_p50=1.0, **{column: rate},
            )  # fmt: skip
    for step in (100, 200):
        insert(
            connection, "training", config_id="gp", run="gp", variant="sdpa_flash",
            source="gaussian_process", batch=64, n_context=64, n_target=500, dtype="bfloat16",
            seed=0, step=step, loss=1.0, heldout_log_likelihood=0.5,
            heldout_log_likelihood_shuffled=-1.5, heldout_log_likelihood_stderr=0.01,
            exact_log_likelihood=1.0, prior_log_likelihood=-1.0,
        )  # fmt: skip


def create_views(connection: duckdb.DuckDBPyConnection) -> None:
    """Each view once those it reads from are there."""
    pending = sorted(SQL.glob("*.sql"))
    assert pending, f"no view in {SQL}"
    while pending:
        waiting = []
        for file in pending:
            try:
                connection.execute(file.read_text())
            except duckdb.CatalogException:
                waiting.append(file)
        assert len(waiting) < len(pending), f"{waiting[0].name} reads from something missing"
        pending = waiting


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("views") / "results.duckdb"
    with duckdb.connect(str(path)) as connection:
        raw_tables(connection)
        measured(connection)
        create_views(connection)
    return path


@pytest.mark.parametrize("view", VIEWS)
def test_view_has_the_columns_the_figures_read(database: Path, view: str) -> None:
    with duckdb.connect(str(database), read_only=True) as connection:
        found = {row[0] for row in connection.execute(f"describe {view}").fetchall()}
    wanted = {column.split()[0] for column in VIEWS[view].split(", ")}
    assert wanted <= found, f"{view} lacks {', '.join(sorted(wanted - found))}"


@pytest.mark.parametrize("figure", FIGURES)
def test_figure_over_the_views(database: Path, figure: str) -> None:
    chart = draw(figure, database)
    assert "No rows" not in title(chart)
    assert "mid" in vl_convert.vegalite_to_svg(chart.to_dict()) or figure == "training"


def test_speedup_over_the_views_is_the_ratio_of_the_medians(database: Path) -> None:
    assert "separate trains 2.00× faster than sdpa_flash at mid on NVIDIA H200" in title(
        draw("speedup", database)
    )
