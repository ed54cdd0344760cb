"""Tests which rows of operators become entries of a tuned table, and which are measured."""

import json

import pytest
import torch

from tests.bench.configurations import TIMING
from tnp.bench import isolate
from tnp.bench.contenders import listed
from tnp.bench.outcome import failure_rows, op_job
from tnp.dispatch import selection, tuned_tables
from tnp.dispatch.devices import named, of_device
from tnp.dispatch.registry import AUTO, catalog
from tnp.dispatch.spec import Call
from tnp.ops.mixture_nll import OPERATOR as MIXTURE_NLL
from tnp.ops.swiglu import OPERATOR
from tnp.tuning import entries as tuning

PROBLEM = OPERATOR.problem("float32", rows=6, width=40)


def timed(times: dict[str, object], problem=PROBLEM, **columns) -> list[dict]:
    """Rows from {"implementation pass": ms, or the status it failed with}."""
    rows = []
    for name, time_ms in times.items():
        implementation, _, pass_ = name.partition(" ")
        row = {"op": problem.op, "problem": problem.json, "implementation": implementation}
        row |= {"pass": pass_ or "forward", "forced": None, "twin": False} | columns
        failed = isinstance(time_ms, str)
        row |= {"status": time_ms if failed else "ok", "time_ms_p50": None if failed else time_ms}
        rows.append(row)
    return rows


def trials(times: dict[int, object], pass_: str = "forward") -> list[dict]:
    """Rows of trials from {a size of blocks: ms, or the status it failed with}."""
    rows = []
    for block, time_ms in times.items():
        forced = {"swiglu.forward": ["triton", {"block": 1}]}
        forced[f"swiglu.{pass_}"] = ["triton", {"block": block}]
        rows += timed({f"triton {pass_}": time_ms}, forced=json.dumps(forced))
    return rows


@pytest.mark.parametrize(
    ("times", "block"),
    [
        ({1: 1.0, 2: 0.9, 3: 0.8}, 3),
        ({1: 1.0, 2: 0.995, 3: 2.0}, 1),
        ({1: 1.0, 2: 0.5, 3: 0.498}, 2),
        ({1: "oom", 2: 1.2, 3: 2.0}, 2),
        ({1: 1.0, 2: "error", 3: "killed"}, 1),
    ],
)
@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_the_fastest_configuration_is_entered(times, block, pass_):
    (entry,) = tuning.of_operations(trials(times, pass_))
    assert entry == tuned_tables.entry(f"swiglu.{pass_}", PROBLEM, "triton", {"block": block})
    assert entry["mode"] == tuned_tables.EVERY_MODE


def test_where_no_trial_ran_nothing_is_entered():
    assert tuning.of_operations(trials({1: "oom", 2: "error"})) == []
    assert tuning.of_operations(timed({"triton": 1.0, "torch": 0.5})) == []
    assert tuning.of_operations(timed({"triton": 1.0}, forced="{}")) == []


def test_operations_and_problems_are_apart():
    other = OPERATOR.problem("float32", rows=7, width=40)
    elsewhere = [row | {"problem": other.json} for row in trials({5: 1.0})]
    rows = [*trials({1: 2.0, 2: 1.0}), *trials({3: 0.5}, "backward"), *elsewhere]
    entries = tuning.of_operations(rows)
    assert {(one["of"], one["problem"]["sizes"]["rows"], one["config"]["block"])
            for one in entries} == {
        ("swiglu.forward", 6, 2), ("swiglu.backward", 6, 3), ("swiglu.forward", 7, 5)
    }  # fmt: skip


def chosen(rows: list[dict]) -> dict[str, str]:
    entries = tuning.of_operators(rows)
    assert {entry["of"] for entry in entries} <= {"swiglu", "mixture_nll"}
    return {entry["mode"]: entry["choice"] for entry in entries}


def both(**ms: float) -> dict[str, float]:
    """Returns {"implementation", "implementation backward": ms} of each."""
    return {f"{name}{pass_}": time for name, time in ms.items() for pass_ in ("", " backward")}


TORCH, OURS = both(torch=1.0), both(triton=0.1)


@pytest.mark.parametrize(
    ("rows", "training", "inference"),
    [
        (timed(TORCH | {"triton": 1.5, "triton backward": 0.2}), "triton", "torch"),
        # The earlier stays where it is as fast.
        (timed(both(triton=1.0, torch=1.009)), "torch", "torch"),
        (timed(both(triton=1.0, torch=1.02)), "triton", "triton"),
        (timed(TORCH | {"triton": 0.5, "triton backward": "oom"}), "torch", "triton"),
        (timed(dict.fromkeys(TORCH | OURS, "error")), None, None),
        # Only what `auto` may take counts.
        (timed(TORCH | both(compiled=0.1, auto=0.1)), "torch", "torch"),
        ([*timed(TORCH), *timed(OURS, twin=True)], "torch", "torch"),
        ([*timed(TORCH), *trials({1: 0.1}), *trials({1: 0.1}, "backward")], "torch", "torch"),
        # The median of several runs is taken.
        ([row for ms in (0.1, 3.0, 3.0) for row in timed({"triton": ms})] + timed({"torch": 2.0}),
         None, "torch"),
    ],
)  # fmt: skip
def test_the_fastest_of_each_mode_is_entered(rows, training, inference):
    found = {"training": training, "inference": inference}
    assert chosen(rows) == {mode: name for mode, name in found.items() if name}


