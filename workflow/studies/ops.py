"""Benchmarks operators, with all implementations of a size in one job, and the ceilings."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tnp.bench.outcome import implementation_of, op_job, twins
from tnp.bench.policy import THROUGHPUT, question
from tnp.dispatch.registry import AUTO, catalog, is_automatic
from tnp.dispatch.spec import OWN, PASSES
from tnp.gates import gates_of
from tnp.store.schemas import CEILINGS, FORMATS
from workflow import models, problems, settings, sources
from workflow.faults import Fault, Place, listed, not_among, unknown
from workflow.settings import ABSENT, Section
from workflow.studies import Config, Here, Job, Study

CEILINGS_STUDY = "ceilings"


class Sizes(Section):
    """Holds the sizes and implementations of operator `op`, by default the entry's name."""

    op: str = ABSENT
    shapes: settings.Names = []
    at: settings.Names = []
    problems: settings.some(settings.Free) = ABSENT
    suite: bool = False
    implementations: settings.SomeNames


class Settings(Sizes, settings.Study):
    implementations: settings.SomeNames = ABSENT  # entry `ceilings` has none
    dtypes: settings.unique(settings.one_of(*problems.SHORT), 1) = ABSENT  # or compute_dtype
    passes: settings.unique(settings.one_of(*PASSES), 1) = ABSENT  # or all
    timing: settings.OwnTiming = ABSENT
    d_ff_storage: settings.Size = ABSENT


class Ops(Study):
    """Serves section `ops`, and is the base of all benchmarks of operators."""

    section = "ops"
    holds = dict[settings.Name, Settings]
    default = {}
    kind = "op"
    tables = ("ops", "samples", "code", "environments")
    said = ("time_ms_p50", "pass", "implementation")

    def entries(self, config: Config) -> Mapping[str, settings.Study]:
        return self.spec(config)

    def operators(self, config: Config) -> Iterator[tuple[Place, str, Any]]:
        """Yields (place, operator, entry) of every entry of the section."""
        for name, spec in self.spec(config).items():
            if name != CEILINGS_STUDY:
                yield (self.section, name), spec.op or name, spec

    def jobs(self, here: Here) -> Iterator[Job]:
        for study, spec in self.here(here):
            if study == CEILINGS_STUDY:
                yield from _ceilings(here, spec)
                continue
            op = spec.op or study
            names = problems.implementations(op, spec.implementations)
            contenders = [*names, *twins(_twice(op, names), 1)]
            others = {"passes": spec.passes} if spec.passes else {}
            others["timing"] = here.timing(spec.timing or {})
            for named in problems.of_operator(here.config, op, spec, here.dtype):
                config_id = f"{study}--{named.shape.replace('/', '-')}"
                yield job(here, study, spec, config_id, named, contenders, **others)

    def faults(self, config: Config) -> Iterator[Fault]:
        for place, op, spec in self.operators(config):
            yield from _faults(place, op, spec, config, self.devices(config, spec))
        for name, spec in self.spec(config).items() if type(self) is Ops else ():
            if name == CEILINGS_STUDY:
                known = settings.Study.model_fields
                for key in spec.model_fields_set - known.keys():
                    yield Fault((self.section, name), unknown("key", key, known), (key,))
            elif spec.implementations is None:
                yield Fault((self.section, name), "key 'implementations' is missing")

    def devices(self, config: Config, spec: Any) -> list[str]:
        """Returns the devices for which problems are made."""
        return spec.devices

    def uses(self, config: Config) -> Iterator[models.Use]:
        for place, op, spec in self.operators(config):
            for index, written in enumerate(spec.implementations):
                where = (*place, "implementations", index)
                for name in problems.implementations(op, [written]):
                    if is_automatic(name) or name in catalog().names(op):
                        yield models.Use(where, {op: name})

    def gates(self, job: Job) -> dict[str, list[str]]:
        op = job["op"]
        return {
            name: [] if op in CEILINGS else gates_of(op, implementation_of(name))
            for name in job["implementations"]
        }

    def code(self, job: Job) -> sources.Found:
        found: sources.Found = {}
        for name in dict.fromkeys(map(implementation_of, job["implementations"])):
            found |= sources.of_op(job | {"implementation": name})
        return found

    def completed(self, job: Job) -> Job:
        """Returns a job with the `definitions` of each implementation, dispatch included."""
        names = dict.fromkeys(map(implementation_of, job["implementations"]))
        found = {name: sources.of_op(job | {"implementation": name}, ()) for name in names}
        return job | {"definitions": {name: sources.code(of) for name, of in found.items()}}

    def names(self, job: Job) -> list[str]:
        return [job["config_id"], *job["implementations"].values()]


