"""Tests view `fused_backward`: a step of ours beside the one whose backward pass is not fused."""

import pytest

from tests.sql.conftest import Store, gate, one, runs

INTERVAL = ("low", "high", "n_pairs", "n_sessions")


def test_the_ratio_is_judged_as_one_to_pytorchs_step_of_the_same_times_is(store: Store) -> None:
    query = store(
        gate("g"),
        *runs("sdpa_flash", [2.0, 2.02]),
        *runs("separate", [2.0, 2.02]),
        *runs("fused_attention", [1.0, 1.005]),
    )
    found = one(query, "from fused_backward")
    beside = one(
        query,
        "select speedup as ratio, speedup_low as low, speedup_high as high, * from speedup "
        "where variant = 'fused_attention'",
    )
    assert (found["step_ms"], found["separate_ms"]) == pytest.approx((1.0025, 2.01), rel=1e-4)
    assert found["ratio"] == pytest.approx((2 * 2.02 / 1.005) ** 0.5)
    for name in ("ratio", *INTERVAL):
        assert found[name] == pytest.approx(beside[name]), name
    assert found["verdict"] == beside["verdict"] == "faster"
    assert found["low"] < found["ratio"] < found["high"] and found["n_pairs"] == 2


def test_steps_of_other_switches_sizes_or_names_do_not_pair(store: Store) -> None:
    query = store(
        gate("g"),
        *runs("separate", [2.0]),
        *runs("fused_attention", [1.0]),
        *runs("fused", [0.5]),
        *runs("separate", [6.0], cuda_graph=True),
        *runs("fused_attention", [2.0], cuda_graph=True),
        *runs("fused_attention", [3.0], checkpoint=True),
        *runs("separate", [9.0], shape="small", n_context=7, name="small"),
    )
    rows = query("select checkpoint, cuda_graph, ratio from fused_backward order by all")
    assert [tuple(row.values()) for row in rows] == [
        (False, False, pytest.approx(2)),
        (False, True, pytest.approx(3)),
    ]


def test_steps_of_two_gpus_have_no_ratio(store: Store) -> None:
    for gpu, n_rows in (("GPU-1", 1), ("GPU-2", 0)):
        query = store(
            gate("g"),
            gate("g2", gpu="GPU-2"),
            *runs("separate", [2.0]),
            *runs("fused_attention", [1.0], gpu=gpu),
        )
        assert len(query("from fused_backward")) == n_rows, gpu


def test_without_a_gate_there_is_no_verdict(store: Store) -> None:
    steps = [*runs("separate", [2.0, 2.0]), *runs("fused_attention", [1.0, 1.0])]
    row = one(store(*steps), "from fused_backward")
    assert row["ratio"] == pytest.approx(2)
    assert [row[name] for name in ("low", "high", "q", "verdict")] == [None] * 4


def test_an_earlier_code_version_is_not_compared(store: Store) -> None:
    newer = {"kernel": {"_kernel": "2"}, "module": {"tnp.model": "1"}}
    query = store(
        gate("g"),
        gate("g2", code=newer, minutes=100),
        *runs("separate", [2.0]),
        *runs("fused_attention", [1.0]),
        *runs("separate", [2.0], minutes=100, name="new"),
        *runs("fused_attention", [1.6], minutes=100, name="new", code=newer),
    )
    for rows in ("fused_backward", "contrasts where figure = 'fused_backward'"):
        assert one(query, f"from {rows}")["ratio"] == pytest.approx(1.25), rows


def test_no_step_of_ours_is_a_base_of_the_speedup(store: Store) -> None:
    query = store(
        gate("g"),
        *runs("sdpa_flash", [3.0]),
        *runs("separate", [2.0]),
        *runs("fused_attention", [1.0]),
    )
    row = one(query, "from speedup where variant = 'fused_attention'")
    assert (row["best_pytorch_variant"], row["speedup_best"]) == ("sdpa_flash", pytest.approx(3))
