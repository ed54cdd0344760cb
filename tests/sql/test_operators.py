"""Views of operators: roofline and speedup; by values computed by hand."""

import json
import math
from collections.abc import Callable
from datetime import timedelta

import pytest

from tests.sql.conftest import (
    CODE,
    NOW,
    SIZES_OF_MLP,
    Query,
    Tables,
    both_passes,
    gate,
    one,
    operator,
    run,
    step,
)


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
    (copy,) = query("from roofline where op = 'ceiling_copy'")
    assert (copy["share_of_roofline"], copy["bound"]) == (1, "memory")

    query = store(compute, memory)
    (row,) = query("from roofline where implementation = 'separate'")
    assert (row["tflops"], row["bound"], row["share_of_roofline"]) == (50, None, None)


def test_what_only_reads_is_held_against_a_read(store: Callable[..., Query]) -> None:
    reading = {"time_ms_p50": 2.0, "bytes": 1e9, "bytes_written": 1e6}
    copying = operator("fused", time_ms_p50=2.0, bytes=1e9, bytes_written=5e8)
    earlier = operator("separate", time_ms_p50=2.0, bytes=1e9)
    ceilings = [
        operator("torch", "ceiling_matmul", time_ms_p50=1.0, flops=1e12, bytes=1e6),
        operator("torch", "ceiling_copy", time_ms_p50=1.0, bytes=1e9),
    ]
    read = operator("torch", "ceiling_read", time_ms_p50=0.5, bytes=1e9, bytes_written=1e3)
    parts = [operator("sdpa_flash", **reading), copying, earlier, *ceilings]
    shares = "select implementation, share_of_roofline from roofline where op = 'attention'"
    of = {row["implementation"]: row["share_of_roofline"] for row in store(*parts, read)(shares)}
    assert of == {"sdpa_flash": 0.25, "fused": 0.5, "separate": 0.5}
    of = {row["implementation"]: row["share_of_roofline"] for row in store(*parts)(shares)}
    assert of == {"sdpa_flash": 0.5, "fused": 0.5, "separate": 0.5}


def test_products_are_held_against_those_in_their_own_format(store: Callable[..., Query]) -> None:
    matmuls = [
        operator(
            "torch", "ceiling_matmul", dtype=dtype, config_id=dtype, flops=flops, bytes=1e6,
            time_ms_p50=1.0,
        )
        for dtype, flops in (("bfloat16", 1e12), ("e4m3", 2e12))
    ]  # fmt: skip
    copy = operator("torch", "ceiling_copy", time_ms_p50=1.0, bytes=1e9)
    work = {"time_ms_p50": 4.0, "flops": 1e12, "bytes": 1e6}
    parts = [
        operator("fused", **work),
        operator("e4m3", precision="e4m3", **work),
        operator("int", precision="int8", **work),  # of which there is no ceiling here
        operator("half", dtype="float16", **work),
    ]
    query = store(*matmuls, copy, *parts)
    rows = query("from roofline where op = 'attention'")
    of = {row["implementation"]: row["share_of_roofline"] for row in rows}
    assert of == {"fused": 0.25, "e4m3": 0.125, "int": 0.25, "half": 0.25}
    assert one(query, "from ceilings")["ceiling_tflops"] == 1000
    assert len(query("from roofline where op = 'ceiling_matmul'")) == 2


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
    assert (rows["separate"]["speedup"], rows["separate"]["speedup_best"]) == (
        pytest.approx(2),
        pytest.approx(1.5),
    )
    assert rows["separate"]["best_peer_implementation"] == "fa4"
    assert (rows["separate"]["speedup_low"], rows["separate"]["verdict"]) == (None, None)
    assert {name for name, row in rows.items() if row["own"]} == {"separate", "fused"}
    assert rows["fa3"]["speedup_best"] is None


