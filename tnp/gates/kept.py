"""Keeps the compiler's results for each kernel, so that a run compiles only changed kernels.

Each package has a committed file `compiled.csv`, with one line for each compiled form of a kernel.
Its column `code` is a hash of all that decides the result:

- the kernel's definitions without comments (`tnp.experiment.code_hash`), and its constants,
- the types and properties of its arguments,
- the compiler's options and the target,
- the versions of the compilers.

A kernel without a line of its code is compiled. `python -m tnp.gates.compile --keep` writes the
files.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tnp.experiment.code_hash import digest
from tnp.experiment.kernel_code import kernel_hash
from tnp.gates.compile_job import Job
from tnp.util.atomic_files import replacing

FILE = Path(__file__).with_name("compiled.csv")  # the file of package tnp
_NAMES = ("kernel", "target", "dtype")  # for a reader: lines are found by their code alone
_NUMBERS = ("registers", "spill_bytes", "shared_bytes", "num_warps")
_COLUMNS = (*_NAMES, *_NUMBERS, "warnings", "code")


def file_of(package: str) -> Path:
    """Returns the file that keeps results of a package's kernels."""
    return FILE if package == "tnp" else Path(find_spec(package).origin).with_name(FILE.name)


@cache
def results(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the file's results by code, as columns of table `kernels`; {} without a file."""
    if not path.is_file():
        return {}
    with path.open(newline="") as file:
        return {
            line["code"]: {name: int(line[name]) for name in _NUMBERS}
            | {"warnings": line["warnings"]}
            for line in csv.DictReader(file)
        }


def write(rows: Iterable[dict[str, Any]], path: Path) -> None:
    """Rewrites the file from rows of table `kernels` that have a `code`."""
    lines = sorted({row["code"]: [str(row[name]) for name in _COLUMNS] for row in rows}.values())
    with replacing(path) as new, new.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([_COLUMNS, *lines])


def code(job: Any) -> str:
    """Returns a hash, 16 hexadecimal digits, of all that decides the result of compiling a job."""
    if not isinstance(job, Job):  # another language's
        return job.code()
    import triton
    from triton.compiler.compiler import make_backend

    source = job.source
    backend = make_backend(job.target)
    properties = [str(source.signature), str(source.attrs)]
    properties += [f"{at} {_said(value)}" for at, value in sorted(source.constants.items())]
    kernel = _function(source.fn), _globals(source.fn)
    options = backend.parse_options(dict(job.options)).hash()
    return digest([kernel, properties, options, backend.hash(), triton.__version__, _environment()])


def _said(value: Any) -> str:
    """Returns a constant as text. A Triton function is written as its hash."""
    return _function(value) if hasattr(value, "cache_key") else repr(value)


def _function(function: Any) -> str:
    return kernel_hash(function.fn.__module__, function.fn.__qualname__)


def _globals(function: Any) -> list[str]:
    """Returns the globals that a kernel reads, itself or in functions it calls, as "name value"."""
    assert function.cache_key  # computing the key fills used_global_vals
    return sorted(
        f"{name} {value!r}" for (name, _), (value, _) in function.used_global_vals.items()
    )


@cache
def _environment() -> str:
    """Returns the environment variables that change how Triton compiles a kernel."""
    from triton._C.libtriton import get_cache_invalidating_env_vars

    return str(sorted(get_cache_invalidating_env_vars().items()))
