"""Compile every kernel of ours for every GPU it is meant for, without a GPU.

`compile_all` gives rows of table `kernels`: registers, stack, shared memory, and what ptxas says.

A kernel module needs nothing for it. `tnp.gates.launches` launches kernels on the meta device; in
place of a driver stands a target. What the launches would compile is collected, specialized as at
run time, and compiled once each. A process with TRITON_INTERPRET=1 holds interpreted functions that
cannot be compiled, so this happens in a child process, which divides the work among its own.

`tnp.gates.kept` keeps the results by a hash of all that decides them: only what changed since the
file was written is compiled.
"""

import argparse
import io
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tnp.dispatch import devices, nvrtc
from tnp.gates import kept
from tnp.gates.compile_cuda import CudaJob, CudaJobs
from tnp.gates.launches import Launch, committed_launches

# Of Triton's kernels, by compute capability; those of CUDA C++ are for all of `cuda.ARCHITECTURES`.
TARGETS = {80: "sm_80", 90: "sm_90a", 100: "sm_100a"}

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

    def known(self) -> dict:
        """Returns the columns of a row of table `kernels` that need no compiler, and `users`."""
        return {
            "kernel": self.name,
            "target": TARGETS[self.target.arch],
            "dtype": self.dtype,
            "launch_config": json.dumps(self.launch_config, default=str),
            "shared_limit_bytes": devices.of_capability(self.target.arch).shared_bytes,
            "num_stages": self.options["num_stages"],
            "users": sorted(self.users),
        }

    def compiled(self) -> dict:
        """Compiles it, and returns the other columns; in a process that logs what ptxas says."""
        import triton

        start = time.perf_counter()
        with redirect_stdout(io.StringIO()) as log:
            kernel = triton.compile(self.source, target=self.target, options=self.options)
        compile_s = time.perf_counter() - start
        functions = RESOURCES.findall(log.getvalue())
        if not functions:
            raise RuntimeError(f"ptxas said nothing: {log.getvalue()!r}")
        return {
            "registers": max(int(registers) for _, registers in functions),
            "spill_bytes": max(int(stack) for stack, _ in functions),
            "shared_bytes": kernel.metadata.shared,
            "num_warps": kernel.metadata.num_warps,
            "compile_s": compile_s,
            "warnings": "\n".join(dict.fromkeys(WARNING.findall(log.getvalue()))),
        }


def compile_all() -> Iterator[dict]:
    """Yields rows of table `kernels` without provenance, one per kernel, constants and target.

    A row also has `users`, the implementations that launch the kernel, as [operator, name], and
    `code`, by which it is kept. Its `compile_s` is None where the result was kept. Rows come as
    they are known. Raises RuntimeError with the compiler's message for what does not compile.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    environment["TRITON_ALWAYS_COMPILE"] = "1"  # a cached kernel has no log, and no `compile_s`
    environment["TRITON_DUMP_PTXAS_LOG"] = "1"
    command = [sys.executable, "-m", "tnp.gates.compile", "--rows"]
    # Its last lines are read when it has ended: a pipe that nobody reads would stop it.
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as child,
    ):
        yield from map(json.loads, child.stdout)
        if child.wait():
            errors.seek(0)
            raise RuntimeError(f"a kernel does not compile: {errors.read()[-400:]}")


def rows_of(jobs: list[Job | CudaJob], path: Path = kept.FILE) -> Iterator[dict]:
    """Yields the row of each job: first those whose results are kept in `path`, then the others,
    compiled by as many processes as this one may use cores.
    """
    results = kept.results(path)
    changed = []
    for job, code in [(job, kept.code(job)) for job in jobs]:
        if code in results:
            yield job.known() | results[code] | {"compile_s": None, "code": code}
        else:
            changed.append((job, code))
    if not changed:
        return
    # Forked, since a job holds functions that no pipe carries.
    n_processes = min(len(os.sched_getaffinity(0)), len(changed))
    with multiprocessing.get_context("fork").Pool(n_processes, _take, (changed,)) as pool:
        yield from pool.imap_unordered(_compiled, range(len(changed)))


_taken: list[tuple[Job | CudaJob, str]] = []  # in a process of the pool


def _take(jobs: list[tuple[Job | CudaJob, str]]) -> None:
    _taken[:] = jobs


def _compiled(index: int) -> dict:
    job, code = _taken[index]
    known = job.known()
    try:
        return known | job.compiled() | {"code": code}
    except Exception as error:
        what = " ".join(known[name] for name in ("kernel", "dtype", "target"))
        raise RuntimeError(f"{what}: {error}") from None


def collect(launches: Iterable[Launch]) -> list[Job | CudaJob]:
    """What `launches` compile, once each; afterwards nothing can be launched in this process.

    Triton keeps what it compiled by device: each capability is a device of its own here.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from tnp.dispatch.launcher import watched

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

    def note(bound: nvrtc.Bound) -> None:
        in_cuda.note(bound, launch.dtype, launch.users)

    with watched(), nvrtc.watched(note):
        for launch in launches:
            launch.call()
    return [*jobs, *in_cuda.found.values()]


def faults(row: dict) -> Iterator[tuple[str, int, int]]:
    """Yields what is measured of a compiled kernel: a metric, its value and its bound."""
    yield "spilled bytes", row["spill_bytes"], 0
    yield "shared memory bytes", row["shared_bytes"], row["shared_limit_bytes"]
    yield "ptxas warnings", len(row["warnings"].splitlines()), 0


def described(row: dict) -> str:
    """Names a compiled kernel: its dtype, constants and target."""
    config = " ".join(f"{name}={x}" for name, x in json.loads(row["launch_config"]).items())
    return f"{row['kernel']} {row['dtype']} {config} for {row['target']}"


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tnp.gates.compile",
        description="Check every committed kernel configuration for every target. Only those are "
        "compiled that changed since the file of results was written.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--keep", action="store_true", help=f"write the results to {kept.FILE.name} as well"
    )
    what.add_argument(
        "--rows", action="store_true", help="print the rows of table `kernels` as JSON, one a line"
    )
    given = parser.parse_args()
    if given.rows:
        for row in rows_of(collect(committed_launches())):
            print(json.dumps(row), flush=True)
        return
    rows, n_red = [], 0
    try:
        for row in compile_all():
            rows.append(row)
            if row["compile_s"] is not None:
                print(f"{described(row)}: {row['registers']} registers, {row['compile_s']:.1f} s")
            red = [f"{metric} {value}, bound {bound}" for metric, value, bound in faults(row)
                   if value > bound]  # fmt: skip
            n_red += bool(red)
            if red:
                print(f"RED: {described(row)}: {', '.join(red)}", flush=True)
    finally:  # what was kept comes first, so that an interrupt loses nothing
        if given.keep and rows:
            kept.write(rows, kept.FILE)
    n_compiled = sum(row["compile_s"] is not None for row in rows)
    print(f"{len(rows)} kernels, {n_compiled} of them compiled now, {n_red} red")
    raise SystemExit(n_red > 0)


if __name__ == "__main__":
    _main()
