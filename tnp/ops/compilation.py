"""Compile every committed kernel configuration for every GPU it is meant for, without a GPU.

Committed is what a launch may choose (`tnp.ops.launches`). `compile_all` gives rows of table
`kernels`: registers, stack, shared memory, and what ptxas says of them.

A kernel module needs nothing for it: its launchers run on meta tensors, and in place of a driver
stands a target. What the launches would compile is collected, specialized as at run time, and
compiled once each. A process with TRITON_INTERPRET=1 holds interpreted functions that cannot be
compiled, so this happens in child processes.
"""

import argparse
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tnp.ops.launches import Launch

# Compute capability → name, and the shared memory a block may use there (CUDA programming guide).
TARGETS = {
    80: ("sm_80", 163 * 1024),
    90: ("sm_90a", 227 * 1024),
    100: ("sm_100a", 227 * 1024),
}
MULTIPROCESSORS = 132  # of an H200

# What ptxas -v says of a kernel, and of wgmma that wait for one another (C7508, C7510, C7515 …).
RESOURCES = re.compile(r"(\d+) bytes stack frame.*?Used (\d+) registers", re.DOTALL)
WARNING = re.compile(r"^.*(?:\(C75\d\d\)|\bwarning\b).*$", re.MULTILINE | re.IGNORECASE)


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
        parts = pool.map(_compile_in_child, range(n_children), [n_children] * n_children)
        return [row for rows in parts for row in rows]


def _compile_in_child(part: int, n_parts: int) -> list[dict]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    environment["TRITON_ALWAYS_COMPILE"] = "1"  # a cached kernel has no log, and no `compile_s`
    environment["TRITON_DUMP_PTXAS_LOG"] = "1"
    command = [sys.executable, "-m", "tnp.ops.compilation", "--part", str(part), str(n_parts)]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    if child.returncode:
        raise RuntimeError(f"a kernel does not compile: {child.stderr[-400:]}")
    return json.loads(child.stdout)


def collect(launches: Iterable["Launch"]) -> list[Job]:
    """What `launches` compile, once each; afterwards nothing can be launched in this process.

    Triton keeps what it compiled by device: each capability is a device of its own here.
    """
    import torch
    import triton
    from triton.backends.compiler import GPUTarget

    from tnp.launch import watched

    jobs: list[Job] = []

    def instead_of_compiling(source, target, options, **_):
        """A job, and in place of the kernel what notes who launches it."""
        job = Job(source, target, options, str(launch.dtype).removeprefix("torch."))
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
    # What launchers ask to size their grids, and to decide whether tiles are split along the keys.
    properties = SimpleNamespace(multi_processor_count=MULTIPROCESSORS)
    torch.cuda.get_device_properties = lambda device: properties
    with watched():  # through Triton, every time
        for launch in launches:
            launch.call()
    return jobs


def compiled(job: Job) -> dict:
    """A row of table `kernels`, and `users`; in a process that compiles and logs."""
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
        "users": sorted(job.users),
    }


def _main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tnp.ops.compilation",
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
    part = parser.parse_args(arguments).part
    if part:
        from tnp.ops.launches import committed_launches

        jobs = collect(committed_launches(TARGETS))[part[0] :: part[1]]
        print(json.dumps([compiled(job) for job in jobs]))
    else:
        for row in compile_all():
            print(*row.values(), sep="  ")


if __name__ == "__main__":
    _main()
