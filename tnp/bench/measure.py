"""Benchmark of one operator: its contenders in turn, on the same inputs, with cold caches.

Outputs are checked again after timing. What contenders run is of `tnp.bench.contenders`.
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

# Where the fastest is shorter than this, all run from CUDA graphs: the host's launch time is not
# seen there. A first call shows it: an MLP's backward of 0.4 ms takes the host more than 1 …
GRAPH_BELOW_MS = 2.0
# … nor, with at least this many launches in one, the events around it.
GRAPH_LAUNCHES = 20

# Of an operation, by its number format, of one at the datasheet's rate: a product in 16 bits.
SHARES = {"bfloat16": 1.0, "float16": 1.0, "float8_e4m3fn": 0.5, "e4m3": 0.5, "int8": 0.5}
SHARES |= {"tf32": 2.0}

# Share of the largest reference value that an output may be off. An absolute bound sees nothing
# at 200,000 keys, where an attention output is about as small as the bound; the gates hold those.
MAX_RELATIVE_ERROR = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4}
# The same of products in narrower formats: some five standard deviations of what their rounding
# leaves in a product of normal numbers, over the largest of as many deviations.
MAX_RELATIVE_ERROR |= {"e4m3": 1e-1, "int8": 5e-2, "int4": 2.5e-1, "tf32": 5e-3}


class Inaccurate(ValueError):
    """An output that was timed is wrong."""


class AboveCeiling(ValueError):
    """A rate that the device cannot reach: the timing is wrong."""


T = TypeVar("T")


@dataclass(frozen=True)
class Contender:
    """An implementation whose kernels are compiled and whose calls have all run once."""

    calls: list[Callable[[], Output]]
    compile_s: float
    call_ms: float  # by nobody watched: it decides how all are timed
    peak_memory_bytes: int | None = None  # of one call, beyond what was there

    @classmethod
    def of(
        cls, calls: list[Callable[[], Output]], compile_s: float, device: torch.device
    ) -> "Contender":
        """Of calls that have all run, the first of which is timed and its memory read."""
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
    """Tables "ops", "samples" and "code" of one operator at one size, a row a contender and pass.

    All contenders are timed in the same rounds. What one of them raises is its row, and the others
    are measured without it.

    Args:
        parameters: what `tnp.bench.outcome.op_job` gives: `implementations` (contender →
            config_id), `timing`, `device`; and `definitions`, the hashes of what an implementation
            reaches by its name and theirs.
        started: `time.perf_counter()` when the process began; `setup_s` counts from there.
        suspect: told whom to blame should this process not survive what comes next.

    Raises:
        Exception: the inputs do not fit, or an error made the device useless to this process.
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
    # Of both passes: an implementation's kernels are those of its whole run. What a failed one
    # would have launched is not known.
    for row in tables["ops"]:
        if row["status"] == "ok":
            row["kernels_hash"] = code[row["implementation"]].kernels_hash
    return tables | {"code": [row for name, own in code.items() for row in own.rows(name)]}


def _code(parameters: dict, name: str) -> Code:
    """What the implementation runs on as far as that is known before it runs."""
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
    """Each contender's columns of its "ops" row, and its "samples" rows if it could be timed.

    The kernels that an implementation launches are added to its `code`.
    """
    dtype = parameters["dtype"]
    outcomes: dict[str, tuple[dict[str, object], list[dict[str, object]]]] = {}

    def each(work: Callable[[str], T], names: Iterable[str]) -> dict[str, T]:
        """`work` of those for which it succeeds; the others' outcome is their failure."""
        done = {}
        for name in names:
            suspect([name])
            try:
                done[name] = work(name)
            except Exception as error:  # whatever it was, it is this implementation's result
                status, reason = classify(error)
                if status != "unsupported":
                    traceback.print_exc()
                outcomes[name] = {"status": status, "reason": reason}, []
                synchronize(device)  # raises where the device can no longer be used
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
            # Who plans does not import another package's implementation, which alone says it.
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
    """On CUDA a stream of its own: the default one cannot be captured."""
    return torch.cuda.stream(torch.cuda.Stream()) if device.type == "cuda" else nullcontext()


def launches_per_run(contenders: Iterable[Contender], device: torch.device) -> int:
    """1 where all are launched one by one; else of whole rotations of the inputs, from a graph."""
    fastest = min(contenders, key=lambda contender: contender.call_ms, default=None)
    if device.type != "cuda" or fastest is None or fastest.call_ms >= GRAPH_BELOW_MS:
        return 1
    return len(fastest.calls) * math.ceil(GRAPH_LAUNCHES / len(fastest.calls))


def replayed(
    calls: list[Callable[[], Output]], n_launches: int
) -> tuple[list[Callable[[], object]], Callable[[], Output]]:
    """What to time, and how to get the output for the first inputs afterwards."""
    if n_launches == 1:
        return calls, calls[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        # Those of the last rotation are kept: what is written again was last touched a whole
        # rotation ago, and is no longer in cache. Without what autograd saved with them.
        outputs = deque(maxlen=len(calls))
        outputs.extend(detached(call()) for call in islice(cycle(calls), n_launches))
    return [graph.replay], lambda: outputs[0]


def detached(output: Output) -> Output:
    if isinstance(output, tuple):
        return tuple(map(detached, output))
    return None if output is None else output.detach()


def rates(work: Work, time_ms: float, gpu: str) -> dict[str, float | None]:
    """The columns flops, bytes, bytes_written, tflops and gb_per_s.

    Raises AboveCeiling where the datasheet of the device of this name says that no kernel runs at
    these rates.
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
    """Largest absolute error over (measured, reference) pairs; Inaccurate past the bound.

    `dtype` is the format that was computed in, a key of `MAX_RELATIVE_ERROR`.
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
