"""Tests benchmarks of the model's operators as the workflow asks for them, and the ceilings.

`test_measure.py` has what holds for every operator that is declared.
"""

import re
import time

import pytest
import torch

from tests.bench.configurations import TIMING, op_parameters
from tests.refusals import assert_refused
from tnp.bench import ceilings, measure
from tnp.bench.measure import Inaccurate, checked_error, measure_op
from tnp.dispatch.registry import Listed, catalog
from tnp.dispatch.spec import Implementation, Work
from tnp.experiment.failures import Unsupported
from tnp.store.schemas import CEILINGS, PROVENANCE, RUN, TABLES

BOTH = {"sdpa_flash": "attention--tiny--sdpa_flash", "other": "attention--tiny--other"}
# Operators on rows, with sizes of their own; at float32 PyTorch's plain form is nearly exact.
ROW_OPERATORS = {
    "add_rms_norm": {"rows": 42, "width": 32},
    "mlp": {"rows": 42, "d_model": 32, "d_ff": 64},
    "mixture_heads": {"rows": 42, "d_model": 32, "d_ff": 64, "n_components": 3, "n_outputs": 3},
    "mixture_nll": {"rows": 42, "n_components": 3, "d_y": 1},
}


@pytest.fixture
def other(monkeypatch):
    """Has an implementation of attention, "other", be computed by a function of its inputs."""

    def install(replacement):
        known = catalog()
        own = Implementation("other", run=replacement, provider="torch")
        listed = Listed("attention", "other", len(known.names("attention")), own)
        monkeypatch.setitem(known._listed, ("attention", "other"), listed)

    return install


def reached(op: str, dtype: str = "float32") -> dict:
    """Returns the row of a ceiling."""
    parameters = op_parameters(implementations={"torch": "ceilings--it"}, dtype=dtype)
    del parameters["problem"], parameters["draw"]
    (row,) = measure_op(parameters | {"op": op}, time.perf_counter())["ops"]
    return row


def plain(*inputs, **rest):
    return catalog().operator("attention").reference(*inputs, **rest)


def measured(suspect=lambda names: None, **changes) -> dict[tuple[str, str], dict]:
    """Returns the rows of a job of two by implementation and pass."""
    parameters = op_parameters(**{"implementations": BOTH} | changes)
    rows = measure_op(parameters, time.perf_counter(), suspect)["ops"]
    return {(row["implementation"], row["pass"]): row for row in rows}


def test_implementations_take_turns_on_the_same_inputs(other, monkeypatch):
    calls = []
    right = measure.measure_interleaved

    def interleaved(*arguments, **rest):
        calls.clear()
        return right(*arguments, **rest)

    def run(q, k, v, *others, **rest):
        calls.append((q.data_ptr(), k.data_ptr(), v.data_ptr(), q.stride()))
        return plain(q, k, v, *others, **rest)

    other(run)
    monkeypatch.setattr(measure, "measure_interleaved", interleaved)
    measured(passes=["forward"])
    assert len(calls) >= TIMING["min_samples"] and len(set(calls)) == 1


def out_of_memory(*_, **__):
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize(
    ("run", "status", "reason"),
    [
        (out_of_memory, "oom", "^CUDA out of memory.$"),
        (lambda *inputs, **rest: plain(*inputs, **rest) * 1.01, "error", "after timing"),
        (lambda *inputs, **rest: plain(*inputs, **rest) * float("nan"), "error", "after timing"),
        (None, "unsupported", "needs a CUDA device"),
    ],
)
def test_a_failure_of_one_implementation_is_its_row_alone(other, run, status, reason):
    """A wrong output is a failure too. None stands for cuDNN, which no CPU runs."""
    name = "sdpa_cudnn" if run is None else "other"
    if run is not None:
        other(run)
    rows = measured(implementations={one: f"tiny--{one}" for one in ("sdpa_flash", name)})
    for pass_ in ("forward", "backward"):
        row = rows[name, pass_]
        assert row["status"] == status and re.search(reason, row["reason"])
        assert "time_ms_p50" not in row
        assert rows["sdpa_flash", pass_]["status"] == "ok"


def test_a_failing_backward_leaves_the_forward(monkeypatch):
    monkeypatch.setattr(torch.autograd, "grad", out_of_memory)
    rows = measured(implementations={"sdpa_flash": "attention--tiny--sdpa_flash"})
    assert rows["sdpa_flash", "forward"]["status"] == "ok"
    assert rows["sdpa_flash", "backward"]["status"] == "oom"


def test_who_runs_is_known_before_it_runs(other):
    suspects = []

    def run(*inputs, **rest):
        assert suspects[-1] in (["other"], list(BOTH))
        return plain(*inputs, **rest)

    other(run)
    rows = measured(suspects.append)
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert suspects[:3] == [[], ["sdpa_flash"], ["other"]] and list(BOTH) in suspects


