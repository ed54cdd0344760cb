"""The views' numbers, against values computed by hand from rows written by the store."""

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import count, product
from pathlib import Path

import duckdb
import numpy as np
import pytest

from tnp.gates import GATES, gates_for
from tnp.ops import auto, registry
from tnp.schemas import TABLES
from tnp.store import build_database, write_table

SQL = Path(__file__).parents[1] / "workflow" / "sql"
VIEWS = sorted(path.stem for path in SQL.glob("*.sql"))
NOW = datetime(2026, 2, 1, 10, 0, tzinfo=UTC)
PROVENANCE = {"device": "gpu", "environment_id": "e", "recorded_at": NOW}
SIZES = {"shape": "mid", "batch": 4, "n_context": 100, "n_target": 10, "dtype": "bfloat16"}

Row = dict[str, object]
Tables = dict[str, list[Row]]
Query = Callable[[str], list[Row]]


@pytest.fixture
def store(tmp_path: Path) -> Callable[..., Query]:
    """Builds a database from tables and returns a function from SQL to rows."""

    def build(*parts: Tables, origin: str = "runs") -> Query:
        folder, files, numbers = tmp_path / origin / "gpu", [], count()
        for tables in parts:
            for table, rows in tables.items():
                files.append(folder / table / f"{next(numbers)}.parquet")
                write_table(files[-1], table, rows)
        build_database(files, SQL, tmp_path / "results.duckdb")

        def query(sql: str) -> list[Row]:
            with duckdb.connect(str(tmp_path / "results.duckdb"), read_only=True) as connection:
                return connection.sql(sql).to_arrow_table().to_pylist()

        return query

    return build


def step(
    variant: str,
    times: list[float] | str,
    *,
    replicate: int = 1,
    checkpoint: bool = False,
    cuda_graph: bool = False,
    **columns: object,
) -> Tables:
    """One replicate of a step, from its timings in ms or the status it failed with."""
    config_id = f"mid--{variant}" + "--ckpt" * checkpoint + "--graph" * cuda_graph
    identity = PROVENANCE | {"config_id": config_id, "replicate": replicate}
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
    """Three replicates around `median_ms`, of nine timings each, `spread` apart."""
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


def test_a_failed_replicate_fails_the_configuration(store: Callable[..., Query]) -> None:
    query = store(
        *steps("sdpa_flash", 100),
        step("separate", [50.0]),
        step("separate", "oom", replicate=2),
    )
    (row,) = query("from step_summary where variant = 'separate'")
    assert (row["status"], row["reason"], row["step_ms"]) == ("oom", "because oom", None)
    assert row["step_ms_low"] is None and row["n_replicates"] == 2
    (row,) = query("from speedup where variant = 'separate'")
    assert row["status"] == "oom" and row["speedup"] is None and not row["win"]
    (row,) = query("from memory where variant = 'separate'")
    assert row["status"] == "oom" and row["peak_memory_gib"] is None


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


def test_the_last_measurement_counts(store: Callable[..., Query]) -> None:
    later = {"recorded_at": NOW + timedelta(hours=1)}
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


def test_roofline_takes_the_lower_ceiling(store: Callable[..., Query]) -> None:
    # Ceilings: 100 TFLOP/s and 1000 GB/s, so the ridge is at 100 FLOP/byte.
    ceilings = [
        operator("torch", "matmul", time_ms_p50=10.0, flops=1e12, bytes=1e9),
        operator("torch", "copy", time_ms_p50=1.0, bytes=1e9),
    ]
    compute = operator("separate", time_ms_p50=20.0, flops=1e12, bytes=1e9)
    memory = operator("sdpa_flash", time_ms_p50=4.0, flops=1e10, bytes=1e9)
    failed = operator("sdpa_cudnn", status="timeout")
    query = store(*ceilings, compute, memory, failed)
    rows = {row["implementation"]: row for row in query("from roofline where op = 'attention'")}
    names = ("bound", "roofline_tflops", "tflops", "share_of_roofline", "intensity")
    assert [rows["separate"][name] for name in names] == ["compute", 100, 50, 0.5, 1000]
    assert [rows["sdpa_flash"][name] for name in names] == ["memory", 10, 2.5, 0.25, 10]
    assert [rows["sdpa_cudnn"][name] for name in names] == [None] * 5
    assert rows["sdpa_cudnn"]["status"] == "timeout"
    (copy,) = query("from roofline where op = 'copy'")
    assert (copy["share_of_roofline"], copy["bound"]) == (1, "memory")

    query = store(compute, memory)
    (row,) = query("from roofline where implementation = 'separate'")
    assert (row["tflops"], row["bound"], row["share_of_roofline"]) == (50, None, None)


