"""Times one operator: its contenders in turn, on the same inputs, with cold caches.

Outputs are checked again after timing. `tnp.bench.contenders` runs the contenders.
"""

import math
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TypeVar

import torch

from tnp.bench import ceilings
from tnp.bench.contenders import Contenders, Output
from tnp.bench.evidence import Code, packages
from tnp.bench.outcome import Rows, implementation_of, key, of_contender, passes
from tnp.bench.policy import Latency, policy_of
from tnp.bench.provenance import Conditions
from tnp.bench.sampled import measured_columns, sample_rows
from tnp.bench.statistics import summarize
from tnp.bench.timing import (
    call_ms,
    first_call,
    measure_interleaved,
    measure_latency,
    synchronize,
)
from tnp.dispatch import devices
from tnp.dispatch.registry import catalog, is_automatic
from tnp.dispatch.spec import Work
from tnp.experiment.failures import classify
from tnp.experiment.kernel_code import launches

# If the fastest is shorter than this, all run from CUDA graphs, which hide the host's launch time.
# A first call decides: launching an MLP's backward of 0.4 ms takes the host more than 1 ms.
GRAPH_BELOW_MS = 2.0
# With at least this many launches in a graph, the events around it do not count either.
GRAPH_LAUNCHES = 20

# Time of an operation by number format, in units of a 16-bit product at the datasheet's rate.
SHARES = {"bfloat16": 1.0, "float16": 1.0, "float8_e4m3fn": 0.5, "e4m3": 0.5, "int8": 0.5}
SHARES |= {"tf32": 2.0}

# Allowed error of an output, as a share of the largest reference value. An absolute bound would
# see nothing at 200,000 keys, where attention's output is about as small as the bound.
MAX_RELATIVE_ERROR = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4}
# Products in narrower formats: about five standard deviations of the rounding error of a product
# of normal numbers.
MAX_RELATIVE_ERROR |= {"e4m3": 1e-1, "int8": 5e-2, "int4": 2.5e-1, "tf32": 5e-3}


class Inaccurate(ValueError):
    """Says that a timed output is wrong."""


class AboveCeiling(ValueError):
    """Says that a rate is above the device's limit: the timing is wrong."""


T = TypeVar("T")


@dataclass(frozen=True)
class Contender:
    """Holds an implementation with compiled kernels, whose calls have all run once."""

    calls: list[Callable[[], Output]]
    compile_s: float
    call_ms: float  # time of one call: decides how all contenders are timed
    peak_memory_bytes: int | None = None  # one call's, beyond the memory held before

    @classmethod
    def of(
        cls, calls: list[Callable[[], Output]], compile_s: float, device: torch.device
    ) -> "Contender":
        """Makes a contender of calls that have all run. Times the first and reads its memory."""
        if device.type != "cuda":
            return cls(calls, compile_s, call_ms(calls[0], device))
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        once_ms = call_ms(calls[0], device)
        peak = torch.cuda.max_memory_allocated(device) - before
        return cls(calls, compile_s, once_ms, peak)


def measure_op(
    parameters: dict, started: float, suspect: Callable[[list[str]], None] = lambda names: None
) -> Rows:
    """Returns tables "ops", "samples" and "code" of one operator, a row a contender and pass.

    All contenders are timed in the same rounds. If one raises, its row says so, and the others are
    measured without it.

    Args:
        parameters: the result of `tnp.bench.outcome.op_job`: `implementations` (contender →
            config_id), `timing` and `device`; and `definitions`, {implementation: hashes of its
            code by name}.
        started: `time.perf_counter()` when the process began; `setup_s` counts from there.
        suspect: is called with the contenders to blame if the next action ends this process.

    Raises:
        Exception: the inputs do not fit, or an error made the device unusable for this process.
    """
    device = torch.device(parameters["device"])
    prepare = Contenders if "problem" in parameters else ceilings.of
    tables: Rows = {"ops": [], "samples": []}
    code = {
        name: _code(parameters, name)
        for name in dict.fromkeys(map(implementation_of, parameters["implementations"]))
    }
    # A backward runs on the stream of its forward.
    with capturable_stream(device):
        for pass_ in passes(parameters):
            suspect([])
            workload = prepare(parameters, pass_, device)
            setup_s = time.perf_counter() - started
            outcomes = _measure_pass(parameters, pass_, workload, device, suspect, code)
            for contender, (columns, samples) in outcomes.items():
                row = key("op", of_contender(parameters, contender)) | {"pass": pass_} | columns
                if samples:
                    row["setup_s"] = setup_s
                tables["ops"].append(row)
                tables["samples"] += samples
            started = time.perf_counter()
    # The hash covers the kernels of both passes. A failed implementation's kernels are unknown.
    for row in tables["ops"]:
        if row["status"] == "ok":
            row["kernels_hash"] = code[row["implementation"]].kernels_hash
    return tables | {"code": [row for name, own in code.items() for row in own.rows(name)]}


def _code(parameters: dict, name: str) -> Code:
    """Returns the code that the implementation runs, as far as it is known beforehand."""
    definitions = parameters.get("definitions", {}).get(name, {})
    declared = "problem" in parameters and not is_automatic(name)
    theirs = catalog().listed(parameters["op"], name).packages if declared else {}
    return Code(packages=packages(theirs), definitions=definitions)