def test_what_has_fewer_bits_is_no_peer_of_what_has_more(store: Callable[..., Query]) -> None:
    narrow = {"precision": "e4m3"}
    query = store(
        operator("torch", "mlp", time_ms_p50=4.0),
        operator("compiled", "mlp", time_ms_p50=3.0, role="peer", precision=""),
        operator("torchao", "mlp", time_ms_p50=2.5, role="peer", **narrow),
        operator("fused", "mlp", time_ms_p50=2.0),
        operator("e4m3", "mlp", time_ms_p50=1.0, role="own", **narrow),
    )
    rows = {row["implementation"]: row for row in query("from operator_speedup")}
    best = {name: row["best_peer_implementation"] for name, row in rows.items()}
    assert (best["fused"], best["e4m3"], best["torchao"]) == ("compiled", "torchao", "torchao")
    assert rows["e4m3"]["speedup_best"] == pytest.approx(2.5)
    assert rows["torchao"]["speedup"] == pytest.approx(1.6)


def test_a_generation_that_failed_takes_the_place_of_an_earlier_one(
    store: Callable[..., Query],
) -> None:
    later = {"recorded_at": NOW + timedelta(hours=1), "timing_hash": "new"}
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
    norm, mlp = rows["add_rms_norm", "fused"], rows["mlp", "single"]
    assert norm["d_model"] == 512
    assert (norm["speedup"], norm["speedup_best"]) == (pytest.approx(2.4), pytest.approx(2.4))
    assert (mlp["speedup"], mlp["speedup_best"]) == (pytest.approx(2), pytest.approx(1.5))
    assert mlp["best_peer_implementation"] == "compiled"
    (norm,) = query("from roofline where op = 'add_rms_norm' and own")
    assert (norm["bound"], norm["share_of_roofline"], norm["tflops"]) == ("memory", 0.8, None)


def test_rows_that_name_their_problem_take_the_place_of_those_that_do_not(
    store: Callable[..., Query],
) -> None:
    named = {"recorded_at": NOW + timedelta(hours=1), "timing_hash": "new"}
    named |= {"problem": json.dumps({"op": "mlp"}), "draw": json.dumps({"d_ff_real": 1365})}
    query = store(
        operator("torch", "mlp", time_ms_p50=5.0, **SIZES_OF_MLP),
        operator("fused", "mlp", time_ms_p50=4.0, **SIZES_OF_MLP),
        operator("torch", "mlp", time_ms_p50=3.0, **SIZES_OF_MLP, **named),
        operator("fused", "mlp", time_ms_p50=1.0, **SIZES_OF_MLP, **named),
    )
    (row,) = query("from own_operators")
    assert (row["time_ms"], row["others"], row["speedup"]) == (1.0, "torch 3", pytest.approx(3))


def test_problems_whose_values_were_drawn_otherwise_are_not_compared(
    store: Callable[..., Query],
) -> None:
    problem = json.dumps({"op": "decode_attention", "sizes": {"batch": 64}})

    def timed(shape: str, name: str, ms: float, **columns: str) -> Tables:
        columns |= {"problem": problem, "shape": shape, "config_id": f"{shape}--{name}"}
        return operator(name, "decode_attention", time_ms_p50=ms, **columns)

    drawn = {"draw": json.dumps({"lengths": "log_uniform"})}
    query = store(
        timed("equal", "sdpa", 9.0, role="baseline"),
        timed("equal", "triton", 8.0, role="own"),
        timed("ragged", "sdpa", 2.0, role="baseline", **drawn),
        timed("ragged", "triton", 1.0, role="own", **drawn),
    )
    rows = {row["shape"]: row for row in query("from own_operators")}
    assert {shape: row["speedup_best"] for shape, row in rows.items()} == {
        "equal": pytest.approx(9 / 8),
        "ragged": pytest.approx(2),
    }
    assert {shape: row["others"] for shape, row in rows.items()} == {
        "equal": "sdpa 9",
        "ragged": "sdpa 2",
    }