def test_operators_are_compared_with_the_best_peer(store: Callable[..., Query]) -> None:
    query = store(
        operator("sdpa_flash", time_ms_p50=4.0),
        operator("sdpa_cudnn", time_ms_p50=3.5),
        operator("fa4", time_ms_p50=3.0),
        operator("fa3", status="unsupported"),
        operator("separate", time_ms_p50=2.0),
        operator("fused", time_ms_p50=1.0),  # ours too, so nobody's peer
        operator("torch", "matmul", time_ms_p50=1.0),
    )
    rows = {row["implementation"]: row for row in query("from operator_speedup")}
    assert set(rows) == {"sdpa_flash", "sdpa_cudnn", "fa3", "fa4", "separate", "fused"}
    assert (rows["separate"]["speedup"], rows["separate"]["speedup_best"]) == (2, 1.5)
    assert rows["separate"]["best_peer_implementation"] == "fa4"
    assert rows["separate"]["speedup_low"] == rows["separate"]["speedup_high"] == 2
    assert {name for name, row in rows.items() if row["own"]} == {"separate", "fused"}
    assert rows["fa3"]["speedup_best"] is None


def test_a_later_run_without_the_peers_is_for_auto_alone(store: Callable[..., Query]) -> None:
    later = {"recorded_at": NOW + timedelta(hours=1)}
    chosen = {"launch_config": json.dumps({"implementation": "fused", "source": "nearest"})}
    query = store(
        both_passes("sdpa_flash", "attention", 4.0, 4.0),
        both_passes("fa4", "attention", 1.5, 1.5),
        both_passes("fused", "attention", 1.0, 1.0),
        both_passes("sdpa_flash", "attention", 5.0, 5.0, **later),
        operator("fa4", status="unsupported", **later),
        both_passes("fused", "attention", 2.0, 2.0, **later),
        both_passes("auto", "attention", 2.0, 2.2, **later, **chosen),
    )
    (row,) = query("from operator_speedup where implementation = 'fused' and pass = 'forward'")
    assert (row["best_peer_implementation"], row["time_ms"], row["speedup_best"]) == ("fa4", 1, 1.5)
    (row,) = query("from auto_regret")
    assert (row["best_time_ms"], row["regret"]) == (4.0, pytest.approx(0.05))

    last = {"recorded_at": NOW + timedelta(hours=2)}
    query = store(
        both_passes("fused", "attention", 2.0, 2.0, **later),
        both_passes("auto", "attention", 2.0, 2.2, **later, **chosen),
        both_passes("fused", "attention", 9.0, 9.0, **last),
    )
    (row,) = query("from auto_regret")
    assert (row["best_time_ms"], row["regret"]) == (4.0, pytest.approx(0.05))


def test_a_run_that_failed_takes_the_place_of_an_earlier_one(store: Callable[..., Query]) -> None:
    later = {"recorded_at": NOW + timedelta(hours=1)}
    query = store(
        operator("sdpa_flash", time_ms_p50=4.0),
        operator("fused", time_ms_p50=1.0),
        operator("sdpa_flash", time_ms_p50=4.0, **later),
        operator("fused", status="gate_failed", **later),
    )
    (row,) = query("from operator_speedup where implementation = 'fused'")
    assert (row["status"], row["time_ms"]) == ("gate_failed", None)


