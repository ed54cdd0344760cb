import pytest

from tnp.bench.roofline import (
    above_ceiling,
    attention_bytes,
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


def test_bytes_count_each_operand_once():
    assert attention_bytes(64, 8, 564, 64, 64, 2, "forward") == 64 * 8 * 64 * 2 * (2 * 564 + 2 * 64)
    assert attention_bytes(1, 1, 3, 2, 16, 4, "backward") == 16 * 4 * (4 * 3 + 4 * 2)


def test_impossible_rates_are_named():
    assert "TFLOP/s" in above_ceiling("NVIDIA H200", "bfloat16", 1200.0, 100.0)
    assert "GB/s" in above_ceiling("NVIDIA H200", "bfloat16", None, 5000.0)


def test_possible_rates_and_unknown_devices_pass():
    assert above_ceiling("NVIDIA H200", "bfloat16", 790.0, 4200.0) is None
    assert above_ceiling("Some GPU of 2030", "bfloat16", 1e6, 1e6) is None
