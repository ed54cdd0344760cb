"""Views of steps: speedup, memory, matrix, stages, environments; by values computed by hand."""

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import duckdb
import numpy as np
import pytest

from tests.sql.conftest import (
    NOW,
    SQL,
    VIEWS,
    Query,
    Tables,
    gate,
    operator,
    run,
    runs,
    step,
    steps,
)
from tnp.store.files import build_database, write_table
from tnp.store.schemas import TABLES


def test_every_view_is_empty_over_an_empty_store(store: Callable[..., Query]) -> None:
    query = store()
    for view in VIEWS:
        assert query(f"from {view}") == []


def test_twice_as_fast_is_faster_and_equal_is_not(store: Callable[..., Query]) -> None:
    query = store(
        gate("gate"),
        *runs("sdpa_flash", [100.0, 101.0, 100.5]),
        *runs("sdpa_cudnn", [100.4, 100.1, 101.2]),
        *runs("separate", [50.0, 50.6, 50.2]),
    )
    rows = {row["variant"]: row for row in query("from speedup")}
    flash, cudnn, separate = (rows[name] for name in ("sdpa_flash", "sdpa_cudnn", "separate"))
    assert (flash["speedup"], flash["verdict"], flash["speedup_low"]) == (1, None, None)
    assert cudnn["verdict"] == "ambiguous" and cudnn["speedup_low"] < 1 < cudnn["speedup_high"]
    assert separate["verdict"] == separate["verdict_best"] == "faster"
    assert separate["speedup"] == pytest.approx(2, rel=0.01)
    assert 1.8 < separate["speedup_low"] < separate["speedup"] < separate["speedup_high"] < 2.2
    assert (separate["n_runs"], separate["n_pairs"], separate["n_sessions"]) == (3, 3, 1)


def test_the_kth_runs_of_a_session_are_pairs(store: Callable[..., Query]) -> None:
    """A session that is slower for all, and a run that nothing stands beside, change no ratio."""
    query = store(
        gate("gate"),
        *runs("sdpa_flash", [100.0, 120.0]),
        *runs("separate", [50.0, 40.0, 10.0]),
        *runs("sdpa_flash", [500.0], minutes=90),
        *runs("separate", [250.0], minutes=95),
        *runs("separate", [1.0], minutes=300),
    )
    (row,) = query("from speedup where variant = 'separate'")
    assert (row["n_runs"], row["n_pairs"], row["n_sessions"]) == (5, 3, 2)
    assert row["speedup"] == pytest.approx(np.exp(np.mean(np.log([2, 3, 2]))))


def test_a_step_in_16_bits_is_not_compared_with_steps_in_8_bits(
    store: Callable[..., Query],
) -> None:
    narrow = {"precision": "e4m3"}
    query = store(
        gate("gate"),
        *runs("sdpa_flash", [100.0]),
        *runs("pytorch_best", [80.0], role="peer"),
        *runs("pytorch_best_fp8", [60.0], role="peer", **narrow),
        *runs("fused", [50.0]),
        *runs("fp8", [40.0], role="own", **narrow),
    )
    rows = {row["variant"]: row for row in query("from speedup")}
    assert {name for name, row in rows.items() if row["precision"]} == {"pytorch_best_fp8", "fp8"}
    best = {name: (row["best_pytorch_variant"], row["speedup_best"]) for name, row in rows.items()}
    assert best["fused"] == ("pytorch_best", pytest.approx(1.6))
    assert best["fp8"] == ("pytorch_best_fp8", pytest.approx(1.5))
    for said in ("leads", "fastest", "winner"):
        assert {name for name, row in rows.items() if row[said]} == {"fused", "fp8"}
    report = {
        file: query((SQL.parent / "report" / file).read_text().rstrip(";\n"))
        for file in ("10_headline.sql", "12_headline_8_bits.sql")
    }
    assert [row["variant"] for row in report["10_headline.sql"]] == ["fused"]
    (in_8_bits,) = report["12_headline_8_bits.sql"]
    assert in_8_bits["variant"] == "fp8"
    assert in_8_bits["products_in"] == "8 bits: less accurate a step, training not judged here"


