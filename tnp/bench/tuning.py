"""Times every candidate of one problem: each kernel that can serve it, with each configuration.

All run on the same inputs and take turns, with cold caches, from CUDA graphs where they are short;
what one of them raises is its row. `tune` starts this module as a process, which reports "trials"
and "suspect", the candidate to blame should the process end now (`tnp.bench.process.run_child`).
"""

import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tnp import plans
from tnp.bench.child import reporting
from tnp.bench.isolate import with_provenance
from tnp.bench.measure import (
    MAX_RELATIVE_ERROR,
    Contender,
    Inaccurate,
    capturable_stream,
    launches_per_run,
    replayed,
)
from tnp.bench.outcome import Rows, classify
from tnp.bench.policy import Policy
from tnp.bench.process import run_child
from tnp.bench.provenance import Conditions
from tnp.bench.roofline import attention_bytes
from tnp.bench.sampled import measured_columns
from tnp.bench.statistics import summarize
from tnp.bench.timing import measure_interleaved, synchronize
from tnp.bench.workloads import Output, input_sets
from tnp.choice import as_json
from tnp.contract import Call, Kernel, Operation
from tnp.ops.attention import FORWARD, FUSED, OPERATOR, SEPARATE

OPERATIONS: dict[str, Operation] = {
    operation.name.rpartition(".")[2]: operation for operation in (FORWARD, SEPARATE, FUSED)
}
PROBLEM = ("operation", "shape", "batch", "n_q", "n_k", "n_heads", "head_dim", "dtype")


def tune(parameters: dict, timeout_s: float) -> Rows:
    """Tables "trials" and "environments" of one problem, provenance included.

    A candidate that ends the process it is tried in is a row, and the others are measured in a new
    process without it. The caller holds the device's lock.

    Args:
        parameters: `PROBLEM`, `timing`, `device` and `device_slug`, as JSON can hold them.
        timeout_s: seconds until a process is killed.

    Raises:
        DeviceMissing: the device of the parameters is not here, so that nothing can be said of it.
    """
    ended_by: dict[str, tuple[str, str]] = {}
    while True:
        report = run_child([__name__], parameters | {"ended_by": ended_by}, timeout_s)
        trials = report.get("trials")
        if trials is None and report.get("suspect") is not None:
            ended_by[report["suspect"]] = report["failure"]
            continue
        if trials is None:
            status, reason = report["failure"]
            trials = [_key(parameters) | {"status": status, "reason": reason}]
        state = report.get("environment")
        tables = {"trials": trials, "environments": [state] if state else []}
        return with_provenance(tables, parameters["device_slug"], state and state["environment_id"])


def main(parent: str, report: str) -> None:
    started = time.perf_counter()
    with reporting(parent, report) as (parameters, note):
        note(trials=measure_trials(parameters, started, lambda name: note(suspect=name)))


@dataclass
class _Trial:
    """A candidate, its row so far, and what its stages leave to the next."""

    name: str
    calls: list[Callable[[], Output]]
    row: dict[str, object]
    contender: Contender | None = None
    runs: tuple[list[Callable[[], object]], Callable[[], Output]] | None = None

    def prepare(self, device: torch.device) -> None:
        self.contender = Contender.prepare(self.calls, device)
        self.row["compile_s"] = self.contender.compile_s

    def check(self, output: Output, reference: Output) -> None:
        """Raises Inaccurate past the bound; the row keeps the largest error."""
        error = _relative_error(output, reference)
        self.row["max_relative_error"] = max(error, self.row.get("max_relative_error", 0.0))
        if not error <= MAX_RELATIVE_ERROR[self.row["dtype"]]:  # NaN never passes
            raise Inaccurate(f"its result is off by {error:.2e} of the largest value")

    def fail(self, status: str, reason: str) -> None:
        self.row |= {"status": status, "reason": reason}


def measure_trials(
    parameters: dict, started: float, suspect: Callable[[str | None], None] = lambda name: None
) -> list[dict]:
    """Rows of table "trials", the default first; errors are relative to the first that ran.

    Args:
        parameters: `PROBLEM`, `timing`, `device`, and `ended_by`: name → status and reason of the
            candidates that must not be tried.
        started: `time.perf_counter()` when the process began; `setup_s` counts from there.
        suspect: told whom to blame should this process not survive what comes next.

    Raises:
        Exception: the inputs do not fit, or an error made the device useless to this process.
    """
    device = torch.device(parameters["device"])
    with capturable_stream(device):
        trials = _trials(parameters, device)
        setup_s = time.perf_counter() - started
        pending = [trial for trial in trials if "status" not in trial.row]
        each = partial(_each, device=device, suspect=suspect)

        pending = each(pending, lambda trial: trial.prepare(device))
        reference = pending[0].calls[0]() if pending else ()
        pending = each(pending, lambda trial: trial.check(trial.calls[0](), reference))
        n_launches = launches_per_run([trial.contender for trial in pending], device)

        def capture(trial: _Trial) -> None:
            trial.runs = replayed(trial.calls, n_launches)

        pending = each(pending, capture)
        policy = Policy.from_parameters(parameters["timing"])
        with Conditions(device.type) as conditions:
            timed = [trial.runs[0] for trial in pending]
            measured = measure_interleaved(timed, device, policy, n_launches)
        for trial, own in zip(pending, measured, strict=True):
            trial.row |= (
                summarize(own.samples_ms, "time_ms")
                | {"setup_s": setup_s, "reason": own.note}
                | measured_columns(own, conditions)
            )
        for trial in each(pending, lambda trial: trial.check(trial.runs[1](), reference)):
            trial.row["status"] = "ok"
    return [trial.row for trial in trials]


