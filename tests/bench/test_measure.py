"""Benchmarks of an operator that is declared: contenders, trials, and the check afterwards."""

import json
import time
from dataclasses import replace

import pytest
import torch

from tests.bench.configurations import TIMING
from tnp.bench.contenders import trials
from tnp.bench.measure import measure_op
from tnp.bench.outcome import failure_rows, op_job, twins
from tnp.dispatch import devices, plans, registry
from tnp.dispatch.spec import Call, Implementation
from tnp.ops.swiglu import OPERATOR, triton_swiglu
from tnp.store.schemas import PROVENANCE, RUN, TABLES

PROBLEM = OPERATOR.problem("float32", rows=6, width=40)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def parameters(*names, **changes) -> dict:
    arguments = {"device": DEVICE, "device_slug": "cpu", "replicate": 0, "draw": {}} | changes
    return op_job(PROBLEM, names or ("torch", "triton"), "swiglu", timing=TIMING, **arguments)


def measured(*names, **changes) -> dict[tuple[str, str], dict]:
    """Returns rows by contender's config_id and pass."""
    rows = measure_op(parameters(*names, **changes), time.perf_counter())["ops"]
    return {(row["config_id"].removeprefix("swiglu--"), row["pass"]): row for row in rows}


@pytest.fixture
def with_implementation(monkeypatch):
    """Adds an implementation to SwiGLU, with what else is changed of it."""

    def add(*own, **changes):
        known = *OPERATOR.implementations, *own
        operator = replace(OPERATOR, implementations=known, **changes)
        monkeypatch.setattr(registry, "_own_operators", lambda: [operator])
        registry.catalog.cache_clear()

    yield add
    monkeypatch.undo()
    registry.catalog.cache_clear()


def test_a_row_for_each_contender_and_pass_has_every_column():
    rows = measured()
    assert list(rows) == [(name, pass_) for pass_ in ("forward", "backward")
                          for name in ("torch", "triton")]  # fmt: skip
    added = {name for name, _ in PROVENANCE + RUN}
    for (name, pass_), row in rows.items():
        assert row["status"] == "ok", row["reason"]
        assert set(row) | added == set(TABLES["ops"].names)
        assert row["problem"] == PROBLEM.json and row["draw"] == "{}"
        assert (row["provider"], row["rank"], row["role"]) == {
            "torch": ("torch", 0, "baseline"), "triton": ("own", 4, "own")
        }[name]  # fmt: skip
        assert row["gates"] == ("" if name == "torch" else "op--swiglu--triton")
        assert row["bytes"] == (3 if pass_ == "forward" else 5) * 6 * 40 * 4
        assert row["flops"] is None and 0 <= row["max_abs_error"] < 1e-5
        assert row["with_forward"] is False and row["forced"] is None
    launched = json.loads(rows["triton", "backward"]["launch_config"])
    assert launched["swiglu.backward"]["choice"] == "triton"
    assert rows["torch", "forward"]["launch_config"] is None


def test_samples_and_kernels_are_of_their_contender():
    tables = measure_op(parameters(), time.perf_counter())
    for row in tables["ops"]:
        times = [one["time_ms"] for one in tables["samples"]
                 if (one["config_id"], one["pass"]) == (row["config_id"], row["pass"])]  # fmt: skip
        assert len(times) == row["n_samples"] and min(times) == row["time_ms_min"]
    kernels = {(row["implementation"], row["name"]) for row in tables["code"]
               if row["part"] == "kernel"}  # fmt: skip
    assert kernels == {
        ("triton", f"tnp.ops.swiglu.triton_swiglu._swiglu_{pass_}_kernel")
        for pass_ in ("fwd", "bwd")
    }


def test_a_wrong_result_is_an_error_after_timing(with_implementation):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, gate, up):
            ctx.save_for_backward(gate, up)
            return OPERATOR.reference(gate, up)

        @staticmethod
        def backward(ctx, dy):
            gate, up = ctx.saved_tensors
            return dy * up, dy * torch.nn.functional.silu(gate)

    with_implementation(Implementation("wrong", run=Wrong.apply))
    rows = measured("torch", "wrong")
    assert rows["wrong", "forward"]["status"] == "ok"
    assert rows["wrong", "backward"]["status"] == "error"
    assert "after timing the output was off" in rows["wrong", "backward"]["reason"]
    assert rows["torch", "backward"]["status"] == "ok"


def test_what_cannot_run_says_why_and_the_others_are_measured(with_implementation):
    forward_only = Implementation("serving", run=OPERATOR.reference, gradients=())
    elsewhere = Implementation("elsewhere", run=OPERATOR.reference, supported=lambda c: "not here")
    with_implementation(forward_only, elsewhere)
    rows = measured("torch", "serving", "elsewhere")
    assert rows["serving", "forward"]["status"] == "ok"
    refused = {name: rows[name, "backward"] for name in ("serving", "elsewhere")}
    assert {row["status"] for row in refused.values()} == {"unsupported"}
    assert refused["serving"]["reason"] == "it is forward only"
    assert refused["elsewhere"]["reason"] == rows["elsewhere", "forward"]["reason"] == "not here"


