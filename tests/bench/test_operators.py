import time

import pytest
import torch

from tests.bench.configurations import op_parameters
from tnp.bench import operators, workloads
from tnp.bench.operators import Inaccurate, checked_error, measure_op
from tnp.bench.outcome import Unsupported
from tnp.schemas import PROVENANCE, TABLES


def measured(**changes) -> dict[str, dict]:
    rows = measure_op(op_parameters(**changes), time.perf_counter())["ops"]
    return {row["pass"]: row for row in rows}


@pytest.mark.parametrize("n_q, n_k", [(21, 13), (5, 40)])
def test_attention_fills_a_row_for_each_pass(n_q, n_k):
    rows = measured(n_q=n_q, n_k=n_k)
    added = {name for name, _ in PROVENANCE} | {"launch_config"}
    assert list(rows) == ["forward", "backward"]
    for row in rows.values():
        assert row["status"] == "ok"
        assert set(row) | added == set(TABLES["ops"].names)
        assert 0 < row["max_abs_error"] < 1e-4
    assert rows["backward"]["flops"] == 2.5 * rows["forward"]["flops"]


def test_samples_name_their_pass():
    tables = measure_op(op_parameters(), time.perf_counter())
    for row in tables["ops"]:
        times = [s["time_ms"] for s in tables["samples"] if s["pass"] == row["pass"]]
        assert len(times) == row["n_samples"]
        assert min(times) == row["time_ms_min"]


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_a_wrong_output_is_an_error_and_not_a_record(monkeypatch, wrong):
    right = workloads.attention
    monkeypatch.setattr(workloads, "attention", lambda *a, **k: right(*a, **k) * wrong)
    for row in measured().values():
        assert row["status"] == "error"
        assert "after timing" in row["reason"]
        assert "time_ms_p50" not in row


def test_a_failing_backward_leaves_the_forward(monkeypatch):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.autograd, "grad", out_of_memory)
    rows = measured()
    assert rows["forward"]["status"] == "ok"
    assert (rows["backward"]["status"], rows["backward"]["reason"]) == (
        "oom",
        "CUDA out of memory.",
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nan_never_passes(dtype):
    reference = torch.randn(8, dtype=torch.float64)
    with pytest.raises(Inaccurate):
        checked_error([(torch.full((8,), float("nan")), reference)], dtype)
    assert checked_error([(reference.float(), reference)], dtype) < 1e-6


def test_a_small_reference_is_held_to_its_own_size():
    reference = torch.full((8,), 1e-3, dtype=torch.float64)
    with pytest.raises(Inaccurate):
        checked_error([(torch.zeros(8), reference)], "bfloat16")


def test_the_reference_is_the_same_in_blocks(monkeypatch):
    torch.manual_seed(0)
    q, k, v, do = (torch.randn(2, 3, n, 16) for n in (23, 11, 11, 23))
    whole = workloads._attention_head_reference(q, k, v, do)
    monkeypatch.setattr(workloads, "REFERENCE_BLOCK", 55)
    for block, expected in zip(
        workloads._attention_head_reference(q, k, v, do), whole, strict=True
    ):
        torch.testing.assert_close(block, expected)


def test_the_reference_agrees_with_autograd():
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 1, n, 16, dtype=torch.float64).requires_grad_() for n in (9, 5, 5))
    do = torch.randn(1, 1, 9, 16, dtype=torch.float64)
    o = torch.softmax(q @ k.mT / 4, -1) @ v
    expected = torch.autograd.grad(o, (q, k, v), do)
    for reference, gradient in zip(
        workloads._attention_head_reference(q, k, v, do), expected, strict=True
    ):
        torch.testing.assert_close(reference, gradient[0, 0])


def test_the_ceilings(monkeypatch):
    monkeypatch.setattr(workloads, "MATMUL_SIZE", 96)
    monkeypatch.setattr(workloads, "COPY_BYTES", 2**16)
    sizes = dict.fromkeys(("n_q", "n_k", "n_heads", "head_dim", "batch"))
    (matmul,) = measured(op="matmul", implementation="torch", **sizes).values()
    assert matmul["flops"] == 2 * 96**3
    (copy,) = measured(op="copy", implementation="torch", **sizes).values()
    assert copy["bytes"] == 2 * 2**16 and copy["tflops"] is None and copy["max_abs_error"] == 0


def test_what_the_cpu_cannot_run_is_refused():
    with pytest.raises(Unsupported):
        measured(implementation="sdpa_cudnn")


def test_an_unknown_operator_is_named():
    with pytest.raises(ValueError, match="'convolution': choose from attention"):
        measured(op="convolution")


def test_an_impossible_rate_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    cuda = torch.device("cuda")
    operators.refuse_impossible(cuda, "bfloat16", 790.0, 4200.0)
    with pytest.raises(operators.AboveCeiling, match="1200 TFLOP/s"):
        operators.refuse_impossible(cuda, "bfloat16", 1200.0, 4200.0)