def test_best_pytorch_is_the_fastest_with_any_switch(store: Callable[..., Query]) -> None:
    query = store(
        gate("gate"),
        *runs("sdpa_flash", [100.0]),
        *runs("sdpa_cudnn", [80.0], cuda_graph=True),
        *runs("sdpa_cudnn", [90.0]),
        *runs("separate", [40.0]),
        *runs("fused", [20.0]),
    )
    rows = {(row["variant"], row["cuda_graph"]): row for row in query("from speedup")}
    row = rows["separate", False]
    assert (row["best_pytorch_variant"], row["best_pytorch_step_ms"]) == ("sdpa_cudnn", 80)
    assert row["best_pytorch_cuda_graph"]
    assert (row["speedup"], row["speedup_best"]) == (pytest.approx(2.5), pytest.approx(2))
    assert rows["sdpa_cudnn", True]["speedup_best"] == 1


def test_the_best_is_the_fastest_though_it_may_not_count(store: Callable[..., Query]) -> None:
    """Ours is never called faster than "the best" because the best has no evidence."""
    same = {"environment_id": "GPU-1 2.13.0"}
    faster = {
        "settled": runs("sdpa_padded", [60.0], role="peer", settled=False),
        "cool": runs("sdpa_padded", [60.0], role="peer", throttled=True),
        "kept": [step("sdpa_padded", [60.0], role="peer", **same)],
        "slower": runs("sdpa_padded", [90.0], role="peer", settled=False),
    }
    for lack, parts in faster.items():
        query = store(
            gate("gate"),
            *runs("sdpa_flash", [100.0]),
            *runs("sdpa_cudnn", [80.0]),
            *runs("separate", [40.0]),
            *parts,
        )
        (row,) = query("from speedup where variant = 'separate'")
        best = "sdpa_cudnn" if lack == "slower" else "sdpa_padded"
        assert (row["best_pytorch_variant"], row["verdict"]) == (best, "faster"), lack
        assert row["verdict_best"] == ("faster" if lack == "slower" else None), lack
        ratio = {"slower": 2, "kept": 1.5}.get(lack)
        assert row["speedup_best"] == pytest.approx(ratio), lack


def test_other_devices_shapes_and_dtypes_are_not_compared(store: Callable[..., Query]) -> None:
    for column, value in (("device", "cpu"), ("n_context", 7), ("dtype", "float32")):
        query = store(step("sdpa_flash", [100.0]), step("separate", [50.0], **{column: value}))
        (row,) = query("from speedup where variant = 'separate'")
        assert (row["step_ms"], row["speedup"], row["verdict"]) == (50, None, None)


def test_a_failed_run_beside_good_ones_hides_nothing(store: Callable[..., Query]) -> None:
    query = store(
        *steps("sdpa_flash", 100),
        step("separate", [50.0]),
        step("separate", "oom", replicate=2),
    )
    (row,) = query("from step_summary where variant = 'separate'")
    assert (row["status"], row["step_ms"], row["n_runs"], row["n_failed"]) == ("ok", 50, 1, 1)
    (row,) = query("from speedup where variant = 'separate'")
    assert row["status"] == "ok" and row["speedup"] == pytest.approx(2, rel=0.02)


def test_what_failed_alone_is_listed_with_its_reason(store: Callable[..., Query]) -> None:
    query = store(*steps("sdpa_flash", 100), step("separate", "oom"))
    for view in ("speedup", "memory"):
        (row,) = query(f"from {view} where variant = 'separate'")
        assert (row["status"], row["reason"]) == ("oom", "because oom")
    (row,) = query("from speedup where variant = 'separate'")
    assert (row["step_ms"], row["speedup"], row["n_runs"]) == (None, None, 0)


