"""Tests checks and their errors, what a red gate blocks, and which gates a step needs."""

import inspect
import math

import pytest
import torch

from tnp.dispatch.registry import catalog
from tnp.experiment.gpu_memory import Busy
from tnp.gates import GATES, blocked, gates_for, generic_gate, generic_gates, models, run_gate
from tnp.gates import gate as gate_named
from tnp.gates.checks import Check, error_ratio, max_abs_error, relative_error
from tnp.gates.cuda_graphs import N_NULL, SAME_WEIGHTS, Trained, against_eager, starts
from tnp.model.variants import Variant


@pytest.mark.parametrize(
    ("op", "name", "phase"),
    [
        ("attention", "fa3", 2),
        ("attention", "separate", 3),
        ("attention", "portable", 3),
        ("attention", "fused", 4),
        ("attention", "e4m3", 5),
        ("mlp", "single", 6),
        ("mlp", "e4m3", 5),
        ("mixture_heads", "fused", 7),
        ("mixture_nll", "fused", 8),
        ("swiglu", "triton", None),
    ],
)
def test_the_gate_of_an_implementation_has_the_phase_that_asks_for_it(op, name, phase):
    assert gate_named(generic_gate(op, name)).phase == phase


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("larger_is_better", [False, True])
def test_not_finite_never_passes(value, larger_is_better):
    assert not Check("", "", value, 1.0, larger_is_better=larger_is_better).passed


def test_passes_on_the_right_side_of_the_bound():
    assert Check("", "", 0.9, 1.0).passed and not Check("", "", 1.1, 1.0).passed
    cosine = Check("", "cosine", 0.9, 0.999, larger_is_better=True)
    assert not cosine.passed


@pytest.mark.parametrize("error", [relative_error, max_abs_error])
def test_errors_see_a_nan_in_one_element(error):
    reference = torch.ones(100)
    out = reference.clone()
    assert error(out, reference) == 0
    out[37] = math.nan
    assert error(out, reference) == math.inf


def test_error_ratio_is_about_one_for_equal_rounding_and_large_for_a_wrong_result():
    reference = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pytorch = reference.bfloat16()
    assert error_ratio(pytorch, pytorch, reference) == pytest.approx(1.0, abs=0.25)
    assert error_ratio((reference * 1.05).bfloat16(), pytorch, reference) > 10
    assert error_ratio(pytorch, torch.full_like(pytorch, torch.inf), reference) == torch.inf


def test_error_ratio_is_over_the_larger_of_pytorchs_error_and_the_floor():
    reference = torch.ones(4, dtype=torch.float64)
    out, pytorch = reference.float() + 1e-3, reference.float() + 1e-4
    assert error_ratio(out, pytorch, reference) == pytest.approx(10, rel=1e-2)
    # ‖out − reference‖ is 2e-3.
    assert error_ratio(out, pytorch, reference, floor=1e-3) == pytest.approx(2, rel=1e-2)
    assert error_ratio(out, pytorch, reference, floor=1e-5) == pytest.approx(10, rel=1e-2)


def test_error_ratio_of_a_result_that_is_truly_zero():
    zero = torch.zeros(4, dtype=torch.float64)
    noise = torch.full((4,), 1e-7)
    assert error_ratio(noise, zero.float(), zero, floor=1e-7) == pytest.approx(2)
    assert error_ratio(noise, zero.float(), zero) > 1e6
    assert error_ratio(zero.float(), zero.float(), zero) == 0


def row(**changes) -> dict:
    return {
        "gate": "op--attention--separate",
        "implementation": "separate",
        "op": "attention",
        "status": "ok",
        "passed": True,
        "check": "c",
        "metric": "m",
        "value": 2.0,
        "bound": 1.0,
        "reason": "",
    } | changes


def test_a_red_check_blocks_only_its_implementation():
    rows = [row(), row(passed=False)]
    separate, flash = {"attention": "separate"}, {"attention": "sdpa_flash"}
    expected = "gate op--attention--separate is red: c: m 2, bound 1"
    assert expected in blocked(rows, separate).reason
    assert blocked(rows, flash) is None
    assert blocked([row(implementation="", passed=False)], flash)
    assert blocked([row(status="error", reason="boom", passed=None)], separate)
    assert blocked([row(status="unsupported", passed=None)], separate) is None


def test_an_unfinished_gate_blocks_as_timeout_and_a_red_check_as_gate_failed():
    separate, hung = {"attention": "separate"}, row(status="timeout", reason="hung", passed=None)
    stop = blocked([row(), hung], separate)
    assert stop == ("timeout", "gate op--attention--separate is not finished: hung")
    assert blocked([hung, row(passed=False)], separate).status == "gate_failed"
    assert blocked([hung], {"attention": "sdpa_flash"}) is None


def test_a_red_check_blocks_auto_where_it_could_choose_the_implementation():
    red = [row(passed=False)]
    assert blocked(red, {"attention": "auto"})
    assert blocked(red, {"mlp": "auto"}) is None


