import pytest

from tnp.bench.roofline import (
    above_ceiling,
    add_rms_norm_bytes,
    attention_bytes,
    heads_bytes,
    heads_flops,
    mlp_bytes,
    mlp_flops,
    nll_bytes,
    step_attention_flops,
    step_matmul_flops,
)

MODEL = {"d_model": 512, "n_layers": 12, "n_heads": 8, "d_ff": 1365, "n_components": 10}


def test_a_step_at_small_holds_7_7_tflop_outside_attention():
    assert step_matmul_flops(MODEL, 64, 64, 500) == pytest.approx(7.7e12, rel=0.02)


def test_a_step_at_mid_holds_38_tflop_of_attention():
    assert step_attention_flops(MODEL, 4, 10_000, 1_000) == pytest.approx(38e12, rel=0.02)


def test_a_step_at_large_holds_3_5_pflop_of_attention():
    assert step_attention_flops(MODEL, 1, 200_000, 5_000) == pytest.approx(3.5e15, rel=0.02)


def test_matmul_operations_by_hand():
    model = {"d_model": 2, "n_layers": 1, "n_heads": 1, "d_ff": 3, "n_components": 2}
    rows, targets = 1 * (1 + 1), 1
    embed = 2 * rows * (3 * 2 + 2 * 2)
    block = 2 * rows * (2 * 6 + 2 * 2 + 2 * 3 + 3 * 2)
    heads = 2 * targets * 2 * (2 * 3 + 3 * 3)
    assert step_matmul_flops(model, 1, 1, 1) == 3 * (embed + block + heads)


def test_what_nobody_reads_is_not_counted():
    """By hand, with two layers: keys and values of targets; the last block of contexts."""
    model = {"d_model": 2, "n_layers": 2, "n_heads": 1, "d_ff": 3, "n_components": 2}
    batch, n_context, n_target = size = (5, 7, 11)
    targets_kv = 2 * batch * n_target * (2 * 2 + 2 * 2) * 2
    contexts_q_o_mlp = 2 * batch * n_context * (2 * 2 + 2 * 2 + 2 * 3 + 3 * 2)
    skipped = step_matmul_flops(model, *size) - step_matmul_flops(model, *size, skip_unread=True)
    assert skipped == 3 * (targets_kv + contexts_q_o_mlp)
    skipped = step_attention_flops(model, *size) - step_attention_flops(
        model, *size, skip_unread=True
    )
    assert skipped == 7 * 2 * batch * n_context * n_context * 2


def test_bytes_count_each_operand_once():
    assert attention_bytes(64, 8, 564, 64, 64, 2, "forward") == 64 * 8 * 64 * 2 * (2 * 564 + 2 * 64)
    assert attention_bytes(1, 1, 3, 2, 16, 4, "backward") == 16 * 4 * (4 * 3 + 4 * 2)


def test_operators_on_rows_by_hand():
    assert add_rms_norm_bytes(7, 512, 2) == 7 * 512 * 2 * 4
    assert mlp_flops(7, 512, 1365, "forward") == 2 * 7 * (512 * 1365 + 1365 * 512)
    assert mlp_flops(7, 512, 1365, "backward") == 2 * mlp_flops(7, 512, 1365, "forward")
    weights = 4 * (1408 * 512 + 512 * 1408)
    assert mlp_bytes(7, 512, 1408, 2, "forward") == 2 * 7 * (512 + 512) + weights
    assert mlp_bytes(7, 512, 1408, 2, "backward") == 2 * 7 * 3 * 512 + 2 * weights
    heads = (7, 10, 512, 1365, 3)
    assert heads_flops(*heads, "forward") == 2 * 7 * 10 * (512 * 1365 + 1365 * 3)
    weights = 4 * 10 * (1365 * 512 + 3 * 1365)
    assert heads_bytes(*heads, 2, "forward") == 2 * 7 * (512 + 30) + weights
    assert heads_bytes(*heads, 2, "backward") == 2 * 7 * (512 + 512 + 30) + 2 * weights
    assert nll_bytes(7, 10, "forward") == 4 * 7 * (30 + 1)
    assert nll_bytes(7, 10, "backward") == 4 * 7 * (30 + 30 + 1)


def test_a_steps_operations_are_those_of_its_operators():
    rows, targets = 64 * 564, 64 * 500
    one = dict(MODEL, n_layers=1)
    mlp, heads = (
        mlp_flops(rows, 512, 1365, "forward"),
        heads_flops(targets, 10, 512, 1365, 3, "forward"),
    )
    rest = 2 * rows * (3 * 512 + 512**2 + 4 * 512**2)
    assert step_matmul_flops(one, 64, 64, 500) == 3 * (mlp + heads + rest)


def test_impossible_rates_are_named():
    assert "TFLOP/s" in above_ceiling("NVIDIA H200", "bfloat16", 1200.0, 100.0)
    assert "GB/s" in above_ceiling("NVIDIA H200", "bfloat16", None, 5000.0)


def test_possible_rates_and_unknown_devices_pass():
    assert above_ceiling("NVIDIA H200", "bfloat16", 790.0, 4200.0) is None
    assert above_ceiling("Some GPU of 2030", "bfloat16", 1e6, 1e6) is None
