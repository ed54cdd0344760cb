"""Views of steps: speedup, memory, matrix, stages, environments; by values computed by hand."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import duckdb
import numpy as np
import pytest

from tests.sql.conftest import NOW, PROVENANCE, SQL, VIEWS, Query, operator, step, steps
from tnp.store import build_database, write_table


def test_every_view_is_empty_over_an_empty_store(store: Callable[..., Query]) -> None:
    query = store()
    for view in set(VIEWS) - {"auto_candidates"}:  # a list, of nothing measured
        assert query(f"from {view}") == []


def test_equal_steps_are_no_win_and_twice_as_fast_ones_are(store: Callable[..., Query]) -> None:
    query = store(*steps("sdpa_flash", 100), *steps("sdpa_cudnn", 100), *steps("separate", 50))
    rows = {row["variant"]: row for row in query("from speedup")}
    assert rows["sdpa_flash"]["speedup"] == 1
    assert not rows["sdpa_flash"]["win"] and not rows["sdpa_cudnn"]["win"]
    cudnn, separate = rows["sdpa_cudnn"], rows["separate"]
    assert cudnn["speedup_low"] < 1 < cudnn["speedup_high"]
    assert separate["win"]
    assert separate["speedup"] == pytest.approx(2, rel=0.02)
    assert 1.9 < separate["speedup_low"] < separate["speedup"] < separate["speedup_high"] < 2.1


def test_a_gain_within_the_spread_of_equal_steps_is_no_win(store: Callable[..., Query]) -> None:
    # Replicates differ by 10 %, and each config's timings agree: only the spread stands against 1.
    flash = [step("sdpa_flash", [100.0 + 10 * (i - 2)], replicate=i) for i in (1, 2, 3)]
    query = store(*flash, step("separate", [80.0]))
    rows = {row["variant"]: row for row in query("from speedup")}
    assert rows["separate"]["aa_spread"] == pytest.approx(0.1)
    assert rows["separate"]["speedup_low"] > 1.1 and rows["separate"]["win"]
    query = store(*flash, step("separate", [85.0]))
    (row,) = query("from speedup where variant = 'separate'")
    assert 1 < row["speedup_low"] < 1.1 and not row["win"]


def test_nothing_wins_where_the_spread_of_equal_steps_is_unknown(
    store: Callable[..., Query],
) -> None:
    query = store(step("sdpa_flash", [100.0, 101.0]), step("separate", [50.0, 51.0]))
    (row,) = query("from speedup where variant = 'separate'")
    assert row["speedup_low"] > 1.9 and row["aa_spread"] is None and not row["win"]


def test_best_pytorch_is_the_fastest_with_any_switch(store: Callable[..., Query]) -> None:
    query = store(
        step("sdpa_flash", [100.0]),
        step("sdpa_cudnn", [80.0], cuda_graph=True),
        step("sdpa_cudnn", [90.0]),
        step("separate", [40.0]),
    )
    (row,) = query("from speedup where variant = 'separate'")
    assert (row["best_pytorch_variant"], row["best_pytorch_step_ms"]) == ("sdpa_cudnn", 80)
    assert (row["speedup"], row["speedup_best"]) == (2.5, 2.0)


def test_other_devices_shapes_and_dtypes_are_not_compared(store: Callable[..., Query]) -> None:
    for column, value in (("device", "cpu"), ("n_context", 7), ("dtype", "float32")):
        query = store(step("sdpa_flash", [100.0]), step("separate", [50.0], **{column: value}))
        (row,) = query("from speedup where variant = 'separate'")
        assert row["speedup"] is None and not row["win"]


def test_a_failed_run_beside_good_ones_hides_nothing(store: Callable[..., Query]) -> None:
    query = store(
        *steps("sdpa_flash", 100),
        step("separate", [50.0]),
        step("separate", "oom", replicate=2),
    )
    (row,) = query("from step_summary where variant = 'separate'")
    assert (row["status"], row["step_ms"], row["n_replicates"]) == ("ok", 50, 2)
    (row,) = query("from speedup where variant = 'separate'")
    assert row["status"] == "ok" and row["speedup"] == pytest.approx(2, rel=0.02)


def test_a_note_in_reason_is_kept_and_makes_no_failure(store: Callable[..., Query]) -> None:
    query = store(
        step("sdpa_flash", [2.0], reason=""),
        step("sdpa_flash", [2.0], replicate=2, reason="did not settle"),
    )
    (row,) = query("from step_summary")
    assert (row["status"], row["step_ms"], row["reason"]) == ("ok", 2, "did not settle")


def test_mfu_is_of_the_matmul_ceiling_of_the_device(store: Callable[..., Query]) -> None:
    parts = [
        step("sdpa_flash", [2.0], replicate=i, tflops=tflops) for i, tflops in ((1, 30), (2, 50))
    ]
    matmul = operator("torch", "matmul", time_ms_p50=10.0, flops=1e12, bytes=1e9)
    assert store(*parts, matmul)("select mfu from step_summary") == [{"mfu": 0.4}]
    assert store(*parts)("select mfu from step_summary") == [{"mfu": None}]


def test_the_newest_generation_counts(store: Callable[..., Query]) -> None:
    later = {"recorded_at": NOW + timedelta(hours=1), "kernels_hash": "new"}
    query = store(step("sdpa_flash", [100.0]), step("sdpa_flash", [50.0, 60.0, 70.0], **later))
    (row,) = query("from step_summary")
    assert (row["n_replicates"], row["step_ms"]) == (1, 60)
    assert 50 <= row["step_ms_low"] <= row["step_ms_high"] <= 70
    query = store(step("sdpa_flash", [100.0]), step("sdpa_flash", "oom", **later))
    assert query("from step_summary")[0]["status"] == "oom"


def test_recorded_rows_that_are_also_in_runs_count_once(tmp_path: Path) -> None:
    files = [tmp_path / origin / "gpu" / "steps" / "a.parquet" for origin in ("recorded", "runs")]
    for file in files:
        write_table(file, "steps", step("sdpa_flash", [1.0])["steps"])
    build_database(files, SQL, tmp_path / "results.duckdb")
    with duckdb.connect(str(tmp_path / "results.duckdb"), read_only=True) as connection:
        assert connection.sql("select origin from current_steps").fetchall() == [("recorded",)]


def test_the_bootstrap_agrees_with_numpys(store: Callable[..., Query]) -> None:
    generator = np.random.default_rng(0)
    samples = [list(generator.normal(100, 5, 51)) for _ in range(4)]
    query = store(*(step("sdpa_flash", times, replicate=i) for i, times in enumerate(samples)))
    expected = [
        np.median(
            [
                np.median(generator.choice(samples[replicate], 51))
                for replicate in generator.integers(4, size=4)
            ]
        )
        for _ in range(4000)
    ]
    low, high = np.quantile(expected, [0.025, 0.975])
    (row,) = query("from step_summary")
    assert row["step_ms_low"] == pytest.approx(low, abs=0.3)
    assert row["step_ms_high"] == pytest.approx(high, abs=0.3)
    again = store(*(step("sdpa_flash", times, replicate=i) for i, times in enumerate(samples)))
    assert again("from step_summary") == [row]


def test_memory_is_relative_to_the_plain_baseline(store: Callable[..., Query]) -> None:
    query = store(
        step("sdpa_flash", [1.0], peak_memory_bytes=8 << 30),
        step("sdpa_flash", [1.0], checkpoint=True, peak_memory_bytes=2 << 30),
    )
    (row,) = query("from memory where checkpoint")
    assert (row["peak_memory_gib"], row["relative_to_baseline"]) == (2, 0.25)


def test_matrix_has_a_column_for_each_combination(store: Callable[..., Query]) -> None:
    query = store(
        step("sdpa_flash", [100.0], peak_memory_bytes=8 << 30),
        step("sdpa_flash", "oom", cuda_graph=True),
        step("sdpa_flash", [125.0], checkpoint=True, peak_memory_bytes=2 << 30),
        step("sdpa_flash", [1.0], checkpoint=True, cuda_graph=True, optimizer=False),
    )
    (row,) = query("from matrix")
    values = {
        cell: tuple(row[f"{cell}_{name}"] for name in ("step_ms", "speedup", "peak_memory_gib"))
        for cell in ("plain", "checkpoint", "cuda_graph", "checkpoint_cuda_graph")
    }
    assert values["plain"] == (100, 1, 8) and values["checkpoint"] == (125, 0.8, 2)
    assert values["cuda_graph"] == values["checkpoint_cuda_graph"] == (None, None, None)
    statuses = (row["plain_status"], row["cuda_graph_status"], row["checkpoint_cuda_graph_status"])
    assert statuses == ("ok", "oom", None)


def test_stage_shares_are_of_medians_and_sum_to_one(store: Callable[..., Query]) -> None:
    parts = []
    for replicate, scale in ((1, 1.0), (2, 2.0), (3, 9.0)):
        tables = step("sdpa_flash", [4 * scale], replicate=replicate)
        row = {name: value for name, value in tables["steps"][0].items() if name != "status"}
        row = {name: row[name] for name in row if name not in ("step_ms_p50", "peak_memory_bytes")}
        tables["stages"] = [
            row | {"stage": stage, "time_ms_p50": time * scale}
            for stage, time in (("attention", 1.0), ("backward", 3.0))
        ]
        parts.append(tables)
    # Of forward and backward alone it would be a second bar of the same name.
    feasibility = {"config_id": "memory_feasibility", "optimizer": False}
    part = step("sdpa_flash", [4], replicate=3, **feasibility)
    part["stages"] = [row | feasibility | {"stage": "attention", "time_ms_p50": 1.0}]
    parts.append(part)
    found = store(*parts)("from stage_share")
    assert {row["config_id"] for row in found} == {"mid--sdpa_flash"}
    rows = {row["stage"]: row for row in found}
    assert {stage: (row["time_ms"], row["share"]) for stage, row in rows.items()} == {
        "attention": (2, 0.25),
        "backward": (6, 0.75),
    }


def test_environment_summary_has_the_latest_of_each(store: Callable[..., Query]) -> None:
    row = PROVENANCE | {"device_name": "GPU", "git_commit": "a"}
    later = row | {"recorded_at": NOW + timedelta(days=1), "git_commit": "b"}
    (found,) = store({"environments": [row, later]})("from environment_summary")
    assert (found["n_measurements"], found["git_commit"]) == (2, "b")
    assert (found["first_recorded_at"], found["last_recorded_at"]) == (NOW, later["recorded_at"])