def test_other_operators_are_compared_with_pytorchs_plain_form(
    store: Callable[..., Query],
) -> None:
    query = store(
        operator("torch", "copy", time_ms_p50=1.0, bytes=1e9),
        operator("torch", "matmul", time_ms_p50=10.0, flops=1e12, bytes=1e9),
        operator("torch", "rms_norm", time_ms_p50=3.0, bytes=1e9, d_model=512),
        operator("fused", "rms_norm", time_ms_p50=1.25, bytes=1e9, d_model=512),
        operator("torch", "mlp", time_ms_p50=4.0, flops=1e12, bytes=1e9),
        operator("compiled", "mlp", time_ms_p50=3.0, flops=1e12, bytes=1e9),
        operator("single", "mlp", time_ms_p50=2.0, flops=1e12, bytes=1e9),
    )
    rows = {(row["op"], row["implementation"]): row for row in query("from operator_speedup")}
    assert len(rows) == 5
    norm, mlp = rows["rms_norm", "fused"], rows["mlp", "single"]
    assert (norm["speedup"], norm["speedup_best"], norm["d_model"]) == (2.4, 2.4, 512)
    assert (mlp["speedup"], mlp["speedup_best"]) == (2, 1.5)
    assert mlp["best_peer_implementation"] == "compiled"
    (norm,) = query("from roofline where op = 'rms_norm' and own")
    assert (norm["bound"], norm["share_of_roofline"], norm["tflops"]) == ("memory", 0.8, None)


def test_operators_are_compared_within_one_run(store: Callable[..., Query]) -> None:
    at = [{"recorded_at": NOW + timedelta(hours=i)} for i in range(3)]
    query = store(
        *(operator("sdpa_flash", time_ms_p50=4.0, replicate=i, **at[i]) for i in (0, 1)),
        *(operator("separate", time_ms_p50=2.0, replicate=i, **at[i]) for i in (0, 1)),
        operator("fa4", time_ms_p50=3.0, replicate=0, **at[0]),
        operator("fa4", time_ms_p50=3.0, replicate=1, **at[2]),  # on its own, later
    )
    rows = {row["implementation"]: row for row in query("from operator_speedup")}
    assert rows["separate"]["best_peer_implementation"] == "sdpa_flash"
    assert (rows["separate"]["speedup"], rows["separate"]["speedup_best"]) == (2, 2)
    assert (rows["fa4"]["speedup"], rows["fa4"]["speedup_best"]) == (None, 1)


def test_the_candidates_of_auto_are_the_registrys(store: Callable[..., Query]) -> None:
    rows = store()("from auto_candidates order by op, rank")
    expected = [
        {"op": op, "implementation": name, "rank": rank}
        for op, names in sorted(registry.CANDIDATES.items())
        for rank, name in enumerate(names, 1)
    ]
    assert rows == expected


def both_passes(implementation: str, op: str, forward: float, backward: float, **columns) -> Tables:
    """Of a backward without a time, the failure."""
    parts = [
        operator(implementation, op, **columns | {"pass": pass_}, time_ms_p50=time)
        if time
        else operator(implementation, op, "oom", **columns | {"pass": pass_})
        for pass_, time in (("forward", forward), ("backward", backward))
    ]
    return {table: [row for part in parts for row in part[table]] for table in parts[0]}


SIZES_OF_MLP = {"batch": 4, "n_q": 110, "d_model": 512, "d_ff": 1365, "d_ff_storage": 1408}


