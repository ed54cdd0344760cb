"""Compile every committed kernel configuration for every GPU it is meant for, without a GPU.

Committed is what a launch may choose: the default of every kernel that serves a problem, and the
entries of the tuned table. `compile_all` gives rows of table `kernels`: registers, stack, shared
memory, and what ptxas says of them.

A kernel module needs nothing for it: its launchers run on meta tensors, and in place of a driver
stands a target. What the launches would compile is collected, specialized as at run time, and
compiled once each. A process with TRITON_INTERPRET=1 holds interpreted functions that cannot be
compiled, so this happens in child processes.
"""

import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tnp.ops import tuning

if TYPE_CHECKING:
    from tnp.ops.attention.kernels import Problem

# Compute capability → name, and the shared memory a block may use there (CUDA programming guide).
TARGETS = {
    80: ("sm_80", 163 * 1024),
    90: ("sm_90a", 227 * 1024),
    100: ("sm_100a", 227 * 1024),
}
MULTIPROCESSORS = 132  # of an H200

# dtype, head_dim, and n_context given or not. Away from the model's own type only the form with
# n_context is compiled, which needs more registers, and float16 needs what bfloat16 needs.
TYPES = (
    *(("bfloat16", 64, given) for given in (False, True)),
    ("float16", 64, True),
    ("float32", 64, True),
    *product(("bfloat16", "float32"), (16, 32), [True]),
    ("bfloat16", 128, True),  # float32 spills there in every tile: slow, and still right
)
# Batch, queries and keys: many keys and few; enough programs to fill a GPU, and too few; so many
# keys that the forward pass splits tiles along them.
SIZES = ((1, 1100, 1000), (64, 1100, 1000), (1, 564, 128), (64, 564, 64), (1, 3300, 3000))
N_HEADS = 8

# What ptxas -v says of a kernel, and of wgmma that wait for one another (C7508, C7510, C7515 …).
RESOURCES = re.compile(r"(\d+) bytes stack frame.*?Used (\d+) registers", re.DOTALL)
WARNING = re.compile(r"^.*(?:\(C75\d\d\)|\bwarning\b).*$", re.MULTILINE | re.IGNORECASE)

Launch = tuple["Problem", str, Any, bool]  # problem, kernel, configuration, n_context given


@dataclass
class Job:
    """One kernel to compile, and the operations that launch it."""

    source: Any
    target: Any
    options: dict[str, Any]
    dtype: str
    operations: set[str] = field(default_factory=set)

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

    A row also has `operations`, those that launch the kernel. Raises RuntimeError with the
    compiler's message if a configuration does not compile.
    """
    n_children = os.cpu_count() or 1
    with ThreadPoolExecutor(n_children) as pool:
        parts = pool.map(_compile_in_child, range(n_children), [n_children] * n_children)
        return [row for rows in parts for row in rows]


def _compile_in_child(part: int, n_parts: int) -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    environment["TRITON_ALWAYS_COMPILE"] = "1"  # a cached kernel has no log, and no `compile_s`
    environment["TRITON_DUMP_PTXAS_LOG"] = "1"
    command = [sys.executable, "-m", "tnp.ops.compilation", str(part), str(n_parts)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"a kernel does not compile: {child.stderr[-400:]}")
    return json.loads(child.stdout)


def committed_launches() -> Iterator[Launch]:
    """Every launch of `TYPES`, `SIZES`, `TARGETS` and the tuned table that could be chosen."""
    import torch

    from tnp.ops.attention.kernels import KERNELS, Problem

    for capability, (dtype, head_dim, given), (batch, n_q, n_k) in product(TARGETS, TYPES, SIZES):
        for (operation, name), kernel in KERNELS.items():
            size = (batch, N_HEADS, n_q, n_k, head_dim)
            problem = Problem(operation, getattr(torch, dtype), *size, capability)
            if kernel.unsupported(problem) is None:
                yield problem, name, kernel.configs(problem)[0], given
    for entry in tuning.table():
        problem = tuning.problem_of(entry)
        config = tuning.config_of(entry, problem)
        if config is None:
            raise ValueError(f"no candidate of its kernel: {entry} in {tuning.TABLE}")
        yield from ((problem, entry["kernel"], config, given) for given in (False, True))


def collect(launches: Iterable[Launch]) -> list[Job]:
    """What `launches` compile, once each; afterwards nothing can be launched in this process.

    Triton keeps what it compiled by device: each capability is a device of its own here.
    """
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from tnp.ops.attention.kernels import KERNELS

    jobs: list[Job] = []

    def instead_of_compiling(source, target, options, **_):
        """A job, and in place of the kernel what notes who launches it."""
        job = Job(source, target, options, str(problem.dtype).removeprefix("torch."))
        jobs.append(job)
        return SimpleNamespace(
            run=lambda *_: job.operations.add(problem.operation),
            launch_metadata=lambda *_: None,
            function=None,
            packed_metadata=None,
        )

    triton.compiler.compile = instead_of_compiling
    triton.runtime.driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: GPUTarget("cuda", problem.capability, 32),
            get_current_device=lambda: problem.capability,
            get_current_stream=lambda device: None,
        )
    )
    # What launchers ask to size their grids, and to decide whether tiles are split along the keys.
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    torch.cuda.get_device_properties = lambda device: properties
    for problem, name, config, given in launches:
        run = KERNELS[problem.operation, name].run
        run(*_arguments(problem, given), problem.head_dim**-0.5, config)
    return jobs


def _arguments(problem: "Problem", given: bool) -> list:
    """The tensors of an operation and n_context, as the model passes them, on the meta device."""
    import torch

    def empty(*shape: int, dtype=problem.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    batch, n_heads, n_q, n_k = problem.batch, problem.n_heads, problem.n_q, problem.n_k
    projection = empty(batch, max(n_q, n_k), 3, n_heads, problem.head_dim)
    q, k, v = projection.permute(2, 0, 3, 1, 4)
    inputs = [q[:, :, :n_q], k[:, :, :n_k], v[:, :, :n_k]]
    n_context = empty(batch, dtype=torch.int32) if given else None
    if problem.operation == "forward":
        return [*inputs, n_context]
    o, do = (empty(batch, n_q, n_heads, problem.head_dim).transpose(1, 2) for _ in range(2))
    return [do, *inputs, o, empty(batch, n_heads, n_q, dtype=torch.float32), n_context]


def compiled(job: Job) -> dict:
    """A row of table `kernels`, and `operations`; in a process that compiles and logs."""
    import triton

    target, shared_limit = TARGETS[job.target.arch]
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
        "operations": sorted(job.operations),
    }


if __name__ == "__main__":
    if len(sys.argv) == 3:  # a child: its share of the jobs
        jobs = collect(committed_launches())[int(sys.argv[1]) :: int(sys.argv[2])]
        print(json.dumps([compiled(job) for job in jobs]))
    else:
        for row in compile_all():
            print(*row.values(), sep="  ")
