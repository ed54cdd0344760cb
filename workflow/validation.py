"""Says what is wrong with the configuration, in one sentence with its line, before any work."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError

from tnp.dispatch.registry import AUTO, catalog
from tnp.gates import GATES, generic_gates
from tnp.model.variants import FAMILIES, not_in_models
from workflow import models, shapes
from workflow.configuration import expanded
from workflow.faults import Fault, Place, fault_of, not_among, sentence, unknown
from workflow.plan import EVERY_OPERATOR, gates
from workflow.studies import Config, configuration, studies

ROOT = Path(__file__).parents[1]


def validate(config: Mapping, written: Mapping[Place, str] | None = None) -> Config:
    """Returns the configuration with its grids written out, and the defaults of what it leaves out.

    Args:
        config: what YAML and Snakemake make of the files.
        written: where its values were written (`configuration.places`), or None for config.yaml.

    Raises:
        ValueError: a sentence that names the line, the place, the value and what would be right.
    """
    config, written = expanded(config, written or {})
    try:
        checked = configuration().model_validate(config)
        fault = next(_faults(checked), None)
    except ValidationError as error:
        fault = fault_of(error, configuration())
    if fault is None:
        return checked
    raise ValueError(sentence(fault, written))


def _faults(config: Config) -> Iterator[Fault]:
    """Yields what the type of one section cannot say: names in different sections must agree."""
    known = [*GATES, *generic_gates(), EVERY_OPERATOR]
    yield from not_among(("gates",), "gate", config.gates, known)
    yield from models.faults_of_model(("model",), config.model)
    yield from shapes.faults(config.shapes)
    for name, spec in config.variants.items():
        yield from _faults_of_variant(("variants", name), spec, config)
    taken = {study.section for study in studies()} | _rules()
    for section in ("steps", "ops"):
        for name in getattr(config, section):
            if name in taken:
                what = f"{name!r} is a section or a target already: rename the study"
                yield Fault((section, name), what)
    for study in studies():
        yield from study.faults(config)
    named = gates(config)
    for study in studies():
        for use in study.uses(config):
            yield from models.faults_of_use(use, config, named)


def _rules() -> set[str]:
    """Returns the names of rules, each of which is a target, as a study is one."""
    files = [ROOT / "Snakefile", *ROOT.glob("workflow/rules/*.smk")]
    text = "\n".join(file.read_text() for file in files)
    found = re.findall(r"^(?:use )?rule .*?(\w+)(?: with)?:", text, re.MULTILINE)
    return {*found, *(study.rule for study in studies())}


def _faults_of_variant(place: Place, spec: dict, config: Config) -> Iterator[Fault]:
    for family in (family for family in FAMILIES if family in spec):
        known = [AUTO, *_names(family)]
        if spec[family] not in known:
            yield Fault((*place, family), unknown("implementation", spec[family], known))
            continue
        reason = not_in_models(family, spec[family])
        if reason is not None:
            yield Fault((*place, family), f"a variant cannot use {spec[family]!r}: {reason}")
    yield from models.faults_of_storage(place, spec, config.model)
    yield from models.faults_of_widest(place, spec, config.model)


def _names(family: str) -> list[str]:
    """Returns the implementations that every operator of a family has."""
    first, *others = catalog().family(family)
    found = catalog().names(first.name)
    return [name for name in found if all(name in catalog().names(one.name) for one in others)]
