"""Measures training steps: every combination of shape, variant, checkpoint and cuda_graph."""

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any

from workflow import models, settings, sources
from workflow.faults import Fault, not_among
from workflow.settings import ABSENT
from workflow.studies import Config, Here, Job, Study


class Settings(settings.Study):
    shapes: settings.Names
    variants: settings.Names
    checkpoint: settings.Switch = [False]
    cuda_graph: settings.Switch
    optimizer: bool = ABSENT


class Steps(Study):
    section = "steps"
    holds = dict[settings.Name, Settings]
    default = {}
    kind = "step"
    tables = ("steps", "samples", "stages", "code", "environments")
    said = ("step_ms_p50",)

    def entries(self, config: Config) -> Mapping[str, Settings]:
        return self.spec(config)

    def jobs(self, here: Here) -> Iterator[Job]:
        known = models.variants(here.config)
        for study, spec in self.here(here):
            for of in product(spec.shapes, spec.variants, spec.checkpoint, spec.cuda_graph):
                yield step(here, study, spec, known, *of, optimizer=spec.optimizer is not False)

    def faults(self, config: Config) -> Iterator[Fault]:
        for name, spec in self.spec(config).items():
            place = (self.section, name)
            yield from not_among((*place, "shapes"), "shape", spec.shapes, config.shapes)
            yield from models.faults_of_names(config, (*place, "variants"), spec.variants)
            if name in config.ops:
                yield Fault(place, f"a study under ops has the same name, {name!r}: rename one")

    def uses(self, config: Config) -> Iterator[models.Use]:
        for study, spec in self.spec(config).items():
            for index, name in enumerate(spec.variants):
                yield models.use_of(config, (self.section, study, "variants", index), name)

    def code(self, job: Job) -> sources.Found:
        used = models.implementations(job)
        return sources.using("tnp.bench.steps:measure_step", used, job["device_slug"])


def step(
    here: Here,
    study: str,
    spec: settings.Study,
    known: Mapping[str, dict],
    shape: str,
    variant: str,
    checkpoint: bool,
    cuda_graph: bool,
    optimizer: bool = True,
    **others: Any,
) -> Job:
    """Returns the job of one step; `known` are the variants by name."""
    marks = ["ckpt"] * checkpoint + ["graph"] * cuda_graph
    sizes, model = here.config.shapes[shape], here.config.model
    of = variant, known[variant], sizes, model, checkpoint, cuda_graph
    return here.job(
        "--".join([study, shape, variant, *marks]),
        study,
        spec,
        shape=shape,
        **sizes,
        variant=variant,
        variant_spec=known[variant],
        model=model,
        dtype=here.dtype,
        checkpoint=checkpoint,
        cuda_graph=cuda_graph,
        optimizer=optimizer,
        **models.of_variant(*of),
        **others,
    )