def test_steps_from_before_evidence_have_a_ratio_and_no_verdict(
    store: Callable[..., Query],
) -> None:
    later = {"recorded_at": NOW + timedelta(hours=5)}
    query = store(
        *steps("sdpa_flash", 100),
        step("sdpa_cudnn", [80.0]),
        step("separate", [50.0], **later),  # in another session
    )
    (row,) = query("from speedup where variant = 'separate'")
    (flash,) = query("from speedup where variant = 'sdpa_flash'")
    assert row["speedup"] == pytest.approx(flash["step_ms"] / 50)
    assert (row["best_pytorch_variant"], row["speedup_best"]) == ("sdpa_cudnn", pytest.approx(1.6))
    names = ("speedup_low", "speedup_high", "q", "verdict", "n_pairs", "valid")
    assert [row[name] for name in names] == [None] * 6
    assert row["why_not"] == "recorded before evidence was kept"


def test_steps_of_different_sessions_have_a_ratio_and_no_verdict(
    store: Callable[..., Query],
) -> None:
    query = store(gate("gate"), *runs("sdpa_flash", [100.0]), *runs("separate", [50.0], minutes=40))
    (row,) = query("from speedup where variant = 'separate'")
    assert (row["valid"], row["step_ms"], row["speedup"]) == (True, 50, pytest.approx(2))
    names = ("speedup_low", "speedup_high", "q", "verdict", "n_pairs")
    assert [row[name] for name in names] == [None] * 5


def test_what_does_not_count_is_listed_and_not_compared(store: Callable[..., Query]) -> None:
    query = store(
        gate("gate"), *runs("sdpa_flash", [100.0]), *runs("separate", [50.0], settled=False)
    )
    (row,) = query("from speedup where variant = 'separate'")
    assert (row["valid"], row["step_ms"], row["speedup"]) == (False, 50, None)
    assert row["why_not"] == "the samples were not precise enough"
    query = store(
        gate("gate"),
        *runs("sdpa_flash", [100.0, 100.0]),
        *runs("separate", [50.0], settled=False),
        *runs("separate", [25.0], minutes=3),
    )
    (row,) = query("from speedup where variant = 'separate'")
    assert (row["valid"], row["step_ms"], row["n_runs"]) == (True, 25, 1)
    assert row["speedup"] == pytest.approx(4)


def test_a_note_in_reason_is_kept_and_makes_no_failure(store: Callable[..., Query]) -> None:
    query = store(
        step("sdpa_flash", [2.0], reason=""),
        step("sdpa_flash", [2.0], replicate=2, reason="did not settle"),
    )
    (row,) = query("from step_summary")
    assert (row["status"], row["step_ms"], row["reason"]) == ("ok", 2, "did not settle")


def test_mfu_is_of_the_matmul_ceiling_of_the_device(store: Callable[..., Query]) -> None:
    parts = [
        step("sdpa_flash", [time_ms], replicate=i, tflops=0.08 / time_ms * 1e3)
        for i, time_ms in ((1, 1.5), (2, 2.5))
    ]
    matmul = operator("torch", "matmul", time_ms_p50=10.0, flops=1e12, bytes=1e9)
    assert store(*parts, matmul)("select mfu from step_summary") == [{"mfu": 0.4}]
    assert store(*parts)("select mfu from step_summary") == [{"mfu": None}]


def test_work_that_was_skipped_and_counted_has_no_rate(store: Callable[..., Query]) -> None:
    for share, expected in ((1.0, None), (0.8, 0.8)):
        columns = {"flops": 2e9, "tflops": share, "gates": "baseline|skip_unread"}
        (row,) = store(step("fused", [2.0], **columns))("select tflops from step_summary")
        assert row["tflops"] == expected


