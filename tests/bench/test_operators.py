import json
import time

import pytest
import torch

from tests.bench.configurations import TIMING, op_parameters
from tnp.bench import measure, undeclared, workloads
from tnp.bench.measure import Inaccurate, checked_error, measure_op
from tnp.bench.outcome import twins
from tnp.ops import auto
from tnp.schemas import PROVENANCE, RUN, TABLES

BOTH = {"sdpa_flash": "attention--tiny--sdpa_flash", "reference": "attention--tiny--reference"}


# Operators on rows, with sizes of their own; at float32 PyTorch's plain form is nearly exact.
ROW_OPERATORS = {
    "rms_norm": {"d_model": 32},
    "mlp": {"d_model": 32, "d_ff": 45, "d_ff_storage": 64},
    "mixture_heads": {"d_model": 32, "d_ff": 45, "d_ff_storage": 64, "n_components": 3},
    "mixture_nll": {"n_components": 3},
}


def of_rows(op: str, *names: str, **changes) -> dict[tuple[str, str], dict]:
    """By implementation and pass, of a job of an operator on rows."""
    sizes = dict.fromkeys(("n_k", "n_heads", "head_dim")) | ROW_OPERATORS[op]
    implementations = {name: f"{op}--tiny--{name}" for name in names}
    parameters = op_parameters(op=op, implementations=implementations, **sizes, **changes)
    rows = measure_op(parameters, time.perf_counter())["ops"]
    return {(row["implementation"], row["pass"]): row for row in rows}


@pytest.fixture(autouse=True)
def launch_config(monkeypatch):
    """The kernels' own description of a launch has tests of its own."""

    def describe(q, k, pass_, implementation):
        return f"{implementation} {pass_} {q.shape[2]}x{k.shape[2]}"

    monkeypatch.setattr(workloads, "describe_launch", describe)


@pytest.fixture
def attention(monkeypatch):
    """Have `reference` be computed by the function that this is called with."""
    right = workloads.attention

    def install(replacement):
        def attention(*qkv, implementation):
            if implementation == "reference":
                return replacement(right(*qkv, implementation=implementation))
            return right(*qkv, implementation=implementation)

        monkeypatch.setattr(workloads, "attention", attention)

    return install


def measured(**changes) -> dict[str, dict]:
    """By pass, of a job of one implementation."""
    rows = measure_op(op_parameters(**changes), time.perf_counter())["ops"]
    return {row["pass"]: row for row in rows}


def both(**changes) -> dict[tuple[str, str], dict]:
    """By implementation and pass, of a job of two."""
    parameters = op_parameters(**{"implementations": BOTH} | changes)
    rows = measure_op(parameters, time.perf_counter())["ops"]
    assert len(rows) == 2 * len(parameters["implementations"])
    return {(row["implementation"], row["pass"]): row for row in rows}


@pytest.mark.parametrize("n_q, n_k", [(21, 13), (5, 40)])
def test_attention_fills_a_row_for_each_pass(n_q, n_k):
    rows = measured(n_q=n_q, n_k=n_k)
    added = {name for name, _ in PROVENANCE + RUN}
    assert list(rows) == ["forward", "backward"]
    for pass_, row in rows.items():
        assert row["status"] == "ok"
        assert set(row) | added == set(TABLES["ops"].names)
        assert row["config_id"] == "attention--tiny--sdpa_flash"
        assert row["launch_config"] == f"sdpa_flash {pass_} {n_q}x{n_k}"
        assert 0 < row["max_abs_error"] < 1e-4
    assert rows["backward"]["flops"] == 2.5 * rows["forward"]["flops"]