def test_a_backward_pass_that_was_timed_with_its_forward_is_all_of_training():
    problem = MIXTURE_NLL.problem("float32", rows=8, d_y=1, n_components=2)
    times = {"torch": 0.1, "torch backward": 1.0, "fused": 0.5, "fused backward": 0.7}
    assert chosen(timed(times, problem)) == {"training": "fused", "inference": "torch"}


def asked(pass_: str, **changes) -> dict:
    of_trials = {"forced": {"triton": {}}, "passes": [pass_], "timing": TIMING, "replicate": 0}
    columns = {"device": "cpu", "device_slug": "cpu"} | of_trials | changes
    return op_job(PROBLEM, ["triton"], "tuning--swiglu", {}, **columns)


@pytest.mark.parametrize("pass_", ["forward", "backward"])
def test_a_job_of_all_trials_has_a_contender_for_each(pass_):
    what = Call(PROBLEM, of_device(torch.device("cpu")), ("gate", "up"))
    (kernel,) = selection.kernels_of(getattr(OPERATOR.implementations[-1], pass_)).values()
    configs = [tuned_tables.as_json(config) for config in kernel.configs(what)]
    found = listed(asked(pass_))
    assert [one[f"swiglu.{pass_}"][1] for one in found["forced"].values()] == configs
    assert list(found["forced"]) == list(found["implementations"])
    ids = list(found["implementations"].values())
    assert ids[0] == f"tuning--swiglu--triton--triton {json.dumps(configs[0])}"
    assert len(set(ids)) == len(configs) > 1
    # Once they are listed there is nothing more to list.
    assert listed(asked(pass_) | found) == listed(op_job(PROBLEM, ["triton"], "", {})) == {}


def test_who_ends_the_process_is_one_of_the_trials_that_it_listed(monkeypatch):
    """The others are measured without it; without a list the row is a trial's too."""
    bad = list(listed(asked("forward"))["implementations"])[1]
    children = []

    def run_child(command, parameters, timeout_s):
        children.append(list(parameters["implementations"]))
        changes = listed(parameters)
        everything = parameters | changes
        report = {"environment": None} | ({"listed": changes} if changes else {})
        if bad in everything["implementations"]:
            return report | {"suspects": [bad], "failure": ["error", "crashed"]}
        return report | {"tables": failure_rows("op", everything, "ok", "")}

    monkeypatch.setattr(isolate, "run_child", run_child)
    rows = isolate.run_isolated("op", asked("forward"), 1.0)["ops"]
    names = list(listed(asked("forward"))["implementations"])
    assert children == [["triton"], [name for name in names if name != bad]]
    status = {row["config_id"].removeprefix("tuning--swiglu--"): row["status"] for row in rows}
    assert status == {name: "error" if name == bad else "ok" for name in names}
    assert all(json.loads(row["forced"]) for row in rows)
    (row,) = failure_rows("op", asked("forward"), "timeout", "too slow")["ops"]
    assert row["forced"] == "{}"


@pytest.mark.parametrize("gpu", ["NVIDIA H200", "NVIDIA A100-SXM4-80GB", "NVIDIA B200", "RTX 4090"])
@pytest.mark.parametrize(
    ("sizes", "beyond"),
    [
        ({"d_x": 7, "d_y": 1}, {"embedding"}),
        ({"d_x": 1, "d_y": 5}, {"mixture_nll"}),
        ({"d_x": 1, "d_y": 8}, {"embedding", "mixture_heads", "mixture_nll"}),
        ({"n_components": 65}, {"mixture_nll"}),
        ({}, set()),
    ],
)
def test_auto_takes_pytorch_where_a_model_is_beyond_the_limits_of_ours(gpu, sizes, beyond):
    model = {"d_model": 512, "d_ff": 1408, "n_heads": 8, "head_dim": 64, "n_components": 10}
    run = {"dtype": "bfloat16", "batch": 16, "n_context": 500, "n_target": 300}
    for op in ("embedding", "mixture_heads", "mixture_nll"):
        operator = catalog().operator(op)
        wanted = tuple(x for x in operator.differentiated if x not in ("x_context", "y_context",
                                                                      "x_target"))  # fmt: skip
        call = Call(operator.within(model | sizes, run), named(gpu), wanted)
        found, _ = selection.choose_implementation(operator, AUTO, call)
        refused = catalog().listed(op, "fused").own.refuses(call)
        assert (refused is not None) == (op in beyond), refused
        if op in beyond:
            assert catalog().listed(op, found.name).provider == "torch"
            with pytest.raises(RuntimeError, match=r" is \d+, and it takes .*: choose torch or "):
                selection.choose_implementation(operator, "fused", call)