def _measure_pass(
    parameters: dict,
    pass_: str,
    workload: Contenders | ceilings.Ceiling,
    device: torch.device,
    suspect: Callable[[list[str]], None],
    code: dict[str, Code],
) -> dict[str, tuple[dict[str, object], list[dict[str, object]]]]:
    """Returns each contender's columns of its "ops" row, and its "samples" rows if it was timed.

    Adds the kernels that an implementation launches to its `code`.
    """
    dtype = parameters["dtype"]
    outcomes: dict[str, tuple[dict[str, object], list[dict[str, object]]]] = {}

    def each(work: Callable[[str], T], names: Iterable[str]) -> dict[str, T]:
        """Does `work` for each contender. One that fails keeps its failure as its outcome."""
        done = {}
        for name in names:
            suspect([name])
            try:
                done[name] = work(name)
            except Exception as error:  # any failure is this implementation's result
                status, reason = classify(error)
                if status != "unsupported":
                    traceback.print_exc()
                outcomes[name] = {"status": status, "reason": reason}, []
                synchronize(device)  # raises if the device can no longer be used
        return done

    def prepare(name: str) -> Contender:
        workload.require_supported(name)
        kernels: dict[str, str] = {}
        try:
            with launches() as kernels:
                calls = workload.calls(name)
                compile_s = sum(first_call(call, device) for call in calls)
        finally:
            code[implementation_of(name)].kernels |= kernels
        return Contender.of(calls, compile_s, device)

    contenders = each(prepare, parameters["implementations"])
    policy = policy_of(parameters["timing"])
    single = isinstance(policy, Latency)
    n_launches = 1 if single else launches_per_run(contenders.values(), device)
    runs = each(lambda name: replayed(contenders[name].calls, n_launches), contenders)
    suspect(list(runs))
    with Conditions(device.type) as conditions:
        timed = [calls for calls, _ in runs.values()]
        measurements = (
            measure_latency(timed, device, policy)
            if single
            else measure_interleaved(timed, device, policy, n_launches)
        )
    measured = dict(zip(runs, measurements, strict=True))

    def columns(name: str) -> dict[str, object]:
        own, (_, output) = measured[name], runs[name]
        timings = summarize(own.samples_ms, "time_ms")
        gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        bound = workload.precision(name) or dtype
        return (
            {"status": "ok", "reason": own.note}
            | timings
            | rates(workload.work(name), timings["time_ms_p50"], gpu)
            | {"launch_config": workload.launch_config(name)}
            # The planner knows no precision of other packages: it does not import them.
            | {"precision": workload.precision(name)}
            | {"max_abs_error": checked_error(workload.check(name, output()), bound)}
            | {"compile_s": contenders[name].compile_s}
            | {"plan_ms": workload.plan_ms(name)}
            | {"peak_memory_bytes": contenders[name].peak_memory_bytes}
            | measured_columns(own, conditions)
        )

    for name, row in each(columns, runs).items():
        own = of_contender(parameters, name)
        outcomes[name] = row, sample_rows(own, pass_, measured[name], conditions)
    return outcomes


def capturable_stream(device: torch.device) -> AbstractContextManager:
    """Runs the block on a new stream on CUDA: the default stream cannot be captured."""
    return torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext()


def launches_per_run(contenders: Iterable[Contender], device: torch.device) -> int:
    """Returns how many launches a graph holds: whole rotations of the inputs; 1 without a graph."""
    fastest = min(contenders, key=lambda contender: contender.call_ms, default=None)
    if device.type != "cuda" or fastest is None or fastest.call_ms >= GRAPH_BELOW_MS:
        return 1
    return len(fastest.calls) * math.ceil(GRAPH_LAUNCHES / len(fastest.calls))


def replayed(
    calls: list[Callable[[], Output]], n_launches: int
) -> tuple[list[Callable[[], object]], Callable[[], Output]]:
    """Returns the functions to time, and one that returns the output for the first inputs."""
    if n_launches == 1:
        return calls, calls[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        # Outputs of the last rotation are kept, without autograd's saved tensors. So memory that is
        # written again was last touched a whole rotation ago, and is no longer in cache.
        outputs = deque(maxlen=len(calls))
        outputs.extend(detached(call()) for call in islice(cycle(calls), n_launches))
    return [graph.replay], lambda: outputs[0]


def detached(output: Output) -> Output:
    if isinstance(output, tuple):
        return tuple(map(detached, output))
    return None if output is None else output.detach()


def rates(work: Work, time_ms: float, gpu: str) -> dict[str, float | None]:
    """Returns the columns flops, bytes, bytes_written, tflops and gb_per_s.

    Raises AboveCeiling if a rate is above the datasheet of the GPU named `gpu`.
    """
    flops = sum(work.flops.values()) or None
    tflops = None if flops is None else flops / time_ms / 1e9
    gb_per_s = work.bytes / time_ms / 1e6
    if sheet := devices.datasheet(gpu):
        in_16_bits = sum(SHARES.get(kind, 0.0) * number for kind, number in work.flops.items())
        for rate, best, unit in (
            (in_16_bits / time_ms / 1e9, sheet.flops_per_s / 1e12, "TFLOP/s"),
            (gb_per_s, sheet.bytes_per_s / 1e9, "GB/s"),
        ):
            if rate > best:
                raise AboveCeiling(f"{rate:.0f} {unit} is above what {gpu} can do, {best:.0f}")
    return {
        "flops": flops,
        "bytes": work.bytes,
        "bytes_written": work.written,
        "tflops": tflops,
        "gb_per_s": gb_per_s,
    }


def checked_error(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], dtype: str) -> float:
    """Returns the largest absolute error of (measured, reference) pairs.

    Raises Inaccurate past the bound of `dtype`, the format of the computation: a key of
    `MAX_RELATIVE_ERROR`.
    """
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
