"""Times kernels at random sizes, with the counts that `tnp.tuning.fit_costs` fits to."""

from __future__ import annotations

from random import Random
from statistics import median

import torch

from tnp.bench.contenders import Contenders, listed
from tnp.bench.measure import Contender, capturable_stream, launches_per_run, replayed
from tnp.bench.outcome import op_job
from tnp.bench.policy import Policy
from tnp.bench.timing import first_call, measure_interleaved
from tnp.dispatch import devices, selection, tuned_tables
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Call, Problem
from tnp.dispatch.tuned_tables import operations

# A fit to hundreds of sizes needs no precise mean of each.
POLICY = Policy(warmup_s=0.0, min_samples=5, half_width=1.0, max_sampling_s=0.0)


def measure_costs(parameters: dict) -> list[dict]:
    """Returns a row for each random size, kernel and configuration.

    A row has "of", "problem", "choice", "config", "counts" and "us": the median time in µs of a
    launch whose inputs are in no cache.

    Args:
        parameters: `op`, `dtype`, `n_sizes`, `seed`, `device`, `device_slug`.
    """
    device = torch.device(parameters["device"])
    operator, random = catalog().operator(parameters["op"]), Random(parameters["seed"])
    rows = []
    with capturable_stream(device):
        for _ in range(parameters["n_sizes"]):
            problem = operator.random_problem(random, parameters["dtype"])
            for implementation, pass_ in operations(operator).values():
                rows += _timed(problem, implementation, pass_, parameters, device)
    return rows


def _timed(
    problem: Problem, implementation: str, pass_: str, parameters: dict, device: torch.device
) -> list[dict]:
    """Times the kernels that have counts, in turn, and returns their rows."""
    operation = getattr(catalog().load(problem.op, implementation), pass_)
    kernels = selection.kernels_of(operation)
    if not any(kernel.counts for kernel in kernels.values()):
        return []
    where = {name: parameters[name] for name in ("device", "device_slug")}
    asked = op_job(
        problem, [implementation], "costs", {}, replicate=0, passes=[pass_],
        forced={implementation: {}}, **where,
    )  # fmt: skip
    asked |= listed(asked)
    workload = Contenders(asked, pass_, device)
    timed = []
    for name in asked["implementations"]:
        kernel_name, config = workload.trial(name)[operation.name]
        if kernels[kernel_name].counts is not None:
            calls = workload.calls(name)
            compile_s = sum(first_call(call, device) for call in calls)
            contender = Contender.of(calls, compile_s, device)
            timed.append((kernels[kernel_name], config, contender))
    n_launches = launches_per_run([contender for *_, contender in timed], device)
    runs = [replayed(contender.calls, n_launches)[0] for *_, contender in timed]
    measured = measure_interleaved(runs, device, POLICY, n_launches)
    what = Call(problem, devices.of_device(device))
    return [
        {
            "of": operation.name,
            "problem": problem.json,
            "choice": kernel.name,
            "config": tuned_tables.as_json(config),
            "counts": kernel.counts(what, config),
            "us": 1e3 * median(one.samples_ms),
        }
        for (kernel, config, _), one in zip(timed, measured, strict=True)
    ]