def test_a_trial_runs_the_kernel_and_the_configuration_that_it_forces(monkeypatch):
    prepared = []

    def prepare(call, config, inputs):
        prepared.append(config)
        return triton_swiglu.prepare(call, config, inputs)

    monkeypatch.setattr(triton_swiglu, "FORWARD", replace(triton_swiglu.FORWARD, prepare=prepare))
    call = Call(PROBLEM, devices.of_device(torch.device(DEVICE)), ("gate", "up"))
    for both in trials("swiglu", "triton", "backward", call).values():  # one saves, one reads
        assert set(both) == {"swiglu.forward", "swiglu.backward"}
    forced = trials("swiglu", "triton", "forward", call)
    assert len(forced) == len(triton_swiglu.CONFIGS) > 1
    rows = measured(*forced, forced=forced, passes=["forward"])
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert set(prepared) == set(triton_swiglu.CONFIGS)
    for (name, _), row in rows.items():
        launched = json.loads(row["launch_config"])["swiglu.forward"]
        assert launched["source"] == "forced" and json.dumps(launched["config"]) in name
        assert json.loads(row["forced"])["swiglu.forward"] == ["triton", launched["config"]]
        assert (row["implementation"], row["twin"]) == ("triton", False)
    assert len({row["spec_hash"] for row in rows.values()}) == len(rows)


def test_a_configuration_that_there_is_no_more_is_unsupported():
    stale = {"triton--old": {"swiglu.forward": ("triton", {"block": 7, "num_warps": 1})}}
    (row,) = measured(*stale, forced=stale, passes=["forward"]).values()
    assert row["status"] == "unsupported" and "no configuration" in row["reason"]


def test_a_twin_and_auto():
    rows = measured("torch", *twins("torch", 1), "auto", passes=["forward"])
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert [row["twin"] for row in rows.values()] == [False, True, False]
    auto = rows["auto", "forward"]
    assert json.loads(auto["launch_config"])["implementation"] == "torch"
    assert (auto["role"], auto["rank"]) == ("own", None)


def test_without_a_backward_pass_nothing_is_saved_for_one(monkeypatch):
    wanted = []
    right = plans.build

    def build(operator, name, inputs, options, wants, **rest):
        wanted.append((wants, [x.requires_grad for x in inputs]))
        return right(operator, name, inputs, options, wants, **rest)

    monkeypatch.setattr(plans, "build", build)
    measured("torch", passes=["forward"])
    assert wanted == [((), [False, False])]
    wanted.clear()
    measured("torch")
    assert wanted == [(("gate", "up"), [True, True])] * 2


def test_a_spot_is_all_that_is_compared(with_implementation):
    """A part is compared where float64 of the whole does not fit."""
    seen = []

    def spot(case, inputs, gradients):
        seen.append((sorted(inputs), gradients and sorted(gradients)))
        last = {name: x[-1:].detach().double().requires_grad_() for name, x in inputs.items()}
        y = OPERATOR.reference(*last.values())
        if gradients is None:
            return {"y": (slice(-1, None), y.detach())}
        found = torch.autograd.grad(y, list(last.values()), gradients["y"][-1:].double())
        return {f"d{name}": (slice(-1, None), x) for name, x in zip(last, found, strict=True)}

    def reference(*inputs):
        raise AssertionError("the whole was computed")

    def late(gate, up):
        return OPERATOR.reference(gate, up) * (torch.arange(6)[:, None] < 5)

    with_implementation(
        Implementation("late", run=late), partial_reference=spot, reference=reference
    )
    rows = measured("torch", "late")
    assert seen == [(["gate", "up"], None), (["gate", "up"], ["y"])]
    assert rows["torch", "forward"]["status"] == rows["torch", "backward"]["status"] == "ok"
    assert rows["late", "forward"]["status"] == rows["late", "backward"]["status"] == "error"


def test_a_gradient_is_timed_with_its_result_and_a_plan_apart(with_implementation):
    calls, planned = [], []

    def run(gate, up):
        calls.append(None)
        return OPERATOR.reference(gate, up)

    def plan(gate, up):
        planned.append((gate.shape, up.shape))

    own = Implementation("counted", run=run, plan=plan)
    with_implementation(own, backward_with_forward=True)
    rows = measured("torch", "counted")
    row = rows["counted", "backward"]
    assert row["with_forward"] is True and len(calls) > row["n_samples"]
    assert rows["counted", "forward"]["plan_ms"] > 0 and len(set(planned)) == 1
    assert rows["torch", "forward"]["plan_ms"] is None


def test_failures_have_the_same_key():
    asked = parameters("torch", "triton")
    failed = failure_rows("op", asked, "timeout", "not finished")["ops"]
    found = measure_op(asked, time.perf_counter())["ops"]
    known = ("problem", "config_id", "pass", "rank", "spec_hash", "timing_hash")
    assert {tuple(row[name] for name in known) for row in failed} == {
        tuple(row[name] for name in known) for row in found
    }
