"""Declares two studies: predictions over one context, and joint samples with a causal buffer.

Each pair of shape and variant is one job, which times all forms in turn.
"""

from collections.abc import Iterator
from itertools import product

from workflow import models, settings, sources
from workflow.faults import Fault
from workflow.studies import Config, Here, Job, Study


class Settings(settings.Study):
    shapes: settings.SomeNames
    variants: settings.SomeNames


class OfBuffer(Settings):
    buffer: settings.Size


class Predictions(Study):
    section = "predictions"
    holds = Settings
    kind = "prediction"
    tables = ("predictions", "samples", "code", "environments")
    said = ("time_ms_p50", "form")

    def jobs(self, here: Here) -> Iterator[Job]:
        for study, spec in self.here(here):
            buffer = getattr(spec, "buffer", None)
            model = here.config.model | ({"buffer": buffer} if buffer else {})
            known = models.variants(here.config)
            for shape, variant in product(spec.shapes, spec.variants):
                sizes = here.config.shapes[shape]
                # The last argument adds the gates of CUDA graphs: a GPU captures some forms.
                of = variant, known[variant], sizes, model, False, here.device == "cuda"
                yield here.job(
                    f"{study}--{shape}--{variant}",
                    study,
                    spec,
                    shape=shape,
                    **sizes,
                    variant=variant,
                    variant_spec=known[variant],
                    model=model,
                    dtype=here.dtype,
                    **models.of_variant(*of),
                )

    def faults(self, config: Config) -> Iterator[Fault]:
        spec, known = self.spec(config), models.variants(config)
        if spec is None:
            return
        yield from models.faults_of_shapes(config, (self.section, "shapes"), spec.shapes)
        place, buffer = (self.section, "variants"), hasattr(spec, "buffer")
        yield from models.faults_of_names(config, place, spec.variants, buffer)
        for index, name in enumerate(spec.variants):
            if known[name].get("compile"):
                what = f"predictions cannot use the compiled variant {name!r}: name another"
                yield Fault((*place, index), what)

    def uses(self, config: Config) -> Iterator[models.Use]:
        spec = self.spec(config)
        for index, name in enumerate(spec.variants if spec else ()):
            yield models.use_of(config, (self.section, "variants", index), name)

    def code(self, job: Job) -> sources.Found:
        """Returns the code of a job; all forms run the same code."""
        used = models.implementations(job)
        return sources.using(STARTS[job["study"]], used, job["device_slug"])


class Joint(Predictions):
    section = "joint"
    holds = OfBuffer


STARTS = {
    Predictions.section: "tnp.bench.predictions:measure_predictions",
    Joint.section: "tnp.bench.joint:measure_joint",
}
