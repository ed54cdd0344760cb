"""Times of kernels at sizes drawn at random, and what each is made of: `tnp.costs` fits to them."""

from __future__ import annotations

from random import Random
from statistics import median

import torch

from tnp import choice, selection, targets
from tnp.bench.contenders import Contenders, listed
from tnp.bench.measure import Contender, capturable_stream, launches_per_run, replayed
from tnp.bench.outcome import op_job
from tnp.bench.policy import Policy
from tnp.bench.timing import first_call, measure_interleaved
from tnp.catalog import catalog
from tnp.contract import Call, Operator, Problem

# What is fitted to hundreds of sizes needs no settled mean of each.
POLICY = Policy(warmup_s=0.0, min_samples=5, half_width=1.0, max_sampling_s=0.0)


def measure_costs(parameters: dict) -> list[dict]:
    """Of each drawn size, kernel and configuration {"of", "problem", "choice", "config", "counts",
    "us"}: the counts, and the median time in µs of a launch that finds its inputs in no cache.

    Args:
        parameters: `op`, `dtype`, `n_sizes`, `seed` of what is drawn, `device`, `device_slug`.
    """
    device = torch.device(parameters["device"])
    operator, random = catalog().operator(parameters["op"]), Random(parameters["seed"])
    rows = []
    with capturable_stream(device):
        for _ in range(parameters["n_sizes"]):
            problem = operator.drawn(random, parameters["dtype"])
            for implementation, pass_ in _counted(operator):
                rows += _timed(problem, implementation, pass_, parameters, device)
    return rows


def _counted(operator: Operator) -> list[tuple[str, str]]:
    """An implementation and its pass of every operation whose kernels say their counts."""
    found = {}
    for own in operator.implementations:
        for pass_, operation in (("forward", own.forward), ("backward", own.backward)):
            if operation and any(one.counts for one in selection.kernels_of(operation).values()):
                found.setdefault(operation.name, (own.name, pass_))
    return list(found.values())


def _timed(
    problem: Problem, implementation: str, pass_: str, parameters: dict, device: torch.device
) -> list[dict]:
    where = {name: parameters[name] for name in ("device", "device_slug")}
    asked = op_job(
        problem, [implementation], "costs", {}, replicate=0, passes=[pass_],
        forced={implementation: {}}, **where,
    )  # fmt: skip
    asked |= listed(asked)
    workload = Contenders(asked, pass_, device)
    operation = getattr(catalog().load(problem.op, implementation), pass_)
    kernels = selection.kernels_of(operation)
    contenders, forced = {}, {}
    for name in asked["implementations"]:
        kernel_name, config = asked["forced"][name][operation.name]
        if kernels[kernel_name].counts is None:
            continue
        calls = workload.calls(name)
        compile_s = sum(first_call(call, device) for call in calls)
        contenders[name] = Contender.of(calls, compile_s, device)
        forced[name] = kernels[kernel_name], config
    n_launches = launches_per_run(contenders.values(), device)
    runs = [replayed(one.calls, n_launches)[0] for one in contenders.values()]
    measured = measure_interleaved(runs, device, POLICY, n_launches)
    what = Call(problem, targets.of_device(device))
    rows = []
    for (kernel, config), one in zip(forced.values(), measured, strict=True):
        like = next(one for one in kernel.configs(what) if choice.as_json(one) == config)
        rows.append({
            "of": operation.name,
            "problem": problem.json,
            "choice": kernel.name,
            "config": config,
            "counts": kernel.counts(what, like),
            "us": 1e3 * median(one.samples_ms),
        })  # fmt: skip
    return rows
