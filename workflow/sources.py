"""Which definitions a job depends on, read from the sources without importing anything.

Jobs carry a fingerprint of them as a parameter, so that editing one kernel voids its own gate and
benchmarks and nothing else, and a comment nothing at all.
"""

import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from tnp import choice, targets
from tnp.bench.kernel_code import module_hash
from tnp.bench.outcome import implementation_of
from tnp.bench.sizes import CEILINGS
from tnp.catalog import AUTO, Listed, catalog
from tnp.definitions import EVERYTHING, HOUSE, ROOT, definitions, digest
from tnp.fingerprints import (
    BENCHMARK,
    GATE,
    STEP,
    implementation_definitions,
    operator_definitions,
)
from tnp.gates import GATES, KERNEL_GATES
from tnp.ops import registry
from tnp.variants import Variant

# Which kernel runs, of our own; and which implementation, where "auto" may choose.
TUNED = "tnp/ops/tuned/attention.json"
CHOSEN = "tnp/ops/tuned/implementations.json"

# How rows and tables are written, not what is measured: a column added there voids no measurement.
NOT_MEASURED = frozenset({"tnp.schemas", "tnp.store", "tnp.ops.tables"})

Pair = tuple[str, str]  # operator, implementation
Found = dict[str, str]  # {"module:name" or a table's file: hash}


def of_gate(gate: str) -> Found:
    """Of a gate of the model, or of one implementation, "op--swiglu--triton".

    A gate of the model leaves our kernels out, whose own gates answer for them, but one."""
    kind, *names = gate.split("--")
    if names:
        return _of_implementation_gate(*names)
    used = {
        (op, name)
        for op, name in _implementations()
        if gate in KERNEL_GATES.get((op, name), ())
        or name.startswith("sdpa_")
        or name in ("reference", "torch")
        or (GATES[gate].ours and name in ("separate", "fused"))
    }
    return _using([f"tnp.gates.{gate}:*"], used, GATE)


def _of_implementation_gate(op: str, name: str) -> Found:
    """It forces its kernels: no table has a say."""
    found = definitions(["tnp.gates.operators:checks"], NOT_MEASURED)
    found |= operator_definitions(op, GATE, NOT_MEASURED)
    return found | implementation_definitions(catalog().listed(op, name), GATE, NOT_MEASURED)


def of_step(parameters: dict) -> Found:
    used = _of_variant(parameters)
    return _using(["tnp.bench.steps:measure_step"], used, STEP, parameters["device_slug"])


def of_op(parameters: dict, without: Iterable[str] = HOUSE) -> Found:
    """The other operators, which the benchmark can time as well, are left out.

    And so is the house, on which a device's time does not depend.
    """
    op, name = parameters["op"], parameters["implementation"]
    others = {f"tnp.ops.{other}" for other in registry.operators() if other != op}
    used = set() if op in CEILINGS else {(op, name)}
    start, slug = ["tnp.bench.operators:measure_op"], parameters.get("device_slug", "")
    return _using(start, used, BENCHMARK, slug, {*others, *without})


def of_training(parameters: dict) -> Found:
    return _using(["tnp.train:run"], _of_variant(parameters), STEP, parameters["device_slug"])


def of_trials(operator_jobs: Iterable[dict]) -> Found:
    """What times candidates, and our kernels; not the table, which voids no trial."""
    found = definitions(["tnp.bench.tuning:tune", "tnp.bench.tuning:main"], NOT_MEASURED)
    for parameters in operator_jobs:
        found |= of_op(parameters)
    return code(found)


def with_definitions(kind: str, parameters: dict) -> dict:
    """A job's parameters with `definitions`: the hashes of what a "step" or "op" runs, by name.

    Of an operator's benchmark they are those of each implementation, by its name, house included.
    """
    if kind == "step":
        return parameters | {"definitions": code(of_step(parameters))}
    names = dict.fromkeys(map(implementation_of, parameters["implementations"]))
    found = {name: code(of_op(parameters | {"implementation": name}, ())) for name in names}
    return parameters | {"definitions": found}