def test_the_fastest_candidate_is_chosen_and_pytorch_stays_within_one_percent(
    store: Callable[..., Query],
) -> None:
    near = SIZES_OF_MLP | {"shape": "near", "config_id": "near"}
    query = store(
        {"environments": [PROVENANCE | {"compute_capability": "9.0"}] * 2},
        both_passes("torch", "mlp", 2.0, 4.0, **SIZES_OF_MLP),
        both_passes("single", "mlp", 1.0, 0.0, **SIZES_OF_MLP),  # without a backward
        both_passes("fused", "mlp", 1.5, 4.0, **SIZES_OF_MLP),
        both_passes("compiled", "mlp", 1.0, 1.0, **SIZES_OF_MLP),  # no candidate
        both_passes("auto", "mlp", 1.0, 1.0, **SIZES_OF_MLP),
        both_passes("torch", "mlp", 1.0, 2.0, **near | {"config_id": "near-torch"}),
        both_passes("fused", "mlp", 1.0, 1.98, **near | {"config_id": "near-fused"}),
        # The backward alone is forward and backward.
        both_passes("torch", "mixture_nll", 1.0, 3.0, batch=4, n_q=10, n_components=10),
        both_passes("fused", "mixture_nll", 2.5, 2.5, batch=4, n_q=10, n_components=10),
        operator("torch", "matmul", time_ms_p50=1.0),
    )
    rows = {(row["op"], row["shape"]): row for row in query("from operator_choice")}
    expected = {
        ("mlp", "mid"): ("fused", 5.5, "fused", 5.5, 2),
        ("mlp", "near"): ("torch", 3.0, "fused", 2.98, 2),
        ("mixture_nll", "mid"): ("fused", 2.5, "fused", 2.5, 2),
    }
    names = ("implementation", "time_ms", "best_implementation", "best_time_ms", "n_candidates")
    assert {key: tuple(row[name] for name in names) for key, row in rows.items()} == expected
    assert auto.entry_of(rows["mlp", "mid"], rows["mlp", "mid"]["capability"], "fused") == {
        "op": "mlp",
        "capability": 90,
        "dtype": "bfloat16",
        "sizes": {"rows": 440, "d_model": 512, "d_ff": 1408},
        "implementation": "fused",
    }


def test_what_the_table_and_the_view_choose_is_the_same(store: Callable[..., Query]) -> None:
    generator = np.random.default_rng(0)
    parts, expected = [], {}
    for shape in map(str, range(20)):
        times = {
            name: tuple(generator.uniform(1.0, 1.02, 2)) for name in registry.CANDIDATES["mlp"]
        }
        for name, passes in times.items():
            columns = {"shape": shape, "config_id": f"{shape}-{name}"}
            parts.append(both_passes(name, "mlp", *passes, **columns))
        whole = {name: auto.training_ms("mlp", *passes) for name, passes in times.items()}
        expected[shape] = auto.fastest("mlp", whole)
    rows = store(*parts)("from operator_choice")
    assert {row["shape"]: row["implementation"] for row in rows} == expected
    assert len(set(expected.values())) > 1


def test_regret_is_against_the_best_that_auto_could_choose(store: Callable[..., Query]) -> None:
    def chose(name: str, source: str) -> dict:
        return {"launch_config": json.dumps({"implementation": name, "source": source})}

    odd = {"shape": "odd"}
    query = store(
        both_passes("sdpa_flash", "attention", 2.0, 6.0),
        both_passes("fused", "attention", 1.0, 3.0),
        both_passes("fa4", "attention", 0.5, 1.0),  # a peer: no candidate
        both_passes("auto", "attention", 1.0, 3.2, **chose("fused", "tuned")),
        both_passes("sdpa_flash", "attention", 1.0, 3.0, **odd | {"config_id": "odd-flash"}),
        both_passes("fused", "attention", 1.5, 3.5, **odd | {"config_id": "odd-fused"}),
        both_passes(
            "auto", "attention", 1.5, 3.7, **odd | {"config_id": "o"} | chose("fused", "nearest")
        ),
        both_passes("auto", "mlp", 1.0, 0.0, **chose("fused", "nearest")),
    )
    rows = {(row["op"], row["shape"]): row for row in query("from auto_regret")}
    mid, odd = rows["attention", "mid"], rows["attention", "odd"]
    assert (mid["chosen"], mid["source"], mid["tuned_on"]) == ("fused", "tuned", True)
    assert (mid["best_implementation"], mid["best_time_ms"]) == ("fused", 4.0)
    assert mid["regret"] == pytest.approx(0.05) and mid["regret_of_choice"] == 0
    assert (odd["best_implementation"], odd["tuned_on"]) == ("sdpa_flash", False)
    assert odd["regret"] == pytest.approx(0.3) and odd["regret_of_choice"] == 0.25
    assert rows["mlp", "mid"]["regret"] is None
    # It is one of the others, so it is compared with none of them elsewhere.
    assert query("from operator_speedup where implementation = 'auto'") == []


