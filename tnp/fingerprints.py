"""What the results of an implementation, and of everything that uses an operator, depend on.

Of ours that is the definitions that it reaches (`tnp.definitions`); of somebody else's, its
packages as they are installed. Nothing of theirs is imported, and neither is torch.
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

from tnp.catalog import OPERATORS, Listed, catalog
from tnp.contract import Implementation
from tnp.definitions import LAMBDA, PACKAGES, definitions, digest, together


def of_implementation(listed: Listed, gate: bool = False) -> str:
    """What the results of an implementation depend on besides its operator.

    Of ours that is its code, of somebody else's its packages as they are installed. `gate` adds
    what it says of itself that a gate asks: dtypes, gradients, options.
    """
    return together(implementation_definitions(listed, gate))


def implementation_definitions(listed: Listed, gate: bool = False) -> dict[str, str]:
    """{name: hash}: the parts of `of_implementation`."""
    one = listed.own
    if one is None:
        return {f"{name}:": installed_hash(name) or "" for name in listed.packages}
    said = [one.compile]
    if gate:
        said += [one.gradients, one.dtypes, one.options, one.moving, one.precision]
    found = _of_functions(_run_by(one), listed.op)
    return found | {f"{listed.op}.{listed.name}:": digest(said)}


def of_operator(op: str, gate: bool = False) -> str:
    """What every implementation of an operator is given and compared with.

    `gate` adds what only its gate asks for: cases, broken references, how far off a result may be.
    """
    return together(operator_definitions(op, gate))


def operator_definitions(op: str, gate: bool = False) -> dict[str, str]:
    """{name: hash}: the parts of `of_operator`."""
    operator = catalog().operator(op)
    functions = [operator.describe, operator.draw, operator.reference, operator.work]
    said = [
        *(operator.inputs, operator.outputs, operator.sizes, operator.differentiated),
        *(operator.scalars, sorted(operator.values.items()), operator.kept),
        operator.backward_with_forward,
    ]
    if gate:
        functions += [operator.cases, operator.condition, operator.spot]
        functions += [operator.budget.emulate, *operator.controls.values()]
        said += [operator.budget.outputs, operator.budget.gradients, operator.budget.emulated]
        said += [sorted(operator.controls)]
    return _of_functions(filter(None, functions), op) | {f"{op}:": digest(said)}


def installed_hash(distribution: str) -> str | None:
    """Of an installed distribution's files, of an editable one's sources; None: not installed.

    Both ways of installing the same sources have the same hash.
    """
    try:
        found = metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return None
    origin = json.loads(found.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable"):
        return digest(sorted(_editable(found)))
    record = found.read_text("RECORD")
    if record is None:  # installed by something other than pip
        return digest([found.version, found.read_text("METADATA")])
    rows = (row for row in csv.reader(record.splitlines()) if len(row) == 3 and row[1])
    return digest(sorted((row[0], row[1]) for row in rows if not _of_installer(row[0])))


# ------------------------------------------------------------------------------------- functions


def _run_by(one: Implementation) -> Iterator[Callable | str]:
    if one.run is not None:
        yield one.run
    for operation in filter(None, (one.forward, one.backward)):
        yield from operation.kernels
    yield from filter(None, (one.work, one.budget and one.budget.emulate))


def _of_functions(functions: Iterable[Callable | str], op: str) -> dict[str, str]:
    """Definitions of functions and of "module:NAME"; of another package's, its own hash."""
    starts, found = [], {}
    for function in functions:
        for start in [function] if isinstance(function, str) else _starts(function):
            package = start.split(".")[0].split(":")[0]
            if package in PACKAGES:
                starts.append(start)
            elif name := _brings(package, op):
                found[f"{name}:"] = installed_hash(name) or ""
    return found | definitions(starts)


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


def _brings(package: str, op: str) -> str | None:
    """The distribution that brings an operator whose functions lie in this package."""
    for entry in metadata.entry_points(group=OPERATORS):
        if entry.module.split(".")[0] == package:
            return entry.dist.name
    raise ValueError(f"a function of operator {op!r} lies in {package!r}, which brings no operator")


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