def test_a_device_that_is_lost_ends_the_job(other, monkeypatch):
    def crash(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def synchronize(device):
        if suspects[-1] == ["other"]:
            crash()

    suspects = []
    other(crash)
    monkeypatch.setattr(measure, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        measured(suspects.append)
    assert suspects[-1] == ["other"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_nan_never_passes_and_a_small_reference_is_held_to_its_own_size(dtype):
    reference = torch.randn(8, dtype=torch.float64)
    small = torch.full((8,), 1e-3, dtype=torch.float64)
    for pair in ((torch.full((8,), float("nan")), reference), (torch.zeros(8), small)):
        with pytest.raises(Inaccurate):
            checked_error([pair], dtype)
    assert checked_error([(reference.float(), reference)], dtype) < 1e-6


@pytest.mark.parametrize("op", ROW_OPERATORS)
def test_an_operator_on_rows_fills_a_row_for_each_pass(op):
    parameters = op_parameters(op=op, sizes=ROW_OPERATORS[op], batch=2, n_q=21)
    rows = {row["pass"]: row for row in measure_op(parameters, time.perf_counter())["ops"]}
    added = {name for name, _ in PROVENANCE + RUN}
    for row in rows.values():
        assert row["status"] == "ok", row["reason"]
        assert set(row) | added == set(TABLES["ops"].names)
        assert (row["batch"], row["n_q"], row["n_k"]) == (2, 21, None)
        assert row["problem"] == parameters["problem"] and 0 <= row["max_abs_error"] < 1e-4
    forward, backward = rows["forward"], rows["backward"]
    assert backward["bytes"] >= forward["bytes"] > 0
    if op in ("mlp", "mixture_heads"):
        assert backward["flops"] == 2 * forward["flops"] and backward["tflops"] > 0
    else:
        assert backward["flops"] is backward["tflops"] is None


def test_the_ceilings(monkeypatch):
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", 96)
    monkeypatch.setattr(ceilings, "COPY_BYTES", 2**16)
    monkeypatch.setattr(ceilings, "READ_BYTES", 2**20)
    matmul, copy, read = map(reached, CEILINGS)
    assert (matmul["config_id"], matmul["implementation"]) == ("ceilings--it", "torch")
    assert matmul["flops"] == 2 * 96**3
    assert copy["bytes"] == 2 * 2**16 and copy["tflops"] is None and copy["max_abs_error"] == 0
    assert copy["bytes_written"] == 2**16
    assert read["bytes"] - read["bytes_written"] == 2**20 and read["tflops"] is None
    assert read["bytes_written"] < 0.01 * read["bytes"]


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "tf32", "int8"])
def test_a_ceiling_of_products_is_of_a_number_format(monkeypatch, kind):
    monkeypatch.setattr(ceilings, "MATMUL_SIZE", 96)
    before = torch.get_float32_matmul_precision()
    try:
        row = reached("ceiling_matmul", kind)
    finally:
        torch.set_float32_matmul_precision(before)
    assert (row["status"], row["dtype"]) == ("ok", kind) and row["flops"] == 2 * 96**3


def test_a_format_that_the_gpu_does_not_multiply_in_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(Unsupported, match="8.9"):
        ceilings._matmul({"dtype": "e4m3"}, torch.device("cuda"), None)


def test_latency_is_of_single_calls_and_its_rows_say_so():
    timing = TIMING | {"latency": {"warmup_calls": 3, "launches": 12, "flushed_caches": 1}}
    job = op_parameters(implementations=BOTH | {"sdpa_flash--twin1": "t"}, timing=timing)
    del job["implementations"]["other"]
    tables = measure_op(job, time.perf_counter())
    throughput = measure_op(job | {"timing": TIMING}, time.perf_counter())
    for row in tables["ops"]:
        assert (row["timing"], row["n_samples"], row["n_warmup"]) == ("latency", 12, 3)
        assert row["time_ms_p50"] <= row["time_ms_p95"] <= row["time_ms_p99"]
    assert {row["n_launches"] for row in tables["samples"]} == {1}
    assert {row["timing"] for row in throughput["ops"]} == {"throughput"}
    assert tables["ops"][0]["timing_hash"] != throughput["ops"][0]["timing_hash"]


def test_an_impossible_rate_is_an_error():
    h200 = "NVIDIA H200"

    def rates(gpu: str, flops: float, moved: float, kind: str = "bfloat16") -> dict:
        return measure.rates(Work({kind: flops * 1e9}, moved * 1e6, 0.0), 1.0, gpu)

    possible = rates(h200, 790.0, 4200.0)
    assert possible == {
        "flops": 790e9, "bytes": 4200e6, "bytes_written": 0.0, "tflops": 790.0, "gb_per_s": 4200.0
    }  # fmt: skip
    assert rates(h200, 450.0, 0.0, "tf32")["tflops"] == 450.0
    assert rates("Some GPU of 2030", 1e6, 1e6)["tflops"] == 1e6
    assert rates(h200, 1200.0, 4200.0, "e4m3")["tflops"] == 1200.0
    assert_refused(
        (lambda: rates(h200, 600.0, 0.0, "tf32"), "TFLOP/s is above"),
        (lambda: rates(h200, 1200.0, 4200.0), "1200 TFLOP/s"),
        (lambda: rates(h200, 0.0, 5000.0), "5000 GB/s"),
        error=measure.AboveCeiling,
    )


def test_short_kernels_are_launched_from_graphs_of_whole_rotations():
    def launches(device: str, *calls_ms: float, n_inputs: int = 3) -> int:
        contenders = [measure.Contender([None] * n_inputs, 0.0, ms) for ms in calls_ms]
        return measure.launches_per_run(contenders, torch.device(device))

    assert launches("cuda", 5.0, 0.5) == 21  # all of them, however slow: launched alike
    assert launches("cuda", 0.5, n_inputs=25) == 25
    assert launches("cuda", 5.0, 2.5) == launches("cpu", 0.5) == launches("cuda") == 1


def test_a_row_says_what_it_ran_on():
    """Kernels, packages and definitions, of each implementation its own; hashes digest them."""
    reached = {"torch": {"tnp.ops.mlp:mlp": "1"}, "fused": {"tnp.ops.mlp:mlp": "1", "x:y": "2"}}
    names = {name: f"mlp--tiny--{name}" for name in reached}
    sizes = {"rows": 8, "d_model": 32, "d_ff": 64}
    parameters = op_parameters("mlp", sizes=sizes, implementations=names, definitions=reached)
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
    assert {row["gates"] for row in tables["ops"]} == {"", "op--mlp--fused"}