def check(gate: str, name: str, value: float | None, bound: float | None, **columns) -> Tables:
    row = PROVENANCE | {"gate": gate, "phase": 2, "implementation": "", "check": name}
    row |= {"metric": "error", "value": value, "bound": bound, "mode": "gpu", "status": "ok"}
    return {"gates": [row | columns]}


def test_gate_status_counts_and_names_the_worst_check(store: Callable[..., Query]) -> None:
    query = store(
        check("attention_forward", "near", 0.9, 1.0, passed=True),
        check("attention_forward", "cosine", 0.999, 0.99, passed=True),
        check("attention_forward", "exact", 0.0, 0.0, passed=True),
        check("attention_forward", "far", 3.0, 1.0, passed=False, implementation="separate"),
        check("attention_forward", "skipped", None, None, status="unsupported"),
        check("baseline", "near", 0.5, 1.0, passed=True),
        check("kernels", "all", None, None, status="unsupported"),
        check("cuda_graphs", "cosine", 0.9, 0.99, passed=False),
        step("separate", "gate_failed", reason="gate attention_forward is red: all kernels: 3"),
        step("sdpa_flash", "oom", reason="attention_forward ran out of memory"),
    )
    rows = {row["gate"]: row for row in query("from gate_status")}
    names = ("n_checks", "n_failed", "n_skipped", "passed", "worst_check", "blocked_benchmarks")
    expected = {
        "attention_forward": [5, 1, 1, False, "far", 1],
        "baseline": [1, 0, 0, True, "near", 0],
        "kernels": [1, 0, 1, None, None, 0],
        "cuda_graphs": [1, 1, 0, False, "cosine", 0],
    }
    assert {gate: [row[name] for name in names] for gate, row in rows.items()} == expected
    assert rows["attention_forward"]["worst_value_over_bound"] == 3
    assert rows["cuda_graphs"]["worst_value_over_bound"] == pytest.approx(1.1)


def test_a_red_check_of_one_implementation_marks_its_variants(store: Callable[..., Query]) -> None:
    query = store(
        check("baseline", "far", 3.0, 1.0, passed=False, implementation="separate"),
        check("baseline", "near", 0.1, 1.0, passed=True, implementation="sdpa_flash"),
        *(step(name, [1.0]) for name in ("sdpa_flash", "separate", "separate_compiled", "triton")),
    )
    rows = query("select variant, gate_passed from speedup order by variant")
    assert [row["gate_passed"] for row in rows] == [True, False, False, None]


def test_a_red_gate_marks_the_steps_that_wait_for_it(store: Callable[..., Query]) -> None:
    variants = [{"attention": name} for name in ("sdpa_flash", "separate", "fused")]
    variants += [{"attention": "sdpa_cudnn", "mlp": "fused", "rms_norm": "torch"}]
    variants += [dict.fromkeys(registry.CANDIDATES, "auto")]
    parts, expected = [], {}
    for gate in GATES:  # red alone, on a device of its name
        parts.append(check(gate, "far", 3.0, 1.0, passed=False, device=gate))
        for number, (operators, *switches) in enumerate(
            product(variants, (False, True), (False, True), (False, True))
        ):
            gates = gates_for(operators, *switches)
            uses = {"operators": json.dumps(operators), "gates": "|".join(gates)}
            parts.append(step(f"v{number}", [1.0], device=gate, **uses))
            expected[gate, f"v{number}"] = False if gate in gates else None
    rows = store(*parts)("select device, variant, gate_passed from speedup")
    assert {(row["device"], row["variant"]): row["gate_passed"] for row in rows} == expected


