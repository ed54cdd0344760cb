"""Declares training runs. A run inherits from its shape and `model` what it does not set."""

from collections.abc import Iterator, Mapping
from typing import Annotated

from pydantic import Field

from tnp.gates import GATES, generic_gates
from tnp.model.variants import Variant, most_storage
from tnp.store.schemas import EMULATED
from tnp.tasks.sources import MAX_POINTS
from workflow import models, settings, shapes, sources
from workflow.faults import Fault, Place, unknown
from workflow.settings import ABSENT, MAX_COUNT, Section
from workflow.studies import Config, Here, Job, Study


class Settings(Section):
    devices: settings.Devices = ["cuda"]
    source: str
    shape: str
    batch: settings.Size = ABSENT
    n_context: settings.Size = ABSENT
    n_target: settings.Size = ABSENT
    model: settings.kept(settings.Model) = ABSENT
    variant: str
    products: settings.one_of(*EMULATED) = ABSENT  # of a control: the format that is emulated
    last_in_16_bits: settings.Size = ABSENT  # of a variant in 8 bits: these are in 16
    baseline: str = ABSENT  # variant of the run that this one is compared with
    steps: settings.Size
    learning_rate: settings.Share
    warmup_steps: settings.Count
    study: settings.Name = ABSENT
    max_grad_norm: Annotated[float, Field(gt=0, le=1_000_000, allow_inf_nan=False)] = ABSENT
    vary: settings.kept(settings.Vary) = ABSENT
    eval_every: settings.Size
    seed: settings.Count


class Training(Study):
    section = "training"
    holds = dict[settings.Name, Settings]
    default = {}
    kind = "train"
    tables = ("training", "environments")
    script = "train"

    def entries(self, config: Config) -> Mapping[str, Settings]:
        return self.spec(config)

    def jobs(self, here: Here) -> Iterator[Job]:
        for run, spec in self.here(here):
            shape = here.config.shapes[spec.shape]
            known = models.variants(here.config, spec.model)[spec.variant]
            job = {"config_id": run, "run": run, **shape, "model": here.config.model}
            own = {name: value for name, value in spec.given().items() if name != "devices"}
            job |= {"dtype": here.dtype} | own
            job |= {"variant_spec": known, "device": here.device, "device_slug": here.slug}
            if "vary" in shape:
                job["held_out_vary"] = shape["vary"]
            # A training run captures its steps on a GPU.
            of = spec.variant, known, job, job["model"], False, here.device == "cuda"
            yield job | models.of_variant(*of)

    def faults(self, config: Config) -> Iterator[Fault]:
        for name, spec in self.spec(config).items():
            yield from _faults((self.section, name), spec, config)
        yield from self._faults_of_pairs(config)

    def _faults_of_pairs(self, config: Config) -> Iterator[Fault]:
        """Yields runs without the run that they are compared with."""
        runs = self.spec(config)
        plain = [
            spec for spec in runs.values() if spec.products is None and spec.last_in_16_bits is None
        ]
        known = [(spec.variant, _recipe(spec)) for spec in plain]
        for name, spec in runs.items():
            if spec.baseline is not None and (spec.baseline, _recipe(spec)) not in known:
                what = (
                    f"no run of variant {spec.baseline!r} has the same seed and settings as "
                    f"{name!r}: add one, or leave baseline out"
                )
                yield Fault((self.section, name, "baseline"), what)

    def uses(self, config: Config) -> Iterator[models.Use]:
        for run, spec in self.spec(config).items():
            use = models.use_of(config, (self.section, run, "variant"), spec.variant)
            if spec.model:
                use = use._replace(model=spec.model, model_place=(self.section, run, "model"))
            yield use

    def code(self, job: Job) -> sources.Found:
        return sources.using(
            "tnp.train.recorded_runs:run", models.implementations(job), job["device_slug"]
        )


def _recipe(spec: Settings) -> str:
    """Returns all of a run's settings but those by which it may differ from its baseline."""
    own = ("variant", "products", "last_in_16_bits", "baseline", "study", "eval_every")
    return repr(sorted((name, value) for name, value in spec.given().items() if name not in own))


def _faults(place: Place, spec: Settings, config: Config) -> Iterator[Fault]:
    known = models.variants(config, spec.model)
    for key, names in (("shape", config.shapes), ("variant", known), ("source", MAX_POINTS)):
        if getattr(spec, key) not in names:
            yield Fault((*place, key), unknown(key, getattr(spec, key), names))
    if spec.baseline is not None and spec.baseline not in known:
        yield Fault((*place, "baseline"), unknown("variant", spec.baseline, known))
    if spec.last_in_16_bits is not None:
        last, at = spec.last_in_16_bits, (*place, "last_in_16_bits")
        if last >= spec.steps:
            yield Fault(at, f"{last} must be less than steps, {spec.steps}")
        if not Variant.from_spec(spec.variant, known[spec.variant]).in_8_bits:
            yield Fault(at, f"variant {spec.variant!r} has no products in 8 bits: leave it out")
    if spec.baseline == spec.variant and spec.products is None:
        what = f"{spec.variant!r} is the run's own variant: name the one to compare it with"
        yield Fault((*place, "baseline"), what)
    if place[-1] in (*GATES, *generic_gates()):
        yield Fault(place, "a gate has the same name: rename the run")
    model = spec.model or config.model
    yield from models.faults_of_model((*place, "model"), model)
    storage, at = known[spec.variant].get("d_ff_storage"), (*place, "variant")
    least, most = model["d_ff"], most_storage(model["d_ff"])
    if storage is not None and not least <= storage <= most:
        than = "less than the run's d_ff" if storage < least else "more than the run's d_ff needs"
        yield Fault(
            at,
            f"{spec.variant!r} has d_ff_storage {storage}, {than}: it must be at least {least} "
            f"and at most {most}",
        )
    if "buffer" in model:
        yield from models.faults_of_buffer(at, spec.variant, known)
    most = MAX_POINTS[spec.source] or MAX_COUNT
    sizes = config.shapes[spec.shape] | spec.given()
    yield from shapes.faults_of_points(place, sizes, most)
    if spec.vary:
        yield from shapes.faults_of_drawn((*place, "vary"), spec.vary, most)
    if spec.warmup_steps > spec.steps:
        what = f"{spec.warmup_steps} must be at most steps, {spec.steps}"
        yield Fault((*place, "warmup_steps"), what)
