"""Tests that plain bounds on errors see a small one, and which step waits for them: none."""

from dataclasses import replace

import pytest
import torch

from tnp.dispatch import devices
from tnp.dispatch.registry import catalog
from tnp.gates import gates_for, run_gate, tolerances
from tnp.model.variants import FAMILIES
from tnp.ops.attention import OPERATOR as ATTENTION
from tnp.ops.swiglu import OPERATOR as SWIGLU

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture
def red(monkeypatch):
    """Returns a function that runs the gate on SwiGLU and attention, and returns red rows."""

    def run(swiglu=SWIGLU, attention=ATTENTION) -> list[dict]:
        monkeypatch.setattr(catalog(), "operators", {"swiglu": swiglu, "attention": attention})
        monkeypatch.setattr(tolerances, "ATTENTION", attention)
        monkeypatch.setattr(tolerances, "SHAPES", {"small": (16, 20)})
        rows = run_gate("tolerances", DEVICE.type)["gates"]
        assert {row["op"] for row in rows} == {"swiglu", "attention"}
        left_out = [row["check"] for row in rows if row["status"] == "unsupported"]
        for op in (swiglu, attention):
            own = {one.name for one in catalog().ours(op.name) if not one.precision}
            seen = {row["implementation"] for row in rows if row["op"] == op.name}
            assert all(f"left out, {op.name} {name}" in left_out for name in own - seen)
        return [row for row in rows if row["status"] == "ok" and not row["passed"]]

    return run


def test_without_a_fault_it_is_green(red):
    assert not red()


def test_two_thousandths_of_a_result_are_too_much_in_float16(red):
    def reference(*given, **options):
        return SWIGLU.reference(*given, **options) * 1.002

    found = red(swiglu=replace(SWIGLU, reference=reference))
    assert {(row["op"], row["implementation"]) for row in found} == {("swiglu", "triton")}


def test_attention_is_held_against_pytorchs_in_bfloat16(red):
    first, *others = ATTENTION.implementations

    def run(*given, **options):
        return first.run(*given, **options) + 0.02

    faulty = replace(ATTENTION, implementations=(replace(first, run=run), *others))
    found = red(attention=faulty)
    assert {"separate", "fused"} <= {row["implementation"] for row in found}
    assert all("PyTorch at small" in row["check"] for row in found)


@pytest.mark.parametrize(
    ("largest", "bound"), [(0.0, 1e-3), (1.5, 1e-3), (2.0, 2.0**-9), (-200.0, 0.125)]
)
def test_the_bound_is_a_thousandth_or_a_unit_in_the_last_place(largest, bound):
    assert tolerances.bound_in_float16(torch.tensor([0.5, largest]).double()) == bound


def test_zeros_that_would_pass_are_red(red):
    """A bound that zeros meet says nothing about a kernel."""

    def reference(*given, **options):
        return SWIGLU.reference(*given, **options) * 1e-5

    found = red(swiglu=replace(SWIGLU, reference=reference))
    assert any(row["check"].startswith("control must fail") for row in found)


def test_a_case_that_does_not_fit_is_left_out_with_its_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2**30, 16 * 2**30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 14 * 2**30)

    def reference(*given, **options):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(catalog(), "operators", {"swiglu": replace(SWIGLU, reference=reference)})
    monkeypatch.setattr(tolerances, "INTERPRETED", ())
    monkeypatch.setattr(tolerances, "SHAPES", {})
    rows = run_gate("tolerances", DEVICE.type)["gates"]
    assert {row["status"] for row in rows} == {"unsupported"}
    assert all(row["check"].startswith("left out, swiglu") and row["reason"] for row in rows)


def test_every_size_that_kernels_are_written_for_is_checked():
    h200 = devices.named("nvidia-h200")
    cases = [case.problem for case in tolerances.largest_cases(ATTENTION, h200)]
    found = {(one["head_dim"], bool(one["causal"])) for one in cases}
    assert {(64, False), (64, True), (128, False), (128, True)} <= found


def test_no_step_waits_for_it():
    assert "tolerances" not in gates_for(dict.fromkeys(FAMILIES, "auto"), *[True] * 7)
