"""Finds the definitions that a job depends on, in the sources, without importing anything.

Each job carries a fingerprint of them as a parameter. An edited kernel voids only the jobs that run
it, and an edited comment voids none.
"""

import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tnp.dispatch import devices, tuned_tables
from tnp.dispatch.registry import Listed, block_of, catalog, is_automatic
from tnp.dispatch.spec import OWN, Operator
from tnp.experiment.code_hash import HOUSE, ROOT, definitions, digest, module_hash
from tnp.experiment.fingerprints import (
    BENCHMARK,
    GATE,
    STEP,
    implementation_definitions,
    operator_definitions,
)
from tnp.gates import COMPILED, GATES
from tnp.model.variants import FAMILIES
from tnp.store.schemas import CEILINGS

# How rows and tables are written, not what is measured: a column added there voids no measurement.
NOT_MEASURED = frozenset({"tnp.store.schemas", "tnp.store.files"})

Pair = tuple[str, str]  # family of operators, implementation
Found = dict[str, str]  # {"module:name" or a table's file: hash}


def of_gate(gate: str) -> Found:
    """Returns the code of a gate of the model, or of one implementation ("op--swiglu--triton").

    PyTorch's implementations are in it, except for gate `kernels`. Ours are in it if the gate runs
    them: all of them for a gate of every operator, else those that "auto" may choose.
    """
    if gate not in GATES:
        _, *names = gate.split("--")
        return _of_implementation_gate(*names)
    found = reached(f"tnp.gates.{GATES[gate].module or gate}:*")
    for operator in _operators_of(gate):
        for name in catalog().names(operator.name):
            one = catalog().listed(operator.name, name)
            if (one.provider == "torch" and gate != COMPILED) or _runs(gate, one):
                found |= of_operator(operator.name, name, GATE, "")
    return found


def _runs(gate: str, one: Listed) -> bool:
    """Returns whether a gate of the model runs an implementation of ours."""
    if one.provider != OWN or not GATES[gate].ours:
        return False
    return GATES[gate].every or one.implementation.selectable


def _operators_of(gate: str) -> list[Operator]:
    """Returns the operators that a gate runs: all, those it names, or the model's."""
    if GATES[gate].every:
        return list(catalog().operators.values())
    if GATES[gate].runs:
        return [catalog().operator(name) for name in GATES[gate].runs]
    families = *FAMILIES, *block_of(dict.fromkeys(FAMILIES, OWN))
    return [operator for family in families for operator in catalog().family(family)]


def _of_implementation_gate(op: str, name: str) -> Found:
    """Returns the code of a gate that forces its kernels: no table has a say."""
    found = reached("tnp.gates.operators:checks")
    found |= operator_definitions(op, GATE, NOT_MEASURED)
    return found | implementation_definitions(catalog().listed(op, name), GATE, NOT_MEASURED)


def of_op(parameters: Mapping[str, Any], without: Iterable[str] = HOUSE) -> Found:
    """Returns the code of one implementation's benchmark.

    The other operators, which the benchmark can time as well, are left out. So is the house, on
    which a device's time does not depend.
    """
    op, name = parameters["op"], parameters["implementation"]
    found = reached("tnp.bench.measure:measure_op", without)
    if op in CEILINGS:
        return found
    return found | of_operator(op, name, BENCHMARK, parameters.get("device_slug", ""), without)


def code(found: Found) -> Found:
    """Returns the fingerprints of code alone.

    Choices made by a tuned table are left out: each row records them in `launch_config`.
    """
    return {
        name: hash_ for name, hash_ in found.items() if not name.partition(":")[0].endswith(".json")
    }


def fingerprint(script: str, found: Mapping[str, str]) -> str:
    """Returns a digest of what a job of workflow/scripts/`script`.py runs."""
    return digest([_script(script), sorted(set(found.values()))])


def views() -> list[str]:
    files = sorted(ROOT.joinpath("workflow/sql").glob("*.sql"))
    return [os.path.relpath(file) for file in files]  # a checkout that was moved reruns nothing


def using(start: str, implementations: Iterable[Pair], slug: str) -> Found:
    """Returns what is reached from `start`, and what these implementations run; no others."""
    found = reached(start)
    for family, name in sorted(implementations):
        for operator in catalog().family(family):
            found |= of_operator(operator.name, name, STEP, slug)
    return found


def reached(start: str, without: Iterable[str] = ()) -> Found:
    return dict(_definitions(start, frozenset({*NOT_MEASURED, *without})))


# All steps start alike, and so do all benchmarks of operators.
@cache
def _definitions(start: str, without: frozenset[str]) -> Found:
    return definitions([start], without)


@cache
def of_operator(op: str, name: str, use: str, slug: str, without: Iterable[str] = ()) -> Found:
    """Returns the code of one implementation, and the table's entries that decide about it."""
    without = {*NOT_MEASURED, *without}
    found = operator_definitions(op, use, without)
    ways = _ways(op, name, slug)
    for way in ways:
        found |= implementation_definitions(way, use, without)
    return found | _entries(op, ways, name, slug)


def _ways(op: str, name: str, slug: str) -> list[Listed]:
    """Returns what may run where `name` is asked for: for "auto" ours, and what the table names."""
    known = catalog()
    if not is_automatic(name):
        return [known.listed(op, name)]
    here = [n for n in known.candidates(op, name) if known.listed(op, n).own]
    named = {entry["choice"] for entry in _table(slug) if entry["of"] == op}
    return [known.listed(op, n) for n in known.names(op) if n in {*here, *named}]


def _entries(op: str, ways: list[Listed], name: str, slug: str) -> Found:
    """Returns a digest of the entries of the device's table that choose between these."""
    own = [way.own for way in ways if way.own]
    passes = (one for way in own for one in (way.forward, way.backward))
    of = {one.name for one in passes if one} | ({op} if is_automatic(name) else set())
    entries = [entry for entry in _table(slug) if entry["of"] in of]
    return {f"{slug}.json:{op}.{name}": digest(sorted(map(ascii, entries)))} if entries else {}


def _table(slug: str) -> list[tuned_tables.Entry]:
    try:
        return tuned_tables.of_target(devices.of_slug(slug))
    except ValueError:  # a GPU that nobody has listed, which has no table
        return []


@cache
def _script(name: str) -> str:
    return module_hash(Path(ROOT, "workflow", "scripts", f"{name}.py").read_text())
