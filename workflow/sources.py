"""Which definitions a job depends on, read from the sources without importing anything.

Jobs carry a fingerprint of them as a parameter, so that editing one kernel voids its own gate and
benchmarks and nothing else, and a comment nothing at all.
"""

import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from tnp.bench.outcome import JOINT, implementation_of
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
from tnp.model.variants import FAMILIES, Variant
from tnp.store.schemas import CEILINGS

# How rows and tables are written, not what is measured: a column added there voids no measurement.
NOT_MEASURED = frozenset({"tnp.store.schemas", "tnp.store.files"})

Pair = tuple[str, str]  # family of operators, implementation
Found = dict[str, str]  # {"module:name" or a table's file: hash}


def of_gate(gate: str) -> Found:
    """Of a gate of the model, or of one implementation, "op--swiglu--triton".

    A gate of the model leaves our kernels out, whose own gates answer for them, but one.
    """
    kind, *names = gate.split("--")
    if names:
        return _of_implementation_gate(*names)
    found = _reached(f"tnp.gates.{gate}:*")
    for operator in _operators_of(gate):
        for name in catalog().names(operator.name):
            provider = catalog().listed(operator.name, name).provider
            ours = gate == COMPILED or GATES[gate].ours
            if provider == OWN and ours or provider == "torch" and gate != COMPILED:
                found |= _of_operator(operator.name, name, GATE, "")
    return found


def _operators_of(gate: str) -> list[Operator]:
    """That a gate runs: all, or the model's."""
    if gate == COMPILED:
        return list(catalog().operators.values())
    families = *FAMILIES, *block_of(dict.fromkeys(FAMILIES, OWN))
    return [operator for family in families for operator in catalog().family(family)]


def _of_implementation_gate(op: str, name: str) -> Found:
    """It forces its kernels: no table has a say."""
    found = _reached("tnp.gates.operators:checks")
    found |= operator_definitions(op, GATE, NOT_MEASURED)
    return found | implementation_definitions(catalog().listed(op, name), GATE, NOT_MEASURED)


def of_step(parameters: dict) -> Found:
    used = _of_variant(parameters)
    return _using("tnp.bench.steps:measure_step", used, parameters["device_slug"])


def of_predictions(parameters: dict) -> Found:
    """Of all forms alike."""
    used = _of_variant(parameters)
    start = "tnp.bench.predictions:measure_predictions"
    if parameters["study"] == JOINT:
        start = "tnp.bench.joint:measure_joint"
    return _using(start, used, parameters["device_slug"])


def of_op(parameters: dict, without: Iterable[str] = HOUSE) -> Found:
    """The other operators, which the benchmark can time as well, are left out.

    And so is the house, on which a device's time does not depend.
    """
    op, name = parameters["op"], parameters["implementation"]
    found = _reached("tnp.bench.measure:measure_op", without)
    if op in CEILINGS:
        return found
    return found | _of_operator(op, name, BENCHMARK, parameters.get("device_slug", ""), without)


def of_host(parameters: dict) -> Found:
    """Of calls from Python: the house takes part in their time."""
    found = _reached("tnp.bench.host:measure_host")
    for asked in parameters["problems"]:
        for name in asked["implementations"]:
            found |= _of_operator(asked["op"], name, STEP, parameters["device_slug"])
    return found


def of_host_steps(parameters: dict) -> Found:
    """Returns the code of all forms, which take turns in one process."""
    used = set().union(*map(_of_variant, parameters["forms"]))
    start = "tnp.bench.host_steps:measure_host_steps"
    return _using(start, used, parameters["device_slug"])


def of_profile(parameters: dict) -> Found:
    """The launch that is profiled is in a process that another module starts by its name."""
    op, name, slug = (parameters[key] for key in ("op", "implementation", "device_slug"))
    found = _reached("tnp.bench.profiles:measure_profiles", HOUSE)
    found |= _reached("tnp.bench.profile_launch:launch", HOUSE)
    return found | _of_operator(op, name, BENCHMARK, slug, HOUSE)


def of_training(parameters: dict) -> Found:
    return _using("tnp.train.recorded_runs:run", _of_variant(parameters), parameters["device_slug"])


def of_job(kind: str, parameters: dict) -> Found:
    """Of a job of any kind but a gate."""
    if kind != "op":
        of_kind = {
            "step": of_step,
            "prediction": of_predictions,
            "host": of_host,
            "host_step": of_host_steps,
            "profile": of_profile,
            "train": of_training,
        }
        return of_kind[kind](parameters)
    found: Found = {}
    for name in dict.fromkeys(map(implementation_of, parameters["implementations"])):
        found |= of_op(parameters | {"implementation": name})
    return found


def with_definitions(kind: str, parameters: dict) -> dict:
    """A job's parameters with `definitions`: the hashes of what it runs, by name.

    It is a "step", a "prediction" or an "op". Of an operator's benchmark they are those of each
    implementation, by its name, house included.
    """
    if kind != "op":
        return parameters | {"definitions": code(of_job(kind, parameters))}
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
    implementations = variant.implementations()
    whole = block_of(implementations) if variant.block else {}
    return set((implementations | whole).items())


def _using(start: str, implementations: set[Pair], slug: str) -> Found:
    """What is reached from `start`, and what these implementations run, by family; no others."""
    found = _reached(start)
    for family, name in sorted(implementations):
        for operator in catalog().family(family):
            found |= _of_operator(operator.name, name, STEP, slug)
    return found


def _reached(start: str, without: Iterable[str] = ()) -> Found:
    return dict(_definitions(start, frozenset({*NOT_MEASURED, *without})))


# Of all steps, and of all benchmarks of operators, it is the same.
@cache
def _definitions(start: str, without: frozenset[str]) -> Found:
    return definitions([start], without)


@cache
def _of_operator(op: str, name: str, use: str, slug: str, without: Iterable[str] = ()) -> Found:
    """What one implementation of an operator runs, and the table's entries that decide about it."""
    without = {*NOT_MEASURED, *without}
    found = operator_definitions(op, use, without)
    ways = _ways(op, name, slug)
    for way in ways:
        found |= implementation_definitions(way, use, without)
    return found | _entries(op, ways, name, slug)


def _ways(op: str, name: str, slug: str) -> list[Listed]:
    """What may run where `name` is asked for: of "auto" ours, and what the table names."""
    known = catalog()
    if not is_automatic(name):
        return [known.listed(op, name)]
    here = [n for n in known.candidates(op, name) if known.listed(op, n).own]
    named = {entry["choice"] for entry in _table(slug) if entry["of"] == op}
    return [known.listed(op, n) for n in known.names(op) if n in {*here, *named}]


def _entries(op: str, ways: list[Listed], name: str, slug: str) -> Found:
    """Entries of the device's table that choose between these, their kernels and configurations."""
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
