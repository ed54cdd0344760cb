"""Tests rows of host times: which calls are timed, and how. No test asserts a time."""

import json
from dataclasses import asdict

import pytest
import torch

from tnp.bench import host, host_counts, host_steps
from tnp.bench.outcome import failure_rows
from tnp.bench.policy import Policy
from tnp.bench.timing import synchronize
from tnp.dispatch import call as dispatch
from tnp.dispatch.launcher import Bound
from tnp.dispatch.registry import catalog
from tnp.store.schemas import TABLES


@pytest.fixture
def measured(monkeypatch) -> tuple[list[dict], set[str]]:
    """Measures two operators on the CPU, and notes the names that went through dispatch."""
    for name, small in {"CALLS": 1, "CHAIN": 2, "WARM_ROUNDS": 0, "ROUNDS": 2}.items():
        monkeypatch.setattr(host, name, small)
    monkeypatch.setattr(host, "synchronize", lambda device: None)
    dispatched, call = set(), dispatch.call

    def noted(operator, implementation, *rest):
        dispatched.add(f"{operator.name} {implementation}")
        return call(operator, implementation, *rest)

    monkeypatch.setattr(dispatch, "call", noted)
    problems = [
        {"op": op, "problem": catalog().operator(op).problem("float32", **sizes).json, **asked}
        for op, sizes, asked in (
            ("add_rms_norm", {"rows": 4, "width": 64}, {"implementations": ["torch", "fused"]}),
            (
                "attention",
                {"batch": 1, "n_heads": 2, "n_q": 5, "n_k": 3, "head_dim": 16},
                {"implementations": ["sdpa_cudnn", "fused", "auto"]},
            ),
        )
    ]
    return host.measure_host({"device": "cpu", "problems": problems}), dispatched


def test_rows_are_of_every_pass_and_implementation(measured):
    rows, dispatched = measured
    found = {(row["op"], row["pass"], row["implementation"]): row for row in rows}
    assert len(found) == len(rows) == len(host.PASSES) * (3 + 4)
    for (op, _, name), row in found.items():
        assert row["with_launches"] is False
        if name == "sdpa_cudnn":
            assert row["status"] == "unsupported" and "needs a CUDA device" in row["reason"]
        else:
            assert row["status"] == "ok" and row["n_samples"] == 2, (op, name, row)
            assert row["host_us_p50"] is not None
    # PyTorch's forms are called as they are.
    assert dispatched == {"add_rms_norm fused", "attention fused", "attention auto"}


class _Launching(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, launch):
        ctx.launch = launch
        launch(x)
        launch(x)
        return x.new_empty(x.shape)

    @staticmethod
    def backward(ctx, dout):
        ctx.launch(dout)
        return torch.empty_like(dout), None


def test_everything_that_a_known_step_does_is_counted():
    x, weight = torch.ones(3, 4), torch.nn.Parameter(torch.ones(4, 4))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    launch = Bound(None, (1,))

    def step() -> None:
        optimizer.zero_grad()
        synchronize(x.device)
        y = _Launching.apply((x @ weight).view(12), launch)
        with torch.autograd.set_multithreading_enabled(False):
            y.backward(torch.zeros(12))
        optimizer.step()

    with host.launching_nothing():
        step()
        found = {row["kind"]: row for row in host_counts.count(step)}
    expected = {
        host_counts.FORWARD: 1, host_counts.BACKWARD: 1, "launches of ours": 3,
        host_counts.PRODUCTS: 2,  # forward, and of the weight's gradient
        "allocations": 3,  # new_empty, empty_like, zeros
        "autograd's engine": 4,  # the function, the view, the product and the weight
        host_counts.OPTIMIZER: 2,  # zero_grad and step
        "custom operators": 0,
        host_counts.IN_TNP: 4,  # synchronize, and what stands in for three launches
    }  # fmt: skip
    assert {kind: found[kind]["count"] for kind in expected} == expected
    assert found["views"]["count"] >= 1
    for kind in (host_counts.FORWARD, host_counts.BACKWARD, "launches of ours"):
        assert found[kind]["us"] > 0