def test_every_implementation_has_its_rows_and_samples():
    tables = measure_op(op_parameters(implementations=BOTH), time.perf_counter())
    assert {(row["config_id"], row["pass"]) for row in tables["ops"]} == {
        (config_id, pass_) for config_id in BOTH.values() for pass_ in ("forward", "backward")
    }
    for row in tables["ops"]:
        assert BOTH[row["implementation"]] == row["config_id"]
        times = [
            sample["time_ms"]
            for sample in tables["samples"]
            if (sample["config_id"], sample["pass"]) == (row["config_id"], row["pass"])
        ]
        assert len(times) == row["n_samples"]
        assert min(times) == row["time_ms_min"]


def test_implementations_take_turns_on_the_same_inputs(monkeypatch):
    calls = []
    right = workloads.attention

    def attention(q, k, v, *, implementation):
        calls.append((implementation, (q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride())))
        return right(q, k, v, implementation=implementation)

    monkeypatch.setattr(workloads, "attention", attention)
    monkeypatch.setattr(measure, "passes", lambda parameters: ("forward",))
    measure_op(op_parameters(implementations=BOTH), time.perf_counter())
    assert len({inputs for _, inputs in calls}) == 1
    timed = [name for name, _ in calls][-2 - 2 * TIMING["min_samples"] : -2]  # 2: the checks
    turns = [set(timed[i : i + 2]) for i in range(0, len(timed), 2)]
    assert turns == [set(BOTH)] * TIMING["min_samples"]


@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_a_wrong_output_is_an_error_and_not_a_record(attention, wrong):
    attention(lambda o: o * wrong)
    rows = both()
    for pass_ in ("forward", "backward"):
        row = rows["reference", pass_]
        assert row["status"] == "error"
        assert "after timing" in row["reason"]
        assert "time_ms_p50" not in row
        assert rows["sdpa_flash", pass_]["status"] == "ok"


def test_what_one_implementation_raises_is_its_row_alone(attention):
    def out_of_memory(o):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    attention(out_of_memory)
    rows = both()
    for pass_ in ("forward", "backward"):
        row = rows["reference", pass_]
        assert (row["status"], row["reason"]) == ("oom", "CUDA out of memory.")
        assert rows["sdpa_flash", pass_]["status"] == "ok"


def test_a_forward_only_implementation_has_its_forward(attention):
    def forward_only(o):
        if o.requires_grad:
            raise NotImplementedError("forward only")
        return o

    attention(forward_only)
    rows = both()
    assert rows["reference", "forward"]["status"] == "ok"
    row = rows["reference", "backward"]
    assert (row["status"], row["reason"]) == ("unsupported", "forward only")
    assert rows["sdpa_flash", "backward"]["status"] == "ok"


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


def test_who_runs_is_known_before_it_runs(attention):
    suspects = []

    def reference(o):
        assert suspects[-1] in (["reference"], list(BOTH))
        return o

    attention(reference)
    measure_op(op_parameters(implementations=BOTH), time.perf_counter(), suspects.append)
    assert suspects[:4] == [[], ["sdpa_flash"], ["reference"], ["sdpa_flash"]]
    assert list(BOTH) in suspects


