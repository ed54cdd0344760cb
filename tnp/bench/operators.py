"""Benchmark of one operator: its implementations in turn, on the same inputs, with cold caches.

Outputs are checked again after timing.
"""

import math
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from itertools import cycle, islice
from typing import TypeVar

import torch

from tnp.bench.evidence import Code, packages
from tnp.bench.kernel_code import launches
from tnp.bench.outcome import (
    Rows,
    classify,
    implementation_of,
    key,
    of_contender,
    passes,
    require_supported,
)
from tnp.bench.policy import Policy
from tnp.bench.provenance import Conditions
from tnp.bench.roofline import above_ceiling
from tnp.bench.sampled import measured_columns, sample_rows
from tnp.bench.sizes import CEILINGS
from tnp.bench.statistics import summarize
from tnp.bench.timing import (
    call_ms,
    first_call,
    measure_interleaved,
    synchronize,
)
from tnp.bench.workloads import WORKLOADS, Output, Workload
from tnp.ops import auto, registry

# Where the fastest is shorter than this, all run from CUDA graphs: the host's launch time is not
# seen there. A first call shows it: an MLP's backward of 0.4 ms takes the host more than 1 …
GRAPH_BELOW_MS = 2.0
# … nor, with at least this many launches in one, the events around it.
GRAPH_LAUNCHES = 20

# Share of the largest reference value that an output may be off. An absolute bound sees nothing
# at 200,000 keys, where an attention output is about as small as the bound; the gates hold those.
MAX_RELATIVE_ERROR = {"bfloat16": 2e-2, "float16": 5e-3, "float32": 1e-4}


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
    call_ms: float

    @classmethod
    def prepare(cls, calls: list[Callable[[], Output]], device: torch.device) -> "Contender":
        """Compile and run each of `calls`, then time the first."""
        compile_s = sum(first_call(call, device) for call in calls)
        return cls(calls, compile_s, call_ms(calls[0], device))


def measure_op(
    parameters: dict, started: float, suspect: Callable[[list[str]], None] = lambda names: None
) -> Rows:
    """Tables "ops", "samples" and "code" of one operator at one size, a row a contender and pass.

    All contenders are timed in the same rounds. What one of them raises is its row, and the others
    are measured without it.

    Args:
        parameters: the op key, `implementations` (contender → config_id), `timing`, `device`, and
            `definitions`, the hashes of what an implementation reaches by its name and theirs.
        started: `time.perf_counter()` when the process began; `setup_s` counts from there.
        suspect: told whom to blame should this process not survive what comes next.

    Raises:
        Exception: the inputs do not fit, or an error made the device useless to this process.
    """
    op, device = parameters["op"], torch.device(parameters["device"])
    if op not in WORKLOADS:
        raise ValueError(f"unknown op {op!r}: choose from {', '.join(WORKLOADS)}")
    tables: Rows = {"ops": [], "samples": []}
    code = {
        name: _code(parameters, name)
        for name in dict.fromkeys(map(implementation_of, parameters["implementations"]))
    }
    # A backward runs on the stream of its forward.
    with capturable_stream(device):
        for pass_ in passes(op):
            suspect([])
            workload = WORKLOADS[op](parameters, pass_, device)
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
    op = parameters["op"]
    provider = "torch" if op in CEILINGS else registry.get(op, name).provider
    definitions = parameters.get("definitions", {}).get(name, {})
    return Code(packages=packages([provider]), definitions=definitions)


def _measure_pass(
    parameters: dict,
    pass_: str,
    workload: Workload,
    device: torch.device,
    suspect: Callable[[list[str]], None],
    code: dict[str, Code],
) -> dict[str, tuple[dict[str, object], list[dict[str, object]]]]:
    """Each contender's columns of its "ops" row, and its "samples" rows if it could be timed.

    The kernels that an implementation launches are added to its `code`.
    """
    op, dtype = parameters["op"], parameters["dtype"]
    outcomes: dict[str, tuple[dict[str, object], list[dict[str, object]]]] = {}

    def each(work: Callable[[str], T], names: Iterable[str]) -> dict[str, T]:
        """`work` of those for which it succeeds; the others' outcome is their failure."""
        done = {}
        for name in names:
            suspect([name])
            try:
                done[name] = work(name)
            except Exception as error:  # whatever it was, it is this implementation's result
                traceback.print_exc()
                status, reason = classify(error)
                outcomes[name] = {"status": status, "reason": reason}, []
                synchronize(device)  # raises where the device can no longer be used
        return done

    def prepare(name: str) -> Contender:
        implementation = implementation_of(name)
        if op not in CEILINGS:
            require_supported(op, implementation, device, getattr(torch, dtype))
        kernels: dict[str, str] = {}
        try:
            with launches() as kernels:
                contender = Contender.prepare(workload.calls(implementation), device)
        finally:
            code[implementation].kernels |= kernels
        # Again, without noting launches: it decides how all are timed.
        return replace(contender, call_ms=call_ms(contender.calls[0], device))

    contenders = each(prepare, parameters["implementations"])
    n_launches = launches_per_run(contenders.values(), device)
    runs = each(lambda name: replayed(contenders[name].calls, n_launches), contenders)
    suspect(list(runs))
    with Conditions(device.type) as conditions:
        measurements = measure_interleaved(
            [timed for timed, _ in runs.values()],
            device,
            Policy.from_parameters(parameters["timing"]),
            n_launches,
        )
    measured = dict(zip(runs, measurements, strict=True))

    def launch_config(name: str) -> str | None:
        if name != "auto":
            return workload.launch_config(implementation_of(name))
        choice = auto.of_row(parameters, device)
        return choice.describe(workload.launch_config(choice.implementation))

    def columns(name: str) -> dict[str, object]:
        own, (_, output) = measured[name], runs[name]
        timings = summarize(own.samples_ms, "time_ms")
        median_s = timings["time_ms_p50"] / 1e3
        tflops = None if workload.flops is None else workload.flops / median_s / 1e12
        gb_per_s = workload.bytes / median_s / 1e9
        refuse_impossible(device, dtype, tflops, gb_per_s)
        return (
            {"status": "ok", "reason": own.note}
            | timings
            | {"flops": workload.flops, "bytes": workload.bytes}
            | {"tflops": tflops, "gb_per_s": gb_per_s}
            | {"launch_config": launch_config(name)}
            | {"max_abs_error": checked_error(workload.check(output()), dtype)}
            | {"compile_s": contenders[name].compile_s}
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
        # Kept, so that each launch writes memory of its own: a reused output would stay in cache.
        # Without what autograd saved with it, which of twenty launches would fill the device.
        outputs = [detached(call()) for call in islice(cycle(calls), n_launches)]
    return [graph.replay], lambda: outputs[0]


def detached(output: Output) -> Output:
    return tuple(map(detached, output)) if isinstance(output, tuple) else output.detach()


def refuse_impossible(
    device: torch.device, dtype: str, tflops: float | None, gb_per_s: float
) -> None:
    """Raises AboveCeiling if the device's datasheet says that no kernel runs at these rates."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        if impossible := above_ceiling(name, dtype, tflops, gb_per_s):
            raise AboveCeiling(impossible)


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