def test_a_red_check_marks_steps_that_use_its_implementation_of_the_gates_operator(
    store: Callable[..., Query],
) -> None:
    def variant(name: str, **operators: str) -> Tables:
        uses = {"gates": "|".join(gates_for(operators)), "operators": json.dumps(operators)}
        return step(name, [1.0], **uses)

    heads = {"op": "mixture_heads"}
    query = store(
        check("mlp", "far", 3.0, 1.0, passed=False, implementation="fused", op="mlp"),
        check("mlp", "near", 0.1, 1.0, passed=True, implementation="single", op="mlp"),
        check("baseline", "far", 3.0, 1.0, passed=False, implementation="separate"),  # no `op` yet
        check("baseline", "near", 0.1, 1.0, passed=True, op="attention"),
        variant("fused_mlp", attention="sdpa_flash", mlp="fused"),
        variant("single_mlp", attention="sdpa_flash", mlp="single"),
        variant("fused", attention="fused", mlp="torch"),
        variant("separate", attention="separate"),
        variant("auto_mlp", attention="sdpa_flash", mlp="auto"),
        check("mixture_heads", "far", 3.0, 1.0, passed=False, implementation="loop", **heads),
        check("mixture_heads", "near", 0.1, 1.0, passed=True, implementation="bmm", **heads),
        variant("auto_heads", attention="sdpa_flash", mixture_heads="auto"),
    )
    rows = query("select variant, gate_passed from speedup")
    assert {row["variant"]: row["gate_passed"] for row in rows} == {
        "fused_mlp": False,
        "single_mlp": True,
        "fused": True,
        "separate": False,
        "auto_mlp": False,  # it may choose `fused`
        "auto_heads": True,  # it never chooses `loop`
    }


def test_rows_without_gates_say_by_their_variants_name_what_they_wait_for(
    store: Callable[..., Query],
) -> None:
    parts, expected = [], {}
    gates = ("attention_forward", "attention_backward", "attention_fused", "checkpointing")
    for gate in (*gates, "baseline", "cuda_graphs", "kernels", "mlp"):
        parts.append(check(gate, "far", 3.0, 1.0, passed=False, device=gate))
        for attention, *switches in product(
            ("sdpa_flash", "separate", "fused"), (False, True), (False, True)
        ):
            checkpoint, cuda_graph = switches
            parts.append(
                step(attention, [1.0], checkpoint=checkpoint, cuda_graph=cuda_graph, device=gate)
            )
            waits = gate in gates_for({"attention": attention}, checkpoint, cuda_graph)
            expected[gate, attention, checkpoint, cuda_graph] = False if waits else None
    rows = store(*parts)("select device, variant, checkpoint, cuda_graph, gate_passed from speedup")
    assert {tuple(row.values())[:4]: row["gate_passed"] for row in rows} == expected


def ablated(variant: str, times: list[float] | str, **columns: object) -> Tables:
    return step(variant, times, study="ablation", **columns)