def code(found: Found) -> Found:
    """Of what was found, what is code: what a table chose stands in the rows' `launch_config`."""
    return {
        name: hash_ for name, hash_ in found.items() if not name.partition(":")[0].endswith(".json")
    }


def fingerprint(script: str, found: Mapping[str, str]) -> str:
    """Digest of what a job of workflow/scripts/`script`.py runs: the script, and what was found."""
    return digest([_script(script), sorted(set(found.values()))])


def views() -> list[str]:
    files = sorted(ROOT.joinpath("workflow/sql").glob("*.sql"))
    return [os.path.relpath(file) for file in files]  # a checkout that was moved reruns nothing


def _of_variant(parameters: dict) -> set[Pair]:
    variant = Variant.from_spec(parameters["variant"], parameters["variant_spec"])
    return set(variant.implementations().items())


def _using(
    starts: Iterable[str],
    implementations: set[Pair],
    use: str,
    slug: str = "",
    without: Iterable[str] = (),
) -> Found:
    """What is reached from `starts`, and what these implementations run, no other one."""
    # Operators that are not declared yet list the modules that an implementation lives in.
    listed = {pair for pair in implementations if not catalog().family(pair[0])}
    declared = implementations - listed
    listed |= {(op, one) for op, name in listed for one in registry.candidates(op, name)}
    used = {module for pair in listed for module in registry.get(*pair).modules}
    others = (pair for pair in _implementations() if not catalog().family(pair[0]))
    every = {module for pair in others for module in registry.get(*pair).modules}
    without = {*(every - used), *NOT_MEASURED, *without}
    # A gate speaks for all of a module that others may reach more of.
    whole = [f"{module}:{EVERYTHING}" for module in used] if use == GATE else []
    found = definitions([*starts, *whole], without)
    if any(module in used for module in registry.OURS):
        found |= _file(TUNED)
    if any(name == AUTO for _, name in listed):
        found |= _file(CHOSEN)
    for family, name in sorted(declared):
        for operator in catalog().family(family):
            if ways := _ways(operator.name, name, slug):
                found |= operator_definitions(operator.name, use, without)
                found |= _entries(operator.name, ways, name, slug)
            for way in ways:
                found |= implementation_definitions(way, use, without)
    return found


def _ways(op: str, name: str, slug: str) -> list[Listed]:
    """What may run where `name` is asked for: of "auto" all of ours and what the table names.

    Nothing of an operator that has no such implementation, though another of its family has.
    """
    known = catalog()
    if name != AUTO:
        return [known.listed(op, name)] if name in known.names(op) else []
    ours = [n for n in known.names(op) if (own := known.listed(op, n).own) and own.selectable]
    named = {entry["choice"] for entry in _table(slug) if entry["of"] == op}
    return [known.listed(op, n) for n in known.names(op) if n in {*ours, *named}]


def _entries(op: str, ways: list[Listed], name: str, slug: str) -> Found:
    """Entries of the device's table that choose between these, their kernels and configurations."""
    own = [way.own for way in ways if way.own]
    passes = (one for way in own for one in (way.forward, way.backward))
    of = {one.name for one in passes if one} | ({op} if name == AUTO else set())
    entries = [entry for entry in _table(slug) if entry["of"] in of]
    return {f"{slug}.json:{op}": digest(sorted(map(ascii, entries)))} if entries else {}


def _table(slug: str) -> list[choice.Entry]:
    try:
        return choice.of_target(targets.of_slug(slug))[0]
    except ValueError:  # a GPU that nobody has listed, which has no table
        return []


def _implementations() -> list[Pair]:
    return [(op, name) for op in registry.operators() for name in registry.names(op)]


@cache
def _file(name: str) -> Found:
    return {f"{name}:": digest(ROOT.joinpath(name).read_text())}


@cache
def _script(name: str) -> str:
    return module_hash(Path(ROOT, "workflow", "scripts", f"{name}.py").read_text())