def test_operators_are_compared_within_one_run(store: Callable[..., Query]) -> None:
    at = [{"recorded_at": NOW + timedelta(hours=i)} for i in range(3)]
    query = store(
        *(operator("sdpa_flash", time_ms_p50=4.0, replicate=i, **at[i]) for i in (0, 1)),
        *(operator("separate", time_ms_p50=2.0, replicate=i, **at[i]) for i in (0, 1)),
        operator("fa4", time_ms_p50=3.0, replicate=0, **at[0]),
        operator("fa4", time_ms_p50=1.0, replicate=1, **at[2]),  # on its own, later
        operator("flex", time_ms_p50=5.0, role="peer", **at[2]),
    )
    rows = {row["implementation"]: row for row in query("from operator_speedup")}
    separate, fa4, flex = (rows[name] for name in ("separate", "fa4", "flex"))
    assert separate["best_peer_implementation"] == "fa4"
    assert (separate["speedup"], separate["n_pairs"]) == (pytest.approx(2), 2)
    assert separate["speedup_best"] == pytest.approx(1.5)
    assert (fa4["speedup"], fa4["speedup_best"]) == (pytest.approx(4 / 3), 1)
    assert flex["speedup"] is None


def in_turn(
    run_id: str,
    minutes: float,
    times: dict[str, float],
    sizes: dict[str, object] | None = None,
    **columns: object,
) -> Tables:
    """One run that timed these implementations of attention in turn; "fused-2" is a twin."""
    parts = [
        operator(
            name.split("-")[0],
            time_ms_p50=time,
            twin="-" in name,
            config_id=f"attention--{name}",
            max_abs_error=0.0,
            **sizes or {},
        )
        for name, time in times.items()
    ]
    return run(run_id, *parts, minutes=minutes, **columns)


def test_an_operator_is_faster_where_all_its_runs_say_so(store: Callable[..., Query]) -> None:
    times = {"sdpa_flash": 4.0, "fa4": 3.0, "fused": 2.0, "fused-2": 2.01}
    query = store(gate("gate"), *(in_turn(f"r{i}", i, times) for i in range(3)))
    (row,) = query("from operator_speedup where implementation = 'fused'")
    assert (row["n_pairs"], row["verdict"], row["verdict_best"]) == (3, "faster", "faster")
    assert row["speedup_best_low"] < row["speedup_best"] < row["speedup_best_high"]
    assert row["speedup"] == pytest.approx(2)  # the twin is nobody's contender
    assert row["time_ms"] == 2.0
    (noise,) = query("from noise where part = 'attention forward'")
    assert (noise["n_equals"], noise["of_equals"]) == (3, pytest.approx(math.log(2.01 / 2)))
    (verdicts,) = query("from noise_verdicts")
    assert (verdicts["n_comparisons"], verdicts["n_called"], verdicts["n_containing"]) == (1, 0, 1)


def test_sizes_whose_equals_differ_more_have_wider_intervals(store: Callable[..., Query]) -> None:
    """Long calls meet the power limit: many pairs of short ones say nothing of them."""
    short = {"sdpa_flash": 4.0, "fused": 2.0, "fused-2": 2.002}
    long = {"sdpa_flash": 4.0, "fused": 2.0, "fused-2": 2.08}
    sizes = {"shape": "long", "n_q": 50_000}
    query = store(
        gate("gate"),
        *(in_turn(f"short{i}", i, short) for i in range(8)),
        *(in_turn(f"long{i}", i, long, sizes) for i in range(2)),
    )
    errors = {
        row["shape"]: row["equal_variance"] ** 0.5
        for row in query(
            "select distinct shape, equal_variance from estimates"
            " inner join current_ops on code_version = own where not equal"
        )
    }
    assert errors == {
        "mid": pytest.approx(0.001, rel=0.01),
        "long": pytest.approx(0.0392, rel=0.01),
    }


def test_all_copies_of_an_implementation_are_compared_with_one_another(
    store: Callable[..., Query],
) -> None:
    times = {"fused": 2.0, "fused-2": 2.01, "fused-3": 1.99, "fused-4": 3.0}
    query = store(gate("gate"), *(in_turn(f"r{i}", i, times) for i in range(4)))
    (verdicts,) = query("from noise_verdicts")
    assert verdicts["n_comparisons"] == 6
    (noise,) = query("from noise")
    assert noise["n_equals"] == 24
    # One copy takes half as long again: that is called, as it would be of anything else.
    assert (verdicts["n_called"], verdicts["n_containing"]) == (3, 3)


