"""Compiles every kernel of ours for every GPU it is meant for, without a GPU.

`compile_all` gives rows of table `kernels`: registers, stack, shared memory and ptxas's warnings.

`tnp.gates.launches` launches kernels on the meta device, with a target in place of a driver;
`tnp.gates.step_launches` does so for steps of decoding. All that the launches would compile is
collected, specialized as at run time, and compiled once each. A process with TRITON_INTERPRET=1
holds interpreted functions, which cannot be compiled. So a child process compiles, and divides the
work among its own processes.

`tnp.gates.kept` keeps results by a hash of everything that decides them. Only kernels that have
changed are compiled.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tnp.gates import kept
from tnp.gates.compile_job import TARGETS, Job
from tnp.gates.launches import Launch, committed_launches


def compile_all(target: str | None = None) -> Iterator[dict]:
    """Yields rows of table `kernels` without provenance: one a kernel, its constants and a target.

    `target` is the only one to compile for; None stands for all.

    A row also has `users`, the implementations that launch the kernel, as [operator, name], and
    `package` and `code`, which identify a kept result. `compile_s` is None for a kept result. Rows
    come as soon as they are known.

    Raises:
        RuntimeError: a kernel does not compile, with the compiler's message.
    """
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    root = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH")]))
    environment["TRITON_ALWAYS_COMPILE"] = "1"  # a cached kernel has no log, and no `compile_s`
    environment["TRITON_DUMP_PTXAS_LOG"] = "1"
    command = [sys.executable, "-m", "tnp.gates.compile", "--rows"]
    command += ["--target", target] if target else []
    # A file takes its errors, since a full pipe would stop the child.
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


def rows_of(jobs: list[Any], path: Path | None = None) -> Iterator[dict]:
    """Yields the row of each job: first those with kept results, then the others.

    It uses as many processes as this one may use cores. `path` names a file of results to use in
    place of each package's own.
    """
    changed = []
    for job, code in [(job, kept.code(job)) for job in jobs]:
        results = kept.results(path or kept.file_of(job.package))
        if code in results:
            yield job.known() | results[code] | {"compile_s": None, "code": code}
        else:
            changed.append((job, code))
    if not changed:
        return
    # The pool forks, since a job holds functions that cannot be pickled.
    n_processes = min(len(os.sched_getaffinity(0)), len(changed))
    with multiprocessing.get_context("fork").Pool(n_processes, _take, (changed,)) as pool:
        yield from pool.imap_unordered(_compiled, range(len(changed)))


_taken: list[tuple[Any, str]] = []  # filled in a process of the pool


def _take(jobs: list[tuple[Any, str]]) -> None:
    _taken[:] = jobs


def _compiled(index: int) -> dict:
    job, code = _taken[index]
    known = job.known()
    try:
        return known | job.compiled() | {"code": code}
    except Exception as error:
        what = " ".join(known[name] for name in ("kernel", "dtype", "target"))
        raise RuntimeError(f"{what}: {error}") from None


def collect(launches: Iterable[Launch]) -> list[Any]:
    """Returns the jobs of `launches`, once each. Afterwards this process cannot launch anything.

    Triton keeps compiled kernels by device, so each capability stands for a device here.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    from tnp.dispatch.launcher import OtherLaunch, watched, watched_others

    jobs: list[Job] = []
    others: dict[Hashable, Any] = {}

    def instead_of_compiling(source, target, options, **_):
        """Notes a job. Returns an object in place of the kernel, which notes its users."""
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

    def note(other: OtherLaunch) -> None:
        if other.key not in others:
            others[other.key] = other.job(launch.dtype)
        others[other.key].users.update(launch.users)

    with watched(), watched_others(note):
        for launch in launches:
            launch.call()
    return [*jobs, *others.values()]


# Bytes that a kernel may spill on a target, by both names. Others spill nothing. `auto` takes
# PyTorch for the attention kernels there. `attend` spills with pages and heads of 128.
SPILLED = {
    ("attend", "sm_80"): 8,
    ("attend", "sm_86"): 8,
    ("attend", "sm_89"): 8,
    ("buffered_attention_bwd", "sm_86"): 64,
    ("centred_keys", "sm_86"): 56,
    ("centred_keys", "sm_89"): 8,
    ("streamed", "sm_100a"): 32,
}


def faults(row: dict) -> Iterator[tuple[str, int, int]]:
    """Yields a metric of a compiled kernel, its value and its bound."""
    yield "spilled bytes", row["spill_bytes"], SPILLED.get((row["kernel"], row["target"]), 0)
    yield "shared memory bytes", row["shared_bytes"], row["shared_limit_bytes"]
    yield "ptxas warnings", len(row["warnings"].splitlines()), 0


def described(row: dict) -> str:
    """Names a compiled kernel, its dtype, constants and target."""
    config = " ".join(f"{name}={x}" for name, x in json.loads(row["launch_config"]).items())
    return f"{row['kernel']} {row['dtype']} {config} for {row['target']}"


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tnp.gates.compile",
        description="Checks every committed kernel configuration for every target. Compiles only "
        "configurations that have changed since the file of results was written.",
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--keep",
        action="store_true",
        help=f"write results to each package's {kept.FILE.name} too",
    )
    what.add_argument(
        "--rows", action="store_true", help="print the rows of table `kernels` as JSON, one a line"
    )
    parser.add_argument(
        "--target", choices=[*TARGETS.values()], help="compile for this target alone"
    )
    given = parser.parse_args()
    if given.keep and given.target:
        parser.error("--keep writes the results of all targets: leave out --target")
    if given.rows:
        from tnp.gates.step_launches import step_launches

        jobs = collect(chain(committed_launches(), step_launches()))
        wanted = [job for job in jobs if given.target in (None, job.known()["target"])]
        for row in rows_of(wanted):
            print(json.dumps(row), flush=True)
        return
    rows, n_red = [], 0
    try:
        for row in compile_all(given.target):
            rows.append(row)
            if row["compile_s"] is not None:
                print(f"{described(row)}: {row['registers']} registers, {row['compile_s']:.1f} s")
            red = [f"{metric} {value}, bound {bound}" for metric, value, bound in faults(row)
                   if value > bound]  # fmt: skip
            n_red += bool(red)
            if red:
                print(f"RED: {described(row)}: {', '.join(red)}", flush=True)
    finally:  # kept results come first, so that an interrupt loses nothing
        if given.keep and rows:
            for package in {row["package"] for row in rows}:
                some = [row for row in rows if row["package"] == package]
                kept.write(some, kept.file_of(package))
    n_compiled = sum(row["compile_s"] is not None for row in rows)
    print(f"{len(rows)} kernels, {n_compiled} of them compiled now, {n_red} red")
    raise SystemExit(n_red > 0)


if __name__ == "__main__":
    _main()
