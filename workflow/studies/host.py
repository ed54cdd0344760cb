"""Measures the host's time for eager calls and for whole training steps."""

from collections.abc import Iterator

from tnp.dispatch.registry import catalog
from tnp.experiment.fingerprints import STEP
from workflow import models, settings, sources
from workflow.faults import Fault, not_among, unknown
from workflow.settings import Section
from workflow.studies import Config, Here, Job, Study
from workflow.studies.ops import refusals

# Keys that name variants of steps, and whether their steps are captured as a CUDA graph.
FORMS = {"launched": False, "captured": True}


class Problem(Section):
    op: str
    sizes: dict[str, settings.Size]
    implementations: settings.SomeNames


class OfSteps(Section):
    priority: settings.Size
    shapes: settings.SomeNames
    launched: settings.SomeNames  # Python launches their kernels
    captured: settings.Names


class Settings(settings.Study):
    steps: OfSteps = settings.ABSENT
    problems: dict[settings.Name, Problem]


class HostCalls(Study):
    """Measures eager calls, a problem per job."""

    section = "host"
    holds = Settings
    kind = "host"
    rule = "host_calls"
    tables = ("host_calls", "environments")
    gated = False

    def jobs(self, here: Here) -> Iterator[Job]:
        for study, spec in self.here(here):
            for name, asked in spec.problems.items():
                problem = catalog().operator(asked.op).problem(here.dtype, **asked.sizes)
                of = {"op": asked.op, "problem": problem.json}
                of["implementations"] = asked.implementations
                yield here.job(f"{study}--{name}", study, spec, problems=[of])

    def faults(self, config: Config) -> Iterator[Fault]:
        spec = self.spec(config)
        for name, asked in spec.problems.items() if spec else ():
            place = (self.section, "problems", name)
            if asked.op not in catalog().operators:
                yield Fault(place, unknown("operator", asked.op, catalog().operators), ("op",))
                return
            known, names = catalog().names(asked.op), asked.implementations
            yield from not_among((*place, "implementations"), "implementation", names, known)
            try:
                dtype = config.compute_dtype["cuda"]
                problem = catalog().operator(asked.op).problem(dtype, **asked.sizes)
            except ValueError as error:
                yield Fault(place, str(error), ("sizes",))
                return
            for reason in refusals(asked.op, names, problem, "cuda"):
                yield Fault(place, reason)

    def code(self, job: Job) -> sources.Found:
        """Returns hashes, with dispatch: its code takes part in the time of eager calls."""
        found = sources.reached("tnp.bench.host:measure_host")
        for asked in job["problems"]:
            for name in asked["implementations"]:
                found |= sources.of_operator(asked["op"], name, STEP, job["device_slug"])
        return found


class HostSteps(Study):
    """Measures whole training steps, a shape per job. Forms take turns in a job."""

    section = "host"
    holds = Settings
    kind = "host_step"
    rule = "host_steps"
    tables = ("host_steps", "environments")
    gated = False

    def jobs(self, here: Here) -> Iterator[Job]:
        for study, spec in self.here(here):
            steps, known = spec.steps, models.variants(here.config)
            for shape in steps.shapes if steps else ():
                forms = [
                    {"variant": name, "variant_spec": known[name], "cuda_graph": cuda_graph}
                    for key, cuda_graph in FORMS.items()
                    for name in getattr(steps, key)
                ]
                yield here.job(
                    f"{study}--steps--{shape}",
                    study,
                    spec,
                    priority=steps.priority,
                    shape=shape,
                    **here.config.shapes[shape],
                    forms=forms,
                    model=here.config.model,
                    dtype=here.dtype,
                )

    def faults(self, config: Config) -> Iterator[Fault]:
        spec, place = self.spec(config), (self.section, "steps")
        if spec and spec.steps:
            yield from models.faults_of_shapes(config, (*place, "shapes"), spec.steps.shapes)
            for key in FORMS:
                names = getattr(spec.steps, key)
                yield from models.faults_of_names(config, (*place, key), names)

    def uses(self, config: Config) -> Iterator[models.Use]:
        spec = self.spec(config)
        for key in FORMS if spec and spec.steps else ():
            for index, name in enumerate(getattr(spec.steps, key)):
                yield models.use_of(config, (self.section, "steps", key, index), name)

    def code(self, job: Job) -> sources.Found:
        used = set().union(*map(models.implementations, job["forms"]))
        return sources.using("tnp.bench.host_steps:measure_host_steps", used, job["device_slug"])