@dataclass
class _Candidate:
    """A kernel with a configuration; all sets of inputs are laid out alike, and launched alike."""

    kernel: Kernel
    what: Call
    config: object
    launch: Callable | None = None

    def __call__(self, inputs: tuple, scalars: tuple[float]) -> tuple[torch.Tensor, ...]:
        """Outputs and what is saved, or gradients."""
        if self.launch is None:
            self.launch = self.kernel.prepare(self.what, self.config, inputs)
        results = self.launch(inputs, scalars)
        return (*results[0], *results[1]) if isinstance(results[0], tuple) else results


def _each(
    trials: list[_Trial],
    work: Callable[[_Trial], None],
    device: torch.device,
    suspect: Callable[[str | None], None],
) -> list[_Trial]:
    """Those of `trials` for which `work` succeeds; the others' rows say how it failed."""
    succeeded = []
    for trial in trials:
        suspect(trial.name)
        try:
            work(trial)
            succeeded.append(trial)
        except Exception as error:  # whatever it was, it is this candidate's result
            traceback.print_exc()
            trial.fail(*classify(error))
            synchronize(device)  # raises where the device can no longer be used
    suspect(None)
    return succeeded


def _trials(parameters: dict, device: torch.device) -> list[_Trial]:
    """Every candidate, the default first; those that must not be tried have their status."""
    operation, scale = OPERATIONS[parameters["operation"]], parameters["head_dim"] ** -0.5
    inputs = _inputs(parameters, device)
    what = _called(inputs[0] if operation is FORWARD else inputs[0][1][:3])
    trials = []
    candidates = [
        _Candidate(kernel, what, config)
        for kernel in plans.kernels_of(operation).values()
        if kernel.refuses(what) is None
        for config in kernel.configs(what)
    ]
    for candidate in candidates:
        kernel, launch_config = candidate.kernel, json.dumps(as_json(candidate.config))
        name = f"{kernel.name} {launch_config}"
        calls = [partial(candidate, tensors, (scale,)) for tensors in inputs]
        row = _key(parameters) | {"capability": what.target.capability, "kernel": kernel.name}
        row |= {"launch_config": launch_config, "is_default": not trials}
        trials.append(_Trial(name, calls, row))
        if name in parameters.get("ended_by", {}):
            trials[-1].fail(*parameters["ended_by"][name])
    return trials


def _called(inputs: Sequence[torch.Tensor]) -> Call:
    return plans.describe(OPERATOR, (*inputs[:3], None), wanted=OPERATOR.differentiated)


def _key(parameters: dict) -> dict[str, object]:
    return {name: parameters[name] for name in PROBLEM}


def _inputs(parameters: dict, device: torch.device) -> list[tuple]:
    """The tensors of an operation, as the model passes them, in sets that overflow the cache."""
    batch, n_heads, n_q, n_k, head_dim = size = [
        parameters[name] for name in ("batch", "n_heads", "n_q", "n_k", "head_dim")
    ]
    dtype, pass_ = getattr(torch, parameters["dtype"]), parameters["operation"]
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    def tensors() -> tuple:
        q, k, v = normal(batch, max(n_q, n_k), 3, n_heads, head_dim).permute(2, 0, 3, 1, 4)
        inputs = (q[:, :, :n_q], k[:, :, :n_k], v[:, :, :n_k], None)
        if pass_ == "forward":
            return inputs
        what = _called(inputs)
        kernel, choice = plans.choose_kernel(FORWARD, OPERATOR, what)
        outputs, saved = kernel.prepare(what, choice.config, inputs)(inputs, (head_dim**-0.5,))
        do = normal(batch, n_q, n_heads, head_dim).transpose(1, 2)
        return (do,), (*inputs, *outputs), saved

    n_bytes = attention_bytes(
        *size, dtype.itemsize, "forward" if pass_ == "forward" else "backward"
    )
    return [tensors() for _ in range(input_sets(n_bytes, device))]


def _relative_error(output: Output, reference: Output) -> float:
    """Largest difference in an output over the largest value of its reference; NaN where one is."""
    errors = [
        (x.float() - y.float()).abs().max() / y.float().abs().max()
        for x, y in zip(output, reference, strict=True)
    ]
    return torch.stack(errors).max().item()


if __name__ == "__main__":
    main(*sys.argv[1:])