def test_ablation_compares_each_component_both_ways(store: Callable[..., Query]) -> None:
    mlp = {"operators": json.dumps({"mlp": "fused"}), "gates": "baseline|mlp"}
    query = store(
        ablated("sdpa_cudnn_padded", [10.0], gates="baseline"),
        ablated("only_mlp", [8.0], **mlp),
        ablated("without_mlp", [5.5]),
        ablated("fused", [4.0]),
        ablated("only_rms_norm", [9.0]),
        ablated("without_rms_norm", "oom"),
        check("mlp", "far", 3.0, 1.0, passed=False, implementation="fused", op="mlp"),
    )
    rows = {row["component"]: row for row in query("from ablation")}
    assert set(rows) == {"mlp", "rms_norm"}
    names = ("base_ms", "only_ms", "full_ms", "without_ms", "gain_alone_ms", "gain_last_ms")
    assert [rows["mlp"][name] for name in names] == [10, 8, 4, 5.5, 2, 1.5]
    names = ("speedup_alone", "speedup_last", "gain_alone_low_ms", "gain_last_high_ms")
    assert [rows["mlp"][name] for name in names] == [1.25, 1.375, 2, 1.5]
    names = ("base_variant", "full_variant", "status", "gates_passed")
    assert [rows["mlp"][name] for name in names] == ["sdpa_cudnn_padded", "fused", "ok", False]
    failed = rows["rms_norm"]
    assert (failed["gain_alone_ms"], failed["gain_last_ms"]) == (1, None)
    assert (failed["status"], failed["reason"]) == ("oom", "because oom")
    assert failed["gates_passed"] is None


def test_ablation_keeps_shapes_and_devices_apart(store: Callable[..., Query]) -> None:
    def four(scale: float, **where: object) -> list[Tables]:
        times = {"sdpa_flash": 10.0, "only_mlp": 8.0, "without_mlp": 6.0, "fused": 5.0}
        prefix = "-".join(map(str, where.values()))
        return [
            ablated(name, [time * scale], config_id=f"{prefix}{name}", **where)
            for name, time in times.items()
        ]

    def with_samples(part: Tables) -> Tables:
        config_id = part["steps"][0]["config_id"]
        return part | {"samples": [row | {"config_id": config_id} for row in part["samples"]]}

    parts = [*four(1.0), *four(2.0, shape="small"), *four(3.0, device="other")]
    query = store(*map(with_samples, parts))
    rows = {(row["device"], row["shape"]): row for row in query("from ablation")}
    gains = {where: row["gain_alone_ms"] for where, row in rows.items()}
    assert gains == {("gpu", "mid"): 2, ("gpu", "small"): 4, ("other", "mid"): 6}
    assert rows["other", "mid"]["gain_last_low_ms"] == 3


def test_the_ablations_steps_are_in_no_other_comparison(store: Callable[..., Query]) -> None:
    part = ablated("only_mlp", [1.0])
    part["stages"] = [
        {name: value for name, value in part["steps"][0].items() if name in TABLES["stages"].names}
        | {"stage": "mlp", "time_ms_p50": 1.0}
    ]
    query = store(step("sdpa_flash", [2.0]), part)
    for view in ("speedup", "memory", "matrix"):
        assert [row["variant"] for row in query(f"from {view}")] == ["sdpa_flash"]
    assert query("from stage_share") == []
    assert len(query("from step_summary")) == 2


def training_run(run: str, losses: list[float], **columns: object) -> Tables:
    """Logged every 50 steps."""
    row = PROVENANCE | {"config_id": run, "run": run, "variant": run, "seed": 0, "batch": 64}
    row |= {"learning_rate": 1e-4}
    row |= {"source": "gaussian_process", "n_context": 64, "n_target": 500, "dtype": "bfloat16"}
    rows = [row | {"step": 50 * (i + 1), "loss": loss} for i, loss in enumerate(losses)]
    return {"training": [row | columns for row in rows]}


