"""What the results of an implementation, and of everything that uses an operator, depend on.

Of ours that is the definitions that it reaches (`tnp.experiment.code_hash`); of somebody else's,
its packages as they are installed. Nothing of theirs is imported, and neither is torch.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import json
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import metadata
from pathlib import Path

from tnp.dispatch.registry import OPERATORS, Listed, catalog
from tnp.dispatch.spec import Implementation
from tnp.experiment.code_hash import HOUSE, LAMBDA, PACKAGES, definitions, digest

# What a job does with an operator: a training step calls it, a benchmark also draws its inputs and
# checks its results, a gate tests all that is said of it.
STEP, BENCHMARK, GATE = "step", "benchmark", "gate"


def implementation_definitions(
    listed: Listed, use: str = BENCHMARK, without: Iterable[str] = HOUSE
) -> dict[str, str]:
    """{name: hash} of what the results of an implementation depend on besides its operator.

    Of ours that is its code, of somebody else's its packages as they are installed. Modules in
    `without` are passed by.
    """
    one, name = listed.own, f"{listed.op}.{listed.name}"
    if one is None:
        return {f"{package}:": installed_hash(package) for package in listed.packages}
    found = _of_functions(_run_by(one, use), without)
    found[f"{name}:compile"] = digest(one.compile)
    if use == GATE:
        said = (one.gradients, one.dtypes, one.options, one.moving, one.precision)
        found[f"{name}:limits"] = digest(said)
    return found


def operator_definitions(
    op: str, use: str = BENCHMARK, without: Iterable[str] = HOUSE
) -> dict[str, str]:
    """{name: hash} of what every implementation of an operator is given and compared with.

    Modules in `without` are passed by.
    """
    operator = catalog().operator(op)
    functions = [operator.describe]
    said = (
        *(operator.inputs, operator.outputs, operator.sizes, operator.differentiated),
        *(tuple(operator.scalars), operator.kept, operator.backward_with_forward),
    )
    found = {f"{op}:form": digest(said)}
    if use != STEP:
        functions += [operator.draw, operator.reference, operator.work]
        found[f"{op}:values"] = digest(sorted(operator.scalars.items()))
    if use == GATE:
        budget = operator.budget
        functions += [operator.cases, operator.condition, operator.spot, budget.emulate]
        controls = dict(operator.controls)
        for some in operator.controls_of.values():
            controls |= some
        functions += controls.values()
        said = (budget.outputs, budget.gradients, budget.emulated, sorted(controls))
        found[f"{op}:budget"] = digest(said)
    return found | _of_functions(filter(None, functions), without)


def installed_hash(distribution: str) -> str:
    """Of an installed distribution's files, of an editable one's sources; "": not installed.

    Both ways of installing the same sources have the same hash.
    """
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return ""
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return digest(sorted(_editable(found)))
    record = found.read_text("RECORD")
    if record is None:  # installed by something other than pip
        return digest([found.version, found.read_text("METADATA")])
    rows = (row for row in csv.reader(record.splitlines()) if len(row) == 3 and row[1])
    return digest(sorted((row[0], row[1]) for row in rows if not _of_installer(row[0])))


# ------------------------------------------------------------------------------------- functions


def _run_by(one: Implementation, use: str) -> Iterator[Callable | str]:
    if one.run is not None:
        yield one.run
    for operation in filter(None, (one.forward, one.backward)):
        yield from operation.kernels
    if use != STEP:
        yield from filter(None, (one.work, one.budget and one.budget.emulate))


def _of_functions(functions: Iterable[Callable | str], without: Iterable[str]) -> dict[str, str]:
    """Definitions of functions and of "module:NAME"; of another package's, its own hash."""
    starts, found = [], {}
    for function in functions:
        for start in [function] if isinstance(function, str) else _starts(function):
            package = start.split(".")[0].split(":")[0]
            if package in PACKAGES:
                starts.append(start)
            elif name := _brings(package):
                found[f"{name}:"] = installed_hash(name)
            else:  # a library's, whose version stands in the row
                found[start] = digest(start)
    return found | definitions(starts, without)


def _starts(function: Callable) -> Iterator[str]:
    """Where a function is defined, and those that a partial or enclosed one was made with."""
    if isinstance(function, partial):
        given = (*function.args, *function.keywords.values())
        yield from _starts(function.func)
    else:
        cells = getattr(function, "__closure__", None) or ()
        given = [cell.cell_contents for cell in cells]
        name = function.__qualname__.split(".")[0]
        if name == LAMBDA:
            name = f"{LAMBDA}{function.__code__.co_firstlineno}"
        yield f"{function.__module__}:{name}"
    for value in given:
        if callable(value) and hasattr(value, "__qualname__"):
            yield from _starts(value)


def _brings(package: str) -> str | None:
    """The distribution that brings operators whose functions lie in this package, if one does."""
    entries = metadata.entry_points(group=OPERATORS)
    return next((one.dist.name for one in entries if one.module.split(".")[0] == package), None)


def _editable(found: metadata.Distribution) -> Iterator[tuple[str, str]]:
    """Files of the packages that its entry points are of, as a RECORD holds them."""
    for package in sorted({entry.module.split(".")[0] for entry in found.entry_points}):
        spec = importlib.util.find_spec(package)  # imports nothing of a package
        if spec is None or not spec.origin:
            continue
        whole = spec.submodule_search_locations
        top = Path(spec.origin).parent.parent if whole else Path(spec.origin).parent
        files = Path(spec.origin).parent.rglob("*") if whole else [Path(spec.origin)]
        for file in files:
            path = file.relative_to(top).as_posix()
            if file.is_file() and not _of_installer(path):
                content = hashlib.sha256(file.read_bytes()).digest()
                yield path, f"sha256={base64.urlsafe_b64encode(content).rstrip(b'=').decode()}"


def _of_installer(path: str) -> bool:
    """What an installation adds: metadata, compiled files."""
    return ".dist-info/" in path or path.endswith(".pyc") or path.startswith("../")
