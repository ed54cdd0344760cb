"""Compile every kernel of ours for every GPU it is meant for, without a GPU.

`compile_all` gives rows of table `kernels`: registers, stack, shared memory, and what ptxas says.
Compiled is what a launch may choose at the problems that an operator names (`Operator.compiled`):
each kernel that can serve one, with the default configuration of each of its forms; and what the
committed tuned tables choose.

A kernel module needs nothing for it. An operator's inputs are drawn on the meta device, plans are
made for a GPU that is not here, with each kernel forced, and launched; in place of a driver stands
a target. What the launches would compile is collected, specialized as at run time, and compiled
once each. A process with TRITON_INTERPRET=1 holds interpreted functions that cannot be compiled, so
this happens in child processes.
"""

import argparse
import io
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

from tnp import choice, cuda, targets
from tnp.catalog import catalog
from tnp.contract import FLOATS, ITEMSIZE, Call, Case, Implementation, Kernel, Operator, Problem
from tnp.gates.compile_cuda import CudaJob, CudaJobs
from tnp.targets import Target

# Of Triton's kernels, by compute capability; those of CUDA C++ are for all of `cuda.ARCHITECTURES`.
TARGETS = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}
# Sizes among which one is looked for that a configuration serves of which the costs are known.
N_DRAWN = 100

