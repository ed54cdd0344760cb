"""Tunes our kernels, on demand: a job per operation and shape of the section."""

from collections.abc import Iterator, Mapping
from typing import Any

from tnp.dispatch.registry import catalog
from tnp.dispatch.tuned_tables import operations
from workflow import problems, settings
from workflow.faults import Fault, not_among
from workflow.settings import Section
from workflow.studies import Config, Here, Job
from workflow.studies.ops import Ops, job

ONCE = settings.Study(devices=["cuda"], priority=1)


class Settings(Section):
    shapes: settings.Names
    operators: settings.Names


class Tuning(Ops):
    """Plans the jobs. Only the process that runs a job lists its trials."""

    section = "tuning"
    holds = Settings
    default = None
    on_demand = True

    def entries(self, config: Config) -> Mapping[str, settings.Study]:
        return {self.section: ONCE} if self.spec(config) else {}

    def operators(self, config: Config) -> Iterator[Any]:
        return iter(())

    def jobs(self, here: Here) -> Iterator[Job]:
        for study, once in self.here(here):
            spec = self.spec(here.config)
            for op in spec.operators:
                for named in problems.of_operator(here.config, op, spec, here.dtype):
                    # An operation that several implementations share is tuned once.
                    for operation, (name, pass_) in operations(catalog().operator(op)).items():
                        part = operation.removeprefix(f"{op}.").replace(".", "-")
                        config_id = f"{study}--{op}--{named.shape}--{part}"
                        trials = {"forced": {name: {}}, "passes": [pass_]}
                        yield job(here, study, once, config_id, named, [name], **trials)

    def faults(self, config: Config) -> Iterator[Fault]:
        spec = self.spec(config)
        if spec is None:
            return
        yield from not_among((self.section, "shapes"), "shape", spec.shapes, config.shapes)
        where = (self.section, "operators")
        yield from not_among(where, "operator", spec.operators, catalog().operators)
        for index, op in enumerate(spec.operators):
            try:
                list(problems.of_operator(config, op, spec, config.compute_dtype["cuda"]))
            except ValueError as error:
                yield Fault((*where, index), str(error))