def job(
    here: Here,
    study: str,
    spec: settings.Study,
    config_id: str,
    named: problems.Named,
    contenders: Iterable[str],
    **others: Any,
) -> Job:
    """Returns the job of one problem, with contender → config_id of its rows."""
    of = op_job(named.problem, contenders, config_id, named.draw, shape=named.shape)
    return of | named.columns | here.job(config_id, study, spec, **others)


def deciding(config: Config, ops: Mapping[str, Job]) -> list[tuple[str, int]]:
    """Returns (id, replicate) of the benchmarks in `ops` by which implementations are chosen.

    These benchmarks time throughput, have "auto", and have a shape of section `tuning`. The other
    shapes tell how good the choice is where nothing was tuned.
    """
    shapes = config.tuning.shapes if config.tuning else ()
    return [
        (config_id, replicate)
        for config_id, of in ops.items()
        if of.get("shape") in shapes
        and of["study"] in config.ops
        and question(of["timing"]) == THROUGHPUT
        and AUTO in of["implementations"]
        for replicate in range(1, of["replicates"] + 1)
    ]


def _ceilings(here: Here, spec: settings.Study) -> Iterator[Job]:
    asked = [(ceiling, here.dtype) for ceiling in CEILINGS]
    formats = FORMATS if here.device == "cuda" else ()
    asked += [("ceiling_matmul", name) for name in formats if name != here.dtype]
    for ceiling, number in asked:
        mark = "" if number == here.dtype else f"_{number}"
        config_id = f"{CEILINGS_STUDY}--{ceiling.removeprefix('ceiling_')}{mark}"
        about = {"op": ceiling, "implementations": {"torch": config_id}, "dtype": number}
        yield here.job(config_id, CEILINGS_STUDY, spec, **about)


def _twice(op: str, implementations: list[str]) -> str:
    """Returns the implementation to time twice: the last of ours, or else the last of all."""
    named = [name for name in implementations if not is_automatic(name)]
    ours = [name for name in named if catalog().role(op, name) == OWN]
    return [*implementations, *ours][-1]


def _faults(
    place: Place, op: str, spec: Any, config: Config, devices: list[str]
) -> Iterator[Fault]:
    """Yields faults: names and problems that the operator or its gates do not know."""
    if op not in catalog().operators:
        of, key = (place, "op") if getattr(spec, "op", None) else (place[:-1], op)
        yield Fault(of, unknown("operator", op, catalog().operators), (key,))
        return
    names = spec.implementations or []
    known = [*catalog().names(op), AUTO, problems.INSTALLED, problems.OURS]
    yield from not_among((*place, "implementations"), "implementation", names, known)
    names = problems.implementations(op, names)
    yield from not_among((*place, "shapes"), "shape", spec.shapes, config.shapes)
    yield from models.faults_of_storage(
        place, {"d_ff_storage": getattr(spec, "d_ff_storage", None)}, config.model
    )
    if not spec.model_fields_set & set(problems.SECTIONS):
        yield Fault(place, f"one of the keys {listed(problems.SECTIONS)} is missing")
    for device in devices:
        try:
            of_op = list(problems.of_operator(config, op, spec, config.compute_dtype[device]))
        except ValueError as error:
            yield Fault(place, str(error))
            return
        called = [named.shape for named in of_op]
        for name in sorted({name for name in called if called.count(name) > 1}):
            yield Fault(place, f"two of its problems are called {name!r}: rename one")
        for named in of_op:
            for reason in refusals(op, names, named.problem, device):
                yield Fault(place, f"{named.shape}: {reason}")


def refusals(op: str, names: list[str], problem: Any, device: str) -> Iterator[str]:
    """Yields why a problem cannot be timed: no gate is like it, or one of `names` refuses it."""
    without = problems.without_case(problem, device)
    if without is not None:
        yield without
    for name in names if device == "cuda" else ():
        if name in catalog().names(op):
            reason = models.refusal(catalog().operator(op), name, problem, trains=False)
            if reason is not None:
                yield reason