# What ptxas -v says of a kernel, and of wgmma that wait for one another (C7508, C7510, C7515 …).
RESOURCES = re.compile(r"(\d+) bytes stack frame.*?Used (\d+) registers", re.DOTALL)
WARNING = re.compile(r"^.*(?:\(C75\d\d\)|\bwarning\b).*$", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class Launch:
    """`call` launches kernels on meta tensors; `users` are the implementations that do so."""

    capability: int
    dtype: str
    users: tuple[tuple[str, str], ...]  # operator and name
    call: Callable[[], object]


def committed_launches() -> Iterator[Launch]:
    """Every launch that could be chosen on GPUs of `cuda.ARCHITECTURES`, but for CUDA C++ whose
    compiler is missing here.
    """
    for operator in catalog().operators.values():
        for capability in cuda.ARCHITECTURES:
            target = targets.of_capability(capability)
            problems = operator.compiled or partial(_of_cases, operator)
            for problem in problems(target):
                yield from launches(operator, problem, target)
        yield from _of_tables(operator)


def _of_cases(operator: Operator, target: Target) -> Iterable[Problem]:
    """Of the gate's cases, for each dtype and options that of the largest sizes.

    In bfloat16, and in float32 for one GPU: a thread has as many registers on all of them.
    float16 needs what bfloat16 needs.
    """
    dtypes = ("bfloat16", "float32") if target.capability == 90 else ("bfloat16",)
    largest: dict[tuple, Problem] = {}
    for case in operator.cases(target):
        if case.problem.dtype not in dtypes:
            continue
        key = case.problem.dtype, case.problem.options
        if key not in largest or _extent(case.problem) > _extent(largest[key]):
            largest[key] = case.problem
    return largest.values()


def _extent(problem: Problem) -> int:
    return math.prod(size for _, size in problem.sizes)


def _of_tables(operator: Operator) -> Iterator[Launch]:
    """What the committed tables choose of the operator's operations, with the first tensor that may
    be None: so a kernel needs most registers. Configurations that are no candidates then, such as
    persistent programs where samples have lengths, are compiled without.

    Raises ValueError for an entry whose configuration is none of its kernel's.
    """
    by_name = {
        operation.name: (own, operation)
        for own in _ours(operator)
        for operation in (own.forward, own.backward)
        if operation is not None
    }
    for path in sorted(choice.COMMITTED.glob("*.json")):
        target = targets.named(path.stem)
        for entry in choice.table(path):
            if entry["of"] not in by_name:
                continue
            own, operation = by_name[entry["of"]]
            forced = operation.name, entry["choice"], entry.get("config")
            for problem in _with_optional_first(operator, _problems(operator, entry)):
                if found := list(launches(operator, problem, target, own, forced)):
                    break
            else:
                raise ValueError(f"no candidate of its kernel: {entry} in {path}")
            yield from found


def _with_optional_first(operator: Operator, problems: Iterable[Problem]) -> Iterator[Problem]:
    """Every problem with the first tensor that may be None, where it has none of these, and then
    each as it is. Others may exclude the first.
    """
    plain = list(problems)
    for problem in plain:
        if operator.optional and not any(problem[name] for name in operator.optional):
            given = dict(problem.options) | {operator.optional[0]: True}
            yield operator.problem(problem.dtype, **dict(problem.sizes), **given)
    yield from plain


def _problems(operator: Operator, entry: choice.Entry) -> Iterator[Problem]:
    """An entry's own; of one that says costs, drawn sizes, some of which its kernel takes."""
    if "us" not in entry:
        yield operator.from_json(json.dumps(entry["problem"]))
        return
    chance, itemsize = Random(0), entry["problem"]["itemsize"]
    dtype = next(one for one in FLOATS if ITEMSIZE[one] == itemsize)
    yield from (operator.drawn(chance, dtype) for _ in range(N_DRAWN))


def _ours(operator: Operator) -> list[Implementation]:
    return [own for own in operator.implementations if own.forward is not None]


def launches(
    operator: Operator,
    problem: Problem,
    target: Target,
    implementation: Implementation | None = None,
    forced: tuple[str, str, object] | None = None,
) -> Iterator[Launch]:
    """Of a problem: each implementation of ours, or this one, with each pair of its kernels.

    Args:
        operator: of the problem.
        problem: what is computed.
        target: on which GPU.
        implementation: the only one.
        forced: an operation's kernel and the JSON of its configuration, in place of all of them
            with the defaults of their forms; calls that do not run the operation are left out.
    """
    from tnp.gates.results import wanted_of

    for own in [implementation] if implementation else _ours(operator):
        for wanted in dict.fromkeys(((), wanted_of(operator, own, Case(problem)))):
            what = Call(problem, target, wanted)
            if own.refuses(what) is not None:
                continue
            operations = [own.forward] + ([own.backward] if wanted else [])
            if forced and forced[0] not in {operation.name for operation in operations}:
                continue
            for kernels in product(*(_candidates(one, what, forced) for one in operations)):
                if len({kernel.saves for kernel, _ in kernels}) > 1:
                    continue
                chosen = {
                    operation.name: (kernel.name, config)
                    for operation, (kernel, config) in zip(operations, kernels, strict=True)
                }
                call = partial(_launch, operator, own, problem, target, wanted, chosen)
                users = ((operator.name, own.name),)
                yield Launch(target.capability, problem.dtype, users, call)


def _candidates(
    operation: Any, what: Call, forced: tuple[str, str, object] | None
) -> list[tuple[Kernel, object]]:
    """Kernels that serve a call, with the configuration to compile them with."""
    from tnp import selection

    found = []
    for kernel in selection.kernels_of(operation).values():
        if kernel.refuses(what) or what.target.capability not in kernel.compiled_for:
            continue
        if forced is None or operation.name != forced[0]:
            found += [(kernel, one) for one in selection.forms(kernel, what)]
        elif kernel.name == forced[1]:
            configs = kernel.configs(what)
            found += [(kernel, one) for one in configs if choice.as_json(one) == forced[2]]
    return found


def _launch(
    operator: Operator,
    own: Implementation,
    problem: Problem,
    target: Target,
    wanted: tuple[str, ...],
    forced: dict[str, tuple[str, object]],
) -> None:
    """Forward, and backward where a gradient is wanted, on the meta device."""
    import torch

    from tnp import plans
    from tnp.values import Random

    case = Case(problem)
    drawn = operator.draw(case, Random(case, torch.device("meta")))
    inputs = tuple(drawn.get(name) for name in operator.tensors)
    options = operator.call_options(problem)
    plan = plans.build(operator, own.name, inputs, options, wanted, target, forced)
    outputs, saved = plan.forward(inputs, operator.numbers)
    if wanted:
        gradients = tuple(torch.empty_like(x) for x in outputs)
        kept = tuple(plan.kept(inputs, outputs))
        plan.backward(gradients, kept, saved, operator.numbers)


@dataclass
class Job:
    """One kernel to compile, and the implementations that launch it, as (operator, name)."""

    source: Any
    target: Any
    options: dict[str, Any]
    dtype: str
    users: set[tuple[str, str]] = field(default_factory=set)

    @property
    def name(self) -> str:
        return self.source.fn.__name__.strip("_").removesuffix("_kernel")

    @property
    def launch_config(self) -> dict[str, Any]:
        names = {(p.num,): p.name for p in self.source.fn.params if p.is_constexpr}
        constants = {names[at]: x for at, x in self.source.constants.items() if at in names}
        return constants | {name: self.options[name] for name in ("num_warps", "num_stages")}


@cache
def compile_all() -> list[dict]:
    """Rows of table `kernels` without provenance, one per kernel, configuration, dtype and target.

    A row also has `users`, the implementations that launch the kernel, as [operator, name]. Raises
    RuntimeError with the compiler's message if a configuration does not compile.
    """
    n_children = os.cpu_count() or 1
    with ThreadPoolExecutor(n_children) as pool:
        part = partial(_compile_in_child, n_parts=n_children)
        parts = pool.map(part, range(n_children))
        return [row for rows in parts for row in rows]


def _compile_in_child(part: int, n_parts: int) -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    environment["TRITON_ALWAYS_COMPILE"] = "1"  # a cached kernel has no log, and no `compile_s`
    environment["TRITON_DUMP_PTXAS_LOG"] = "1"
    command = [sys.executable, "-m", "tnp.gates.compile", "--part", str(part), str(n_parts)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"a kernel does not compile: {child.stderr[-400:]}")
    return json.loads(child.stdout)


def collect(launches: Iterable[Launch]) -> list[Job | CudaJob]:
    """What `launches` compile, once each; afterwards nothing can be launched in this process.

    Triton keeps what it compiled by device: each capability is a device of its own here.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from tnp.launch import watched

    jobs: list[Job] = []
    in_cuda = CudaJobs()

    def instead_of_compiling(source, target, options, **_):
        """A job, and in place of the kernel what notes who launches it."""
        job = Job(source, target, options, launch.dtype)
        jobs.append(job)
        return SimpleNamespace(
            run=lambda *_: job.users.update(launch.users),
            launch_metadata=lambda *_: None,
            function=None,
            packed_metadata=None,
        )

    triton.compiler.compile = instead_of_compiling
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", launch.capability, 32),
            get_current_device=lambda: launch.capability,
            get_current_stream=lambda device: None,
        )
    )

    def note(bound: cuda.Bound) -> None:
        in_cuda.note(bound, launch.dtype, launch.users)

    with watched(), cuda.watched(note):
        for launch in launches:
            launch.call()
    return [*jobs, *in_cuda.found.values()]


def compiled(job: Job | CudaJob) -> dict:
    """A row of table `kernels`, and `users`; in a process that compiles and logs."""
    if isinstance(job, CudaJob):
        return job.compiled()
    import triton

    target = TARGETS[job.target.arch]
    shared_limit = targets.of_capability(job.target.arch).shared_bytes
    start = time.perf_counter()
    try:
        with redirect_stdout(io.StringIO()) as log:
            kernel = triton.compile(job.source, target=job.target, options=job.options)
    except Exception as error:
        raise RuntimeError(f"{job.name} {job.dtype} for {target}: {error}") from error
    compile_s = time.perf_counter() - start
    functions = RESOURCES.findall(log.getvalue())
    if not functions:
        raise RuntimeError(f"ptxas said nothing of {job.name} for {target}: {log.getvalue()!r}")
    return {
        "kernel": job.name,
        "target": target,
        "dtype": job.dtype,
        "launch_config": json.dumps(job.launch_config, default=str),
        "registers": max(int(registers) for _, registers in functions),
        "spill_bytes": max(int(stack) for stack, _ in functions),
        "shared_bytes": kernel.metadata.shared,
        "shared_limit_bytes": shared_limit,
        "num_warps": kernel.metadata.num_warps,
        "num_stages": kernel.metadata.num_stages,
        "compile_s": compile_s,
        "warnings": "\n".join(dict.fromkeys(WARNING.findall(log.getvalue()))),
        "users": sorted(job.users),
    }


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tnp.gates.compile",
        description="Compile every committed kernel configuration for every target, which takes "
        "minutes, and print the rows of table `kernels`.",
    )
    parser.add_argument(
        "--part",
        nargs=2,
        type=int,
        metavar=("FIRST", "STEP"),
        help="compile every STEP-th from FIRST on and print the rows as JSON, as a child does",
    )
    given = parser.parse_args()
    if given.part:
        first, step = given.part
        jobs = collect(committed_launches())
        print(json.dumps([compiled(job) for job in jobs[first::step]]))
    else:
        for row in compile_all():
            print(*row.values(), sep="  ")


if __name__ == "__main__":
    _main()
