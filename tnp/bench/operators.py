"""Benchmark of one operator: cold caches, real inputs, outputs checked again after timing."""

import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import cycle, islice

import torch

from tnp.bench.outcome import CEILINGS, classify, failure_rows, require_supported
from tnp.bench.provenance import Conditions
from tnp.bench.roofline import above_ceiling
from tnp.bench.statistics import summarize
from tnp.bench.steps import sample_rows
from tnp.bench.timing import Measurement, Policy, first_call, measure, time_calls
from tnp.bench.workloads import WORKLOADS, Output

# Kernels shorter than this run from a CUDA graph, where the host's launch time is not seen …
GRAPH_BELOW_MS = 1.0
# … with at least this many launches in it, so that the events around a replay are not seen either.
GRAPH_LAUNCHES = 20
PROBE_CALLS = 2

# Share of the largest reference value that an output may be off. An absolute bound sees nothing
# at 200,000 keys, where an attention output is about as small as the bound; the gates hold those.
MAX_RELATIVE_ERROR = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4}


class Inaccurate(ValueError):
    """An output that was timed is wrong."""


class AboveCeiling(ValueError):
    """A rate that the device cannot reach: the timing is wrong."""


def measure_op(parameters: dict, started: float) -> dict[str, list[dict[str, object]]]:
    """Tables "ops" and "samples" of one operator, one row a pass.

    A pass that fails is a row with its status and reason; the others stand.

    Args:
        parameters: the op key, `timing` and `device`.
        started: `time.perf_counter()` when the process began; `setup_s` counts from there.
    """
    op, device = parameters["op"], torch.device(parameters["device"])
    if op not in WORKLOADS:
        raise ValueError(f"unknown op {op!r}: choose from {', '.join(WORKLOADS)}")
    if op not in CEILINGS:
        dtype = getattr(torch, parameters["dtype"])
        require_supported(op, parameters["implementation"], device, dtype)
    rows, samples = [], []
    # A backward runs on the stream of its forward, and the default stream cannot be captured.
    stream = torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext()
    with stream:
        for row in failure_rows("op", parameters, "error", "not measured")["ops"]:
            try:
                columns, measurement = _measure_pass(parameters, row["pass"], device, started)
                samples += sample_rows(parameters, row["pass"], measurement)
            except Exception as error:  # whatever it was, it is this pass's result
                traceback.print_exc()
                columns = dict(zip(("status", "reason"), classify(error), strict=True))
            rows.append(row | columns)
            started = time.perf_counter()
    return {"ops": rows, "samples": samples}


def _measure_pass(
    parameters: dict, pass_: str, device: torch.device, started: float
) -> tuple[dict[str, object], Measurement]:
    """The columns of an "ops" row beyond its key.

    Raises Inaccurate and AboveCeiling, and whatever the operator itself raises.
    """
    workload = WORKLOADS[parameters["op"]](parameters, pass_, device)
    setup_s = time.perf_counter() - started
    policy = Policy.from_parameters(parameters["timing"])
    compile_s = sum(first_call(call, device) for call in workload.calls)
    run, n_launches, output = _launcher(workload.calls, device)
    with Conditions(device.type) as conditions:
        measurement = measure(run, device, policy, n_launches)
    timings = summarize(measurement.samples_ms, "time_ms")
    median_s = timings["time_ms_p50"] / 1e3
    tflops = None if workload.flops is None else workload.flops / median_s / 1e12
    gb_per_s = workload.bytes / median_s / 1e9
    refuse_impossible(device, parameters["dtype"], tflops, gb_per_s)
    row = (
        {"status": "ok", "reason": measurement.note}
        | timings
        | {"flops": workload.flops, "bytes": workload.bytes}
        | {"tflops": tflops, "gb_per_s": gb_per_s}
        | {"max_abs_error": checked_error(workload.check(output()), parameters["dtype"])}
        | {"n_samples": len(measurement.samples_ms), "n_warmup": measurement.n_warmup}
        | {"setup_s": setup_s, "compile_s": compile_s, "measure_s": measurement.measure_s}
        | conditions.row()
    )
    return row, measurement


def refuse_impossible(
    device: torch.device, dtype: str, tflops: float | None, gb_per_s: float
) -> None:
    """Raises AboveCeiling if the device's datasheet says that no kernel runs at these rates."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if impossible := above_ceiling(name, dtype, tflops, gb_per_s):
            raise AboveCeiling(impossible)


def _launcher(
    calls: list[Callable[[], Output]], device: torch.device
) -> tuple[list[Callable[[], object]], int, Callable[[], Output]]:
    """What to time, its launches a call, and how to get the output of `calls[0]` afterwards."""
    if device.type != "cuda":
        return calls, 1, calls[0]
    if min(time_calls(cycle(calls), PROBE_CALLS, device)) >= GRAPH_BELOW_MS:
        return calls, 1, calls[0]
    n_launches = max(len(calls), GRAPH_LAUNCHES)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        # Kept, so that each launch writes memory of its own: a reused output would stay in cache.
        outputs = [call() for call in islice(cycle(calls), n_launches)]
    return [graph.replay], n_launches, lambda: outputs[0]


def checked_error(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], dtype: str) -> float:
    """Largest absolute error over (measured, reference) pairs; Inaccurate past the bound."""
    worst = 0.0
    for measured, reference in pairs:
        error = (measured.detach().to(reference.dtype) - reference).abs().max().item()
        largest = reference.abs().max().item()
        bound = MAX_RELATIVE_ERROR[dtype] * largest
        if not error <= bound:  # NaN never passes
            raise Inaccurate(
                f"after timing the output was off by {error:.2e}: at most {bound:.2e} is right"
            )
        worst = max(worst, error)
    return worst