def test_the_newest_generation_counts(store: Callable[..., Query]) -> None:
    later = {"recorded_at": NOW + timedelta(hours=1), "kernels_hash": "new"}
    query = store(
        step("sdpa_flash", [100.0]),
        step("sdpa_flash", [50.0, 60.0, 70.0], **later),
        step("sdpa_flash", [64.0], **later | {"recorded_at": NOW + timedelta(hours=2)}),
    )
    (row,) = query("from step_summary")
    assert (row["n_runs"], row["step_ms"]) == (2, 62)
    assert (row["step_ms_low"], row["step_ms_high"]) == (60, 64)
    query = store(step("sdpa_flash", [100.0]), step("sdpa_flash", "oom", **later))
    assert query("from step_summary")[0]["status"] == "oom"


def test_recorded_rows_that_are_also_in_runs_count_once(tmp_path: Path) -> None:
    files = [tmp_path / origin / "gpu" / "steps" / "a.parquet" for origin in ("recorded", "runs")]
    for file in files:
        write_table(file, "steps", step("sdpa_flash", [1.0])["steps"])
    build_database(files, SQL, tmp_path / "results.duckdb")
    with duckdb.connect(str(tmp_path / "results.duckdb"), read_only=True) as connection:
        assert connection.sql("select origin from current_steps").fetchall() == [("recorded",)]


def test_a_store_of_these_tests_is_one_that_is_built(
    store: Callable[..., Query], tmp_path: Path
) -> None:
    query = store(
        gate("gate"),
        *runs("sdpa_flash", [100.0, 101.0]),
        *runs("separate", [50.0, 50.6], minutes=9),
        run("operators", *(operator(name, time_ms_p50=1.0) for name in ("sdpa_flash", "fused"))),
        staged(step("sdpa_flash", [1.0]), {("attention", "forward"): 0.5}),
    )
    found = {view: query(f"from {view} order by all") for view in VIEWS}
    database = tmp_path / "results.duckdb"
    build_database(sorted(tmp_path.glob("runs/*/*/*.parquet")), SQL, database)
    with duckdb.connect(str(database), read_only=True) as connection:
        for view, rows in found.items():
            whole = connection.sql(f"from {view} order by all").to_arrow_table()
            assert whole.to_pylist() == rows, view
    assert len([view for view, rows in found.items() if rows]) > len(VIEWS) / 2


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


STAGE = {"source": "profiler", "n_kernels": 3}


def staged(part: Tables, times: dict[tuple[str, str], float], **columns: object) -> Tables:
    """A step and the times of its stages, by stage and pass."""
    identity = {name: part["steps"][0].get(name) for name in TABLES["stages"].names}
    rows = [
        identity | STAGE | {"stage": stage, "pass": pass_, "time_ms_p50": time} | columns
        for (stage, pass_), time in times.items()
    ]
    return part | {"stages": rows}


FORWARD, BACKWARD = ("attention", "forward"), ("attention", "backward")


def test_stage_shares_are_of_medians_and_sum_to_one(store: Callable[..., Query]) -> None:
    parts = [
        staged(
            step("sdpa_flash", [5 * scale], replicate=replicate),
            {FORWARD: 1.0 * scale, BACKWARD: 3.0 * scale},
        )
        for replicate, scale in ((1, 1.0), (2, 2.0), (3, 9.0))
    ]
    # A step of forward and backward alone would be a second bar of the same name.
    feasibility = {"config_id": "memory_feasibility", "optimizer": False}
    parts.append(staged(step("sdpa_flash", [4], replicate=3, **feasibility), {FORWARD: 1.0}))
    found = store(*parts)("from stage_share")
    assert {row["config_id"] for row in found} == {"mid--sdpa_flash"}
    rows = {(row["stage"], row["pass"]): row for row in found}
    assert {place: (row["time_ms"], row["share"]) for place, row in rows.items()} == {
        FORWARD: (2, 0.25),
        BACKWARD: (6, 0.75),
    }
    assert {(row["step_ms"], row["n_kernels"]) for row in found} == {(10, 3)}


def test_stages_that_hold_the_hosts_time_are_left_out(store: Callable[..., Query]) -> None:
    old = staged(step("separate", [4]), {("backward", None): 3.0}, source=None)
    query = store(old, staged(step("sdpa_flash", [4]), {FORWARD: 1.0}))
    assert [row["variant"] for row in query("from stage_share")] == ["sdpa_flash"]
    (day,) = query("from recording_days where view_name = 'stage_share'")
    assert "sdpa_flash" in day["comparison_key"]
    assert query("from stages where source is null")  # nothing that was recorded goes