def test_pairs_of_runs_on_two_versions_of_torch_are_two_generations(
    store: Callable[..., Query],
) -> None:
    times = {"sdpa_flash": 4.0, "fused": 2.0}
    new = {"torch": "2.14.0", "code": {"kernel": {"_kernel": "2"}, "module": {"tnp.model": "1"}}}
    query = store(
        gate("gate"),
        gate("gate-2", minutes=1, **new),
        in_turn("r1", 2, times),
        in_turn("r2", 3, times | {"fused": 1.0}, **new),
    )
    (row,) = query("from operator_speedup where implementation = 'fused'")
    assert (row["n_runs"], row["n_pairs"], row["speedup"]) == (1, 1, pytest.approx(4))


def test_forward_and_backward_together(store: Callable[..., Query]) -> None:
    query = store(
        both_passes("torch", "mlp", 2.0, 4.0, **SIZES_OF_MLP),
        both_passes("single", "mlp", 1.0, 0.0, **SIZES_OF_MLP),  # without a backward
        # The backward alone is forward and backward.
        both_passes("torch", "mixture_nll", 1.0, 3.0, batch=4, n_q=10, n_components=10),
        operator("torch", "matmul", time_ms_p50=1.0),
    )
    rows = query("from operator_training")
    assert {(row["op"], row["implementation"]): row["time_ms"] for row in rows} == {
        ("mlp", "torch"): 6,
        ("mlp", "single"): None,
        ("mixture_nll", "torch"): 3,
    }


def test_the_others_of_an_operator_without_keys_are_listed(store: Callable[..., Query]) -> None:
    query = store(
        both_passes("torch", "mlp", 2.0, 4.0, **SIZES_OF_MLP),
        both_passes("planned", "mlp", 3.0, 0, plan_ms=0.1234, **SIZES_OF_MLP),
        both_passes("fused", "mlp", 1.0, 2.0, **SIZES_OF_MLP),
    )
    rows = query("select pass, others from own_operators order by pass")
    assert rows == [
        {"pass": "backward", "others": "torch 4, planned oom"},
        {"pass": "forward", "others": "torch 2, planned 3 (plan 0.12)"},
    ]


def test_other_host_code_is_another_generation_of_ours_and_of_nobody_else(
    store: Callable[..., Query],
) -> None:
    """The same kernels on operands that are laid out otherwise; a peer's are its package's."""
    parts = [
        run(
            f"{name} {module}",
            operator(name, time_ms_p50=ms),
            minutes=minutes,
            code=CODE | {"module": {"tnp.model": module}},
        )
        for minutes, (module, ms) in enumerate((("1", 4.0), ("2", 1.0)))
        for name in ("fused", "fa4")
    ]
    proofs = [gate(f"proof {module}", code=CODE | {"module": {"tnp.model": module}})
              for module in ("1", "2")]  # fmt: skip
    query = store(*proofs, *parts)
    found = query("select implementation, time_ms_p50 from current_ops order by all")
    assert [(row["implementation"], row["time_ms_p50"]) for row in found] == [
        ("fa4", 1.0), ("fa4", 4.0), ("fused", 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "measured",
    [
        lambda ms, launched: operator("fused", time_ms_p50=ms, launch_config=launched),
        lambda ms, launched: step("fused", [ms], launch_config=launched),
    ],
    ids=["operator", "step"],
)
def test_another_configuration_is_another_generation_wherever_it_was_chosen_from(
    store: Callable[..., Query], measured: Callable[[float, str], Tables]
) -> None:
    """A table's entry changes what a kernel does and no line of its code."""

    def launched(source: str, tiles: int) -> str:
        chosen = {"choice": "few_keys", "source": source, "config": {"tiles": tiles}}
        return json.dumps({"attention.forward": chosen})

    chosen = ("tuned", 1, 4.0), ("predicted", 1, 2.0), ("predicted", 3, 1.0)
    parts = [
        run(f"{source} {tiles}", measured(ms, launched(source, tiles)), minutes=minutes)
        for minutes, (source, tiles, ms) in enumerate(chosen)
    ]
    found = store(gate("proof"), *parts)(
        "select count(distinct code_version) as generations, count(*) as runs, "
        "list(run_id) filter (where is_current) as current from measurements"
    )
    assert found == [{"generations": 2, "runs": 3, "current": ["predicted 3"]}]
