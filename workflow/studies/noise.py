"""Measures noise: copies of one implementation are judged as if they were rivals."""

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

from pydantic import Field

from tnp.bench.outcome import twins
from workflow import problems, settings
from workflow.faults import Place
from workflow.settings import Section
from workflow.studies import Config, Here, Job, Study
from workflow.studies.ops import Ops, job


class Entry(Section):
    shapes: settings.SomeNames
    implementations: settings.SomeNames


class Settings(settings.Study):
    copies: Annotated[int, Field(ge=2)]
    ops: settings.some(Entry)


class Noise(Ops):
    section = "noise"
    holds = Settings
    default = None
    entries = Study.entries

    def operators(self, config: Config) -> Iterator[tuple[Place, str, Any]]:
        spec = self.spec(config)
        for op, entry in spec.ops.items() if spec else ():
            yield (self.section, "ops", op), op, entry

    def devices(self, config: Config, spec: Any) -> list[str]:
        return self.spec(config).devices

    def jobs(self, here: Here) -> Iterator[Job]:
        for study, spec in self.here(here):
            for op, entry in spec.ops.items():
                of_op = problems.of_operator(here.config, op, entry, here.dtype)
                for named, name in product(of_op, entry.implementations):
                    config_id = f"{study}--{op}--{named.shape}--{name}"
                    copies = [name, *twins(name, spec.copies - 1)]
                    yield job(here, study, spec, config_id, named, copies)
