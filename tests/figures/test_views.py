"""Tests that the views of workflow/sql have the columns that the figures read, and feed them."""

from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import duckdb
import pytest
import vl_convert

from tests.figures.conftest import GPU, Row, title
from tests.figures.views import VIEWS
from tnp.figures import FIGURES, draw
from tnp.store.files import build_database, write_table

SQL = Path(__file__).parents[2] / "workflow" / "sql"

EARLIER, LATER = (datetime(2026, month, 1, 10, tzinfo=UTC) for month in (2, 4))
PROVENANCE = {"device": GPU, "environment_id": "e", "recorded_at": EARLIER}
OK = {"status": "ok", "reason": ""}


def measured() -> dict[str, list[Row]]:
    """Two variants of a step and of attention in two replicates, and one evaluated training run.

    A step of sdpa_flash takes 200 ms, one of separate 100 ms.
    """
    tables: dict[str, list[Row]] = defaultdict(list)
    gpu = {"device_name": "NVIDIA H200", "memory_bytes": 150 << 30}
    tables["environments"] = [gpu, gpu | {"recorded_at": LATER}]
    sizes = {"shape": "mid", "batch": 4, "dtype": "bfloat16"}
    points = {"n_context": 10000, "n_target": 1000}
    off = {"checkpoint": False, "cuda_graph": False}
    for replicate in (0, 1):
        for variant, time in (("sdpa_flash", 200.0), ("separate", 100.0)):
            step = sizes | points | off | {"config_id": f"matrix--mid--{variant}"}
            step |= {"replicate": replicate, "study": "matrix", "variant": variant}
            step |= {"optimizer": True}
            tables["steps"].append(step | OK | {"step_ms_p50": time, "peak_memory_bytes": 8 << 30})
            for pass_, share in (("forward", 0.3), ("backward", 0.6)):
                of_stage = {"stage": "attention", "pass": pass_, "source": "profiler"}
                of_stage |= {"time_ms_p50": share * time, "n_kernels": 2}
                tables["stages"].append(step | of_stage)
            tables["samples"] += samples(step["config_id"], replicate, "step", time)
            op = sizes | OK | {"config_id": f"attention--mid--{variant}", "replicate": replicate}
            op |= {"op": "attention", "pass": "forward", "implementation": variant}
            op |= {"flops": 1e12, "bytes": 1e8, "time_ms_p50": time / 50}
            tables["ops"].append(op)
            tables["samples"] += samples(op["config_id"], replicate, "forward", time / 50)
        ceiling = OK | {"pass": "forward", "implementation": "torch", "replicate": replicate}
        tables["ops"] += [
            ceiling | {"config_id": "matmul", "op": "matmul", "flops": 7e11, "time_ms_p50": 1.0},
            ceiling | {"config_id": "copy", "op": "copy", "bytes": 4e9, "time_ms_p50": 1.0},
        ]
    problem = '{"dtype":"bfloat16","op":"swiglu","sizes":{"rows":64,"width":256}}'
    call = OK | {"op": "swiglu", "problem": problem, "pass": "forward"}
    for name, time in (("torch", 9.0), ("triton", 12.0)):
        host = {"with_launches": True, "implementation": name, "host_us_p50": time}
        tables["host_calls"].append(call | host)
    for variant, role in (("sdpa_flash", "baseline"), ("separate", "own")):
        host = {"variant": variant, "cuda_graph": False, "role": role, "run_id": "h"}
        host |= {"host_ms_p50": 20.0, "step_ms_p50": 30.0}
        tables["host_steps"].append(sizes | OK | points | host)
    counted = call | {"shape": "tiny", "sections": "quick", "launch": 0, "kernel": "k"}
    counted |= {"duration_us": 3.0, "implementation": "triton", "run_id": "p"}
    tables["profiles"].append(counted)
    asked = OK | {"model": "llama3_1b", "weights": "bf16", "batch": 1, "n_prompt": 32, "n_new": 8}
    text = {"form": "hf", "role": "baseline", "run_id": "t", "config_id": "t", "bytes": 2e9}
    text |= {"token_ms_p50": 2.0, "token_ms_mean": 2.0, "tokens_per_s": 500.0, "gates": ""}
    tables["generations"].append(asked | text)
    for variant, time in (("sdpa_flash", 9), ("only_mlp", 8), ("without_mlp", 6), ("fused", 4)):
        step = tables["steps"][0] | {"variant": variant, "study": "ablation", "step_ms_p50": time}
        step |= {"shape": "small", "n_context": 64, "config_id": f"ablation--small--{variant}"}
        tables["steps"].append(step)
        tables["samples"] += samples(step["config_id"], 0, "step", time)
    run = {"config_id": "gp", "run": "gp", "variant": "sdpa_flash", "source": "gaussian_process"}
    run |= {"batch": 64, "n_context": 64, "n_target": 500, "dtype": "bfloat16", "seed": 0}
    run |= {"exact_log_likelihood": 1.0, "prior_log_likelihood": -1.0}
    found = {"": 0.5, "_shuffled": -1.5, "_stderr": 0.01}
    run |= {f"heldout_log_likelihood{name}": value for name, value in found.items()}
    tables["training"] = [run | {"step": step} for step in (100, 200)]
    return tables


def samples(config_id: str, replicate: int, pass_: str, time_ms: float) -> list[Row]:
    row = {"config_id": config_id, "replicate": replicate, "pass": pass_}
    return [row | {"sample": i, "time_ms": time_ms * (1 + i / 1000)} for i in range(3)]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("views")
    files = []
    for table, rows in measured().items():
        files.append(root / "recorded" / GPU / table / "rows.parquet")
        write_table(files[-1], table, [PROVENANCE | row for row in rows])
    later = measured()["training"][0] | {"run": "gp_later", "recorded_at": LATER}
    files.append(root / "runs" / GPU / "training" / "rows.parquet")
    write_table(files[-1], "training", [PROVENANCE | later])
    build_database(files, SQL, root / "results.duckdb")
    return root / "results.duckdb"


@pytest.mark.parametrize("view", VIEWS)
def test_view_has_the_columns_the_figures_read(database: Path, view: str) -> None:
    with duckdb.connect(str(database), read_only=True) as connection:
        found = {row[0] for row in connection.execute(f"describe {view}").fetchall()}
    wanted = {column.split()[0] for column in VIEWS[view].split(", ")}
    assert wanted <= found, f"{view} lacks {', '.join(sorted(wanted - found))}"


@pytest.mark.parametrize("figure", FIGURES)
def test_figure_over_the_views(database: Path, figure: str) -> None:
    chart = draw(figure, database)
    if figure == "noise":  # these rows have no evidence, and so are no measure of noise
        assert "No rows" in title(chart)
        return
    assert "No rows" not in title(chart)
    if figure == "speedup":  # the ratio of the medians
        assert (
            "Our deterministic attention trains 2.00× as fast (medians alone, no verdict) as "
            "plain PyTorch"
        ) in title(chart)
    svg = vl_convert.vegalite_to_svg(chart.to_dict())
    assert "NVIDIA H200" in svg and "recorded 2026-02-01" in svg
    # Rows that a figure does not draw have no part in its dates.
    assert ("this machine, 2026-04-01" in svg) is (figure == "training")
    assert ("2026-04-01" in svg) is (figure == "training")
