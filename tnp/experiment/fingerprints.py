"""Finds the code that an implementation's results depend on.

Our implementations depend on the definitions that they reach (`tnp.experiment.code_hash`). Others
depend on their installed packages. It imports neither torch nor another package.
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
from tnp.experiment.code_hash import HOUSE, LAMBDA, definitions, digest, is_ours

# Uses of an operator: a training step calls it, a benchmark also draws its inputs and checks its
# results, and a gate tests all that is declared.
STEP, BENCHMARK, GATE = "step", "benchmark", "gate"


def implementation_definitions(
    listed: Listed, use: str = BENCHMARK, without: Iterable[str] = HOUSE
) -> dict[str, str]:
    """Returns {name: hash} of an implementation: its code, or its packages as installed.

    The operator itself is left out, and so are modules in `without`.
    """
    one, name = listed.own, f"{listed.op}.{listed.name}"
    if one is None:
        return {f"{package}:": installed_hash(package) for package in listed.packages}
    found = _of_functions(_run_by(one, use), without)
    found[f"{name}:compile"] = digest(one.compile)
    if use == GATE:
        said = (one.gradients, one.dtypes, one.options, one.nondeterministic, one.precision)
        found[f"{name}:limits"] = digest(said)
    return found


def operator_definitions(
    op: str, use: str = BENCHMARK, without: Iterable[str] = HOUSE
) -> dict[str, str]:
    """Returns {name: hash} of an operator: its inputs, reference, limits and test cases.

    Modules in `without` are left out.
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
        functions += [
            operator.cases,
            operator.condition,
            operator.partial_reference,
            budget.emulate,
        ]
        controls = dict(operator.controls)
        for some in operator.controls_of.values():
            controls |= some
        functions += controls.values()
        said = (budget.outputs, budget.gradients, budget.emulated, sorted(controls))
        found[f"{op}:budget"] = digest(said)
    return found | _of_functions(filter(None, functions), without)


def installed_hash(distribution: str) -> str:
    """Returns the hash of a distribution's files; "" if it is not installed.

    An editable installation has the same hash as a copied one of the same sources.
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
    if use == GATE:
        yield from filter(None, (one.budget and one.budget.rounded,))


def _of_functions(functions: Iterable[Callable | str], without: Iterable[str]) -> dict[str, str]:
    """Returns the definitions of functions and of "module:NAME". Other packages have one hash."""
    starts, found = [], {}
    for function in functions:
        for start in [function] if isinstance(function, str) else _starts(function):
            package = start.split(".")[0].split(":")[0]
            if is_ours(start):
                starts.append(start)
            elif name := _brings(package):
                found[f"{name}:"] = installed_hash(name)
            else:  # a library's, whose version stands in the row
                found[start] = digest(start)
    return found | definitions(starts, without)


def _starts(function: Callable) -> Iterator[str]:
    """Yields the places of a function's definition, and of functions in its partials and cells."""
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
    """Returns the distribution whose operators lie in `package`, or None."""
    entries = metadata.entry_points(group=OPERATORS)
    return next((one.dist.name for one in entries if one.module.split(".")[0] == package), None)


def _editable(found: metadata.Distribution) -> Iterator[tuple[str, str]]:
    """Yields the files of its entry points' packages, as a RECORD holds them."""
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
    """Returns whether the installer made a file: metadata or compiled code."""
    return ".dist-info/" in path or path.endswith(".pyc") or path.startswith("../")