def test_a_step_of_ours_is_counted_without_a_gpu(monkeypatch, capsys):
    parameters = host_counts._parameters("small", "fused")
    parameters["model"] = parameters["model"] | {"n_layers": 1}
    monkeypatch.setattr(host_counts, "_parameters", lambda *names: parameters)
    assert host_counts.main(["--shape", "small", "--variant", "fused", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    counts = {row["kind"]: row["count"] for row in found["kinds"]}
    assert counts[host_counts.FORWARD] == counts[host_counts.BACKWARD] > 5
    assert counts["launches of ours"] > counts[host_counts.FORWARD] and found["host_us"] > 0


@pytest.mark.parametrize(
    "shape, variant, said",
    [("smal", "fused", "unknown shape 'smal'"), ("small", "fusd", "unknown variant 'fusd'"),
     ("varying", "fused", "sizes of shape 'varying' vary")],
)  # fmt: skip
def test_names_that_there_are_not_are_refused(shape, variant, said, capsys):
    with pytest.raises(SystemExit):
        host_counts.main(["--shape", shape, "--variant", variant])
    assert said in capsys.readouterr().err


def forms(*names: str, captured: tuple[str, ...] = ()) -> dict:
    """Returns parameters of a study of tiny steps on the CPU, launched and captured."""
    wanted = [(name, False) for name in names] + [(name, True) for name in captured]
    return {
        "forms": [
            {"variant": name, "variant_spec": {"attention": name}, "cuda_graph": graph}
            for name, graph in wanted
        ],
        "shape": "tiny", "batch": 2, "n_context": 6, "n_target": 4, "dtype": "float32",
        "model": {"d_model": 32, "n_layers": 1, "n_heads": 2, "d_ff": 48, "n_components": 2},
        "device": "cpu", "replicate": 1, "timing": asdict(Policy()),
    }  # fmt: skip


def test_every_form_of_a_step_has_both_times_or_a_reason(monkeypatch):
    for name, small in {"WARM_ROUNDS": 1, "ROUNDS": 2, "ALONE": 1, "LOOP": 2}.items():
        monkeypatch.setattr(host_steps, name, small)
    parameters = forms("sdpa_flash", "sdpa_cudnn", "reference", captured=("sdpa_flash",))
    noted = []
    rows = host_steps.measure_host_steps(parameters, noted.append)
    found = {(row["variant"], row["cuda_graph"]): row for row in rows}
    assert len(found) == 4 and all(set(row) <= set(TABLES["host_steps"].names) for row in rows)
    for name in ("sdpa_flash", "reference"):
        row = found[name, False]
        assert row["status"] == "ok" and row["n_samples"] == 2 and row["compile_s"] > 0
        assert row["host_ms_p50"] > 0 and row["step_ms_p50"] > 0 and row["reason"] == ""
    for form in (("sdpa_cudnn", False), ("sdpa_flash", True)):
        assert found[form]["status"] == "unsupported"
        assert "needs a CUDA device" in found[form]["reason"]
    assert found["sdpa_flash", False]["role"] == "baseline"
    assert noted[:2] == ["builds sdpa_flash", "builds sdpa_cudnn"] and noted[-1] == "round 2"


def test_a_process_that_ends_early_leaves_a_row_for_each_form():
    parameters = forms("sdpa_flash", "reference", captured=("sdpa_flash",))
    (rows,) = failure_rows("host_step", parameters, "timeout", "no progress").values()
    assert [(row["variant"], row["cuda_graph"]) for row in rows] == [
        ("sdpa_flash", False), ("reference", False), ("sdpa_flash", True)
    ]  # fmt: skip
    assert {row["status"] for row in rows} == {"timeout"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can run it")
def test_what_no_cpu_runs_is_refused_in_a_sentence(capsys):
    assert host_counts.main(["--shape", "small", "--variant", "pytorch_best"]) == 1
    assert "'pytorch_best' cannot run here: attention" in capsys.readouterr().err