def test_training_is_equivalent_within_the_margin_of_the_null_pair(
    store: Callable[..., Query],
) -> None:
    noise = np.random.default_rng(0).normal(0, 0.01, 20)
    loss = np.linspace(2.0, 1.0, 20)
    warmed_up_otherwise = training_run("gp_small_warm", list(loss))
    warmed_up_otherwise["training"][0]["learning_rate"] = 5e-5
    query = store(
        training_run("gp_small_sdpa", list(loss)),
        training_run("gp_small_flash", list(loss + 0.005)),  # so the margin is 0.015
        training_run("gp_small_fused", list(loss + noise)),
        training_run("gp_small_worse", list(loss + 0.04 + noise)),
        training_run("gp_small_other", list(loss), seed=1),
        training_run("gp_small_faster", list(loss), learning_rate=3e-4),
        warmed_up_otherwise,
    )
    rows = {row["run"]: row for row in query("from training_equivalence")}
    assert set(rows) == {"gp_small_flash", "gp_small_fused", "gp_small_worse"}
    fused, last = rows["gp_small_fused"], noise[10:]
    assert (fused["n_rows"], fused["first_step"], fused["last_step"]) == (10, 550, 1000)
    assert fused["margin"] == pytest.approx(0.015)
    assert fused["mean_difference"] == pytest.approx(last.mean())
    error = last.std(ddof=1) / np.sqrt(10)
    assert fused["standard_error"] == pytest.approx(error)
    assert fused["difference_high"] == pytest.approx(last.mean() + 1.833 * error, abs=1e-5)
    assert fused["equivalent"] is True and rows["gp_small_worse"]["equivalent"] is False
    null_pair = rows["gp_small_flash"]
    assert null_pair["is_null_pair"] and null_pair["equivalent"] is None


def test_training_is_not_compared_where_pytorch_differs_from_itself(
    store: Callable[..., Query],
) -> None:
    query = store(
        training_run("gp_small_sdpa", [-0.69] * 20),
        training_run("gp_small_flash", [-0.55] * 20),
        training_run("gp_small_fused", [-0.69] * 20),
    )
    for row in query("from training_equivalence"):
        assert (row["margin"], row["equivalent"]) == (None, None)


def test_training_without_a_null_pair_has_the_least_margin(store: Callable[..., Query]) -> None:
    query = store(
        training_run("gp_small_sdpa", [2.0, 1.5, 1.0, 0.9]),
        training_run("gp_small_fused", [2.0, 1.5, 1.0, 0.9]),
        training_run("gp_small_short", [2.0]),  # one difference has no interval
    )
    (row,) = query("from training_equivalence")
    assert (row["margin"], row["n_rows"], row["equivalent"]) == (0.01, 2, True)


def test_a_check_the_gate_no_longer_makes_is_gone(store: Callable[..., Query]) -> None:
    later = {"recorded_at": NOW + timedelta(hours=1)}
    query = store(
        check("baseline", "old", 3.0, 1.0, passed=False),
        check("baseline", "new", 0.5, 1.0, passed=True, **later),
        check("baseline", "new", 0.9999, 0.999, passed=True, metric="cosine", **later),
    )
    assert len(query("from current_gates")) == 2
    (gate,) = query("from gate_status")
    assert gate["passed"] is True
    assert gate["worst_value_over_bound"] == 0.5  # of the cosine 0.1: it misses 1 by 1e-4


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


def test_gap_closed_runs_from_prior_to_exact(store: Callable[..., Query]) -> None:
    row = PROVENANCE | {"run": "gp", "step": 100, "heldout_log_likelihood": 0.5}
    row |= {"prior_log_likelihood": -1.0, "exact_log_likelihood": 1.0}
    images = row | {"run": "images", "exact_log_likelihood": None}
    later = {"recorded_at": NOW + timedelta(hours=1)}
    query = store(
        {"training": [row | {"step": 900}, images]},
        {"training": [row | later, row | later | {"step": 200, "heldout_log_likelihood": 1.0}]},
    )
    rows = query("select run, step, gap_closed from training_curves order by all")
    assert [tuple(row.values()) for row in rows] == [
        ("gp", 100, 0.75),
        ("gp", 200, 1.0),
        ("images", 100, None),
    ]


def test_environment_summary_has_the_latest_of_each(store: Callable[..., Query]) -> None:
    row = PROVENANCE | {"device_name": "GPU", "git_commit": "a"}
    later = row | {"recorded_at": NOW + timedelta(days=1), "git_commit": "b"}
    (found,) = store({"environments": [row, later]})("from environment_summary")
    assert (found["n_measurements"], found["git_commit"]) == (2, "b")
    assert (found["first_recorded_at"], found["last_recorded_at"]) == (NOW, later["recorded_at"])