def test_a_red_check_names_an_implementation_of_its_operator():
    fused = row(gate="op--mlp--fused", op="mlp", implementation="fused", passed=False)
    assert blocked([fused], {"attention": "separate", "mlp": "fused"})
    assert blocked([fused], {"attention": "fused", "mlp": "single"}) is None
    assert blocked([fused], {"attention": "fused"}) is None
    captured = row(gate="cuda_graphs", implementation="fused", passed=False)
    assert blocked([captured], {"attention": "fused", "mlp": "torch"})
    assert blocked([captured], {"attention": "separate", "mlp": "fused"}) is None


def test_a_red_operator_blocks_its_family():
    red = row(gate="op--add_rms_norm--fused", op="add_rms_norm", implementation="fused",
              passed=False)  # fmt: skip
    assert blocked([red], {"rms_norm": "fused"})
    assert blocked([red], {"rms_norm": "torch"}) is None


def test_gates_follow_what_a_step_uses():
    assert gates_for({"attention": "sdpa_flash", "mlp": "torch"}) == ["baseline"]
    both = gates_for({"attention": "fused", "mlp": "single"})
    assert both == ["baseline", "op--attention--fused", "op--mlp--single"]
    norms = gates_for({"rms_norm": "fused"})
    assert norms == ["baseline", "op--rms_norm--fused", "op--add_rms_norm--fused"]
    assert gates_for({"attention": "sdpa_cudnn"}, checkpoint=True, cuda_graph=True) == [
        "baseline",
        "checkpointing",
        "cuda_graphs",
    ]
    assert gates_for({}, skip_unread=True, recompute=True) == [
        "baseline",
        "skip_unread",
        "checkpointing",
    ]


def test_every_gate_of_a_step_exists():
    families = {operator.family or operator.name for operator in catalog().operators.values()}
    switches = list(inspect.signature(gates_for).parameters)[1:]
    named = gates_for(dict.fromkeys(families, "auto"), **dict.fromkeys(switches, True))
    assert set(named) <= {*GATES, *generic_gates()}
    assert gate_named("op--mlp--fused").op == "mlp"


def test_unknown_gate_raises():
    with pytest.raises(ValueError, match="unknown gate 'basline'"):
        run_gate("basline", "cpu")


def test_a_gate_that_raises_keeps_its_checks_and_says_why(monkeypatch):
    from tnp.gates import baseline

    def checks(device):
        yield Check("first", "m", 0.0, 1.0)
        raise RuntimeError("kernel\nexploded")

    monkeypatch.setattr(baseline, "checks", checks)
    rows = run_gate("baseline", "cpu")["gates"]
    assert [r["status"] for r in rows] == ["ok", "error"]
    assert rows[1]["reason"] == "RuntimeError: kernel exploded"


def test_a_gate_on_a_busy_gpu_is_recorded_as_killed(monkeypatch):
    from tnp.gates import baseline

    def checks(device):
        yield Check("first", "m", 0.0, 1.0)
        raise Busy("other processes hold 60 of the GPU's 80 GB")

    monkeypatch.setattr(baseline, "checks", checks)
    rows = run_gate("baseline", "cpu")["gates"]
    assert [(r["status"], r["passed"]) for r in rows] == [("ok", True), ("killed", None)]
    assert rows[1]["reason"] == "other processes hold 60 of the GPU's 80 GB"


def test_unsupported_is_a_row_with_the_reason():
    rows = run_gate("cuda_graphs", "cpu")["gates"]
    assert [(r["status"], r["passed"]) for r in rows] == [("unsupported", None)]
    assert "CUDA device" in rows[0]["reason"]


def test_captured_runs_are_held_to_the_spread_of_eager_runs():
    equal, spread = torch.ones(12), torch.full((12,), 2.0**-20)
    eager = [
        Trained(equal, equal, equal + 3 * spread),
        *[Trained(equal + spread, equal + spread, equal)] * 3,
    ]

    def passed(losses: float, weights: float) -> list[bool]:
        captured = Trained(equal + losses * spread, equal + weights * spread, equal)
        checks = against_eager(("losses", "weights"), captured, eager, "fused")
        return [check.passed for check in checks]

    assert passed(7.9, 1.9) == [True, True, True]
    assert passed(8.1, 2.1) == [False, False, True]
    eager[0] = eager[0]._replace(before=equal + spread)  # the last update is within the bound
    assert passed(0, 0) == [True, True, False]
    del eager[1:]
    assert passed(0, 0) == [True, True, True]
    assert passed(1, 1) == [False, False, True]


def test_one_eager_run_is_enough_where_sums_have_a_fixed_order():
    runs = {name: len(starts(name)) for name in ("separate", "fused", "sdpa_flash")}
    assert runs == {"separate": 1, "fused": 1 + N_NULL, "sdpa_flash": 1 + N_NULL}


def test_larger_first_weights_change_the_loss_by_less_than_a_step(monkeypatch):
    scale_of_gpus = models.scale(torch.device("cuda"))
    monkeypatch.setattr(models, "scale", lambda _: scale_of_gpus)
    device = torch.device("cpu")
    plain = Variant("plain", attention="reference")
    with torch.no_grad():
        losses = [
            models.moved(models.build_model(device, plain), units).loss(models.task(device, 0))
            for units in range(1 + N_NULL)
        ]
    differences = [max_abs_error(moved, losses[0]) for moved in losses[1:]]
    assert all(0 < difference < SAME_WEIGHTS for difference in differences)