def test_the_fastest_of_each_side_has_its_stages_marked(store: Callable[..., Query]) -> None:
    gpu = [gate("gate"), *runs("sdpa_cudnn", [8.0]), *runs("sdpa_flash", [9.0])]
    gpu += [*runs("fused", [5.0]), *runs("separate", [4.0], code=NEWER)]
    both = {FORWARD: 1.0, BACKWARD: 2.0}
    query = store(*(staged(part, both) if "steps" in part else part for part in gpu))
    found = query("select distinct variant, fastest, valid from stage_share")
    fastest = {row["variant"] for row in found if row["fastest"]}
    # `separate` takes less, of code that no gate has seen.
    assert fastest == {"sdpa_cudnn", "fused"}
    assert {row["variant"]: row["valid"] for row in found}["fused"] is True


NEWER = {"kernel": {"_kernel": "2"}, "module": {"tnp.model": "2"}}


def test_a_regression_is_against_what_did_not_change(store: Callable[..., Query]) -> None:
    """The second session is 10 % slower for all; `fused` became 20 % slower besides."""
    query = store(
        gate("gate"),
        gate("newer gate", code=NEWER),
        *runs("sdpa_flash", [100.0, 100.1, 100.2]),
        *runs("fused", [50.0, 50.1, 50.2]),
        *runs("separate", [60.0, 60.2, 60.1]),
        *runs("sdpa_flash", [110.0, 110.2, 110.1], minutes=90),
        *runs("fused", [66.0, 66.1, 66.2], minutes=90, code=NEWER),
        *runs("separate", [66.0, 66.2, 66.1], minutes=90, code=NEWER),
    )
    rows = {row["name"]: row for row in query("from regressions")}
    assert set(rows) == {"fused", "separate"}
    fused, separate = rows["fused"], rows["separate"]
    assert (fused["verdict"], fused["ratio"]) == ("slower", pytest.approx(1 / 1.2, rel=0.005))
    assert (fused["previous_time_ms"], fused["time_ms"]) == pytest.approx((50.1, 66.1))
    assert "sdpa_flash" in fused["control"]
    assert separate["ratio"] == pytest.approx(1, rel=0.005)
    assert separate["verdict"] in ("same", "ambiguous")
    # Both intervals are as uncertain as two contrasts together.
    (old,) = query(
        "from contrasts where own = '{}' and against_baseline".format(fused["code_version"])
    )
    width = np.log(fused["high"] / fused["low"])
    assert width == pytest.approx(np.sqrt(2) * np.log(old["high"] / old["low"]), rel=0.02)


def test_a_regression_without_a_control_has_no_verdict(store: Callable[..., Query]) -> None:
    query = store(
        gate("gate"),
        gate("newer gate", code=NEWER),
        *runs("sdpa_flash", [100.0]),
        *runs("fused", [50.0]),
        *runs("fused", [66.0], minutes=90, code=NEWER),
    )
    (row,) = query("from regressions")
    assert (row["control"], row["ratio"], row["verdict"]) == (None, None, None)
    assert (row["previous_time_ms"], row["time_ms"]) == pytest.approx((50, 66))


def test_runs_of_two_generations_are_never_pooled(store: Callable[..., Query]) -> None:
    query = store(
        gate("gate"),
        gate("newer gate", code=NEWER),
        *runs("sdpa_flash", [100.0]),
        *runs("fused", [50.0]),
        *runs("sdpa_flash", [100.0], minutes=90),
        *runs("fused", [25.0], minutes=90, code=NEWER),
    )
    (row,) = query("from speedup where variant = 'fused'")
    assert (row["n_runs"], row["n_pairs"], row["speedup"]) == (1, 1, pytest.approx(4))