def test_a_device_that_is_lost_ends_the_job(attention, monkeypatch):
    def crash(o):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def synchronize(device):
        if suspects[-1] == ["reference"]:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    suspects = []
    attention(crash)
    monkeypatch.setattr(measure, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measure_op(op_parameters(implementations=BOTH), time.perf_counter(), suspects.append)
    assert suspects[-1] == ["reference"]


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


@pytest.mark.parametrize("op", ROW_OPERATORS)
def test_an_operator_on_rows_fills_a_row_for_each_pass(op):
    rows = of_rows(op, "torch")
    added = {name for name, _ in PROVENANCE + RUN}
    for pass_ in ("forward", "backward"):
        row = rows["torch", pass_]
        assert row["status"] == "ok"
        assert set(row) | added == set(TABLES["ops"].names)
        assert {name: row[name] for name in ROW_OPERATORS[op]} == ROW_OPERATORS[op]
        assert row["n_k"] is None and 0 < row["max_abs_error"] < 1e-4
    forward, backward = rows["torch", "forward"], rows["torch", "backward"]
    assert backward["bytes"] >= forward["bytes"] > 0
    if op in ("mlp", "mixture_heads"):
        assert backward["flops"] == 2 * forward["flops"] and backward["tflops"] > 0
    else:
        assert backward["flops"] is backward["tflops"] is None


@pytest.mark.parametrize("op", ROW_OPERATORS)
def test_compiled_is_pytorchs_plain_form_under_compile(op, monkeypatch):
    right, compiled = torch.compile, []

    def compile(function, **options):
        compiled.append(options)
        return right(function, backend="aot_eager", **options)

    monkeypatch.setattr(torch, "compile", compile)
    monkeypatch.setattr(undeclared, "require_supported", lambda *_: None)
    torch._dynamo.reset()
    rows = of_rows(op, "torch", "compiled")
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert compiled == [{"fullgraph": True, "dynamic": False}] * 2


def test_every_gradient_that_the_model_needs_is_timed_and_checked(monkeypatch):
    from tnp.ops import rms_norm

    right = rms_norm.add_rms_norm

    def wrong_weight_gradient(x, update, weight, *, implementation):
        return right(x, update, weight * 1.1 - weight.detach() * 0.1, implementation=implementation)

    monkeypatch.setattr(rms_norm, "add_rms_norm", wrong_weight_gradient)
    rows = of_rows("rms_norm", "torch")
    assert rows["torch", "forward"]["status"] == "ok"
    assert rows["torch", "backward"]["status"] == "error"
    assert "after timing" in rows["torch", "backward"]["reason"]


def test_weights_are_scaled_by_fan_in_and_padded_with_zeros():
    normal = workloads.Normal(op_parameters(), torch.device("cpu"))
    up = normal.weight(45, 400, dim=0, storage=64)
    down = normal.weight(400, 45, dim=1, storage=64)
    assert (up.shape, down.shape) == ((64, 400), (400, 64))
    assert up[45:].count_nonzero() == down[:, 45:].count_nonzero() == 0
    assert up[:45].std() == pytest.approx(400**-0.5, rel=0.1)
    assert down[:, :45].std() == pytest.approx(45**-0.5, rel=0.1)


def test_the_ceilings(monkeypatch):
    monkeypatch.setattr(workloads, "MATMUL_SIZE", 96)
    monkeypatch.setattr(workloads, "COPY_BYTES", 2**16)
    sizes = dict.fromkeys(("n_q", "n_k", "n_heads", "head_dim", "batch"))
    torch_alone = {"implementations": {"torch": "ceilings--it"}}
    (matmul,) = measured(op="matmul", **torch_alone, **sizes).values()
    assert (matmul["config_id"], matmul["implementation"]) == ("ceilings--it", "torch")
    assert matmul["flops"] == 2 * 96**3
    (copy,) = measured(op="copy", **torch_alone, **sizes).values()
    assert copy["bytes"] == 2 * 2**16 and copy["tflops"] is None and copy["max_abs_error"] == 0


def test_what_the_cpu_cannot_run_is_a_row_with_the_reason():
    names = {name: f"attention--tiny--{name}" for name in ("sdpa_cudnn", "sdpa_flash")}
    rows = both(implementations=names)
    for pass_ in ("forward", "backward"):
        assert rows["sdpa_cudnn", pass_]["status"] == "unsupported"
        assert "cuDNN needs a CUDA device" in rows["sdpa_cudnn", pass_]["reason"]
        assert rows["sdpa_flash", pass_]["status"] == "ok"


def test_an_unknown_operator_is_named():
    with pytest.raises(ValueError, match="'convolution': choose from attention"):
        measured(op="convolution")


def test_an_impossible_rate_is_an_error(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    cuda = torch.device("cuda")
    measure.refuse_impossible(cuda, "bfloat16", 790.0, 4200.0)
    with pytest.raises(measure.AboveCeiling, match="1200 TFLOP/s"):
        measure.refuse_impossible(cuda, "bfloat16", 1200.0, 4200.0)


def test_short_kernels_are_launched_from_graphs_of_whole_rotations():
    def launches(device: str, *calls_ms: float, n_inputs: int = 3) -> int:
        contenders = [measure.Contender([None] * n_inputs, 0.0, ms) for ms in calls_ms]
        return measure.launches_per_run(contenders, torch.device(device))

    assert launches("cuda", 5.0, 0.5) == 21  # all of them, however slow: launched alike
    assert launches("cuda", 0.5, n_inputs=25) == 25
    assert launches("cuda", 5.0, 2.5) == launches("cpu", 0.5) == launches("cuda") == 1


@pytest.mark.parametrize("op", ["mlp", "mixture_nll"])
def test_auto_is_timed_and_says_what_it_chose(op):
    rows = of_rows(op, "torch", "auto")
    for pass_ in ("forward", "backward"):
        assert rows["auto", pass_]["status"] == "ok"
        chosen = json.loads(rows["auto", pass_]["launch_config"])
        assert chosen == {"implementation": "torch", "source": "default"}
        assert rows["torch", pass_]["launch_config"] is None


def test_auto_says_how_what_it_chose_was_launched(monkeypatch):
    chosen = auto.Choice("sdpa_flash", "nearest")
    monkeypatch.setattr(auto, "choose", lambda *problem: chosen)
    monkeypatch.setattr(workloads, "describe_launch", lambda *_: '{"kernel": "few_keys"}')
    row = measured(implementations={"auto": "attention--tiny--auto"})["forward"]
    assert json.loads(row["launch_config"]) == {
        "implementation": "sdpa_flash",
        "source": "nearest",
        "launch": {"kernel": "few_keys"},
    }


def test_a_twin_is_another_contender_of_the_same_implementation():
    names = ["sdpa_flash", *twins("sdpa_flash", 2)]
    contenders = {name: f"attention--tiny--{name}" for name in names}
    tables = measure_op(op_parameters(implementations=contenders), time.perf_counter())
    assert [row["twin"] for row in tables["ops"]] == [False, True, True] * 2
    assert {row["implementation"] for row in tables["ops"]} == {"sdpa_flash"}
    assert {row["config_id"] for row in tables["samples"]} == set(contenders.values())
    assert {row["implementation"] for row in tables["code"]} == {"sdpa_flash"}


def test_a_row_says_what_it_ran_on():
    """Kernels, packages and definitions, of each implementation its own; hashes digest them."""
    reached = {"torch": {"tnp.ops.mlp:mlp": "1"}, "fused": {"tnp.ops.mlp:mlp": "1", "x:y": "2"}}
    names = {name: f"mlp--tiny--{name}" for name in reached}
    parameters = op_parameters(
        op="mlp", **ROW_OPERATORS["mlp"], n_k=None, implementations=names, definitions=reached
    )
    tables = measure_op(parameters, time.perf_counter())
    code = {
        (name, part): {row["name"] for row in tables["code"]
                       if (row["implementation"], row["part"]) == (name, part)}
        for name in reached for part in ("kernel", "package", "definition")
    }  # fmt: skip
    assert code["torch", "kernel"] == set()
    assert code["fused", "kernel"]
    assert all(name.startswith("tnp.ops.") for name in code["fused", "kernel"])
    assert code["torch", "package"] >= {"torch", "triton"}
    assert {name: code[name, "definition"] for name in reached} == {
        name: set(own) for name, own in reached.items()
    }
    hashes = {row["implementation"]: (row["kernels_hash"], row["source_hash"], row["role"])
              for row in tables["ops"]}  # fmt: skip
    assert all(all(own) for own in hashes.values())
    assert not set(hashes["torch"]) & set(hashes["fused"])
    assert {row["gates"] for row in tables["ops"]} == {"", "mlp|kernels"}
