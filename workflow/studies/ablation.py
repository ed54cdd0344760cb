"""Plans the ablation: for each component, `base` with it alone, and `full` without it."""

from collections.abc import Iterator, Mapping

from tnp.model.variants import Variant
from workflow import models, settings
from workflow.faults import Fault, not_among, unknown
from workflow.settings import ABSENT, Section
from workflow.studies import Config, Here, Job
from workflow.studies.steps import Steps, step

ENDS = ("base", "full")
ONLY, WITHOUT = "only_", "without_"  # how the names of its variants begin


class AtShape(Section):
    components: settings.SomeNames = ABSENT
    cuda_graph: bool
    replicates: settings.Replicates = ABSENT


class Settings(settings.Study):
    base: str
    full: str
    components: settings.SomeNames
    shapes: settings.some(AtShape)


class Ablation(Steps):
    section = "ablation"
    holds = Settings
    default = None

    def entries(self, config: Config) -> Mapping[str, Settings]:
        return super(Steps, self).entries(config)

    def jobs(self, here: Here) -> Iterator[Job]:
        for study, spec in self.here(here):
            known = models.variants(here.config)
            known |= self.variants(here.config)
            for shape, run in spec.shapes.items():
                parts = [f"{end}{name}" for name in run.components or spec.components
                         for end in (ONLY, WITHOUT)]  # fmt: skip
                for variant in (spec.base, spec.full, *parts):
                    of = known, shape, variant, False, run.cuda_graph
                    replicates = run.replicates or spec.replicates
                    yield step(here, study, spec, *of, replicates=replicates)

    def variants(self, config: Config) -> dict[str, dict]:
        """Returns base with each component alone, `only_…`, and full without it, `without_…`."""
        spec, found = self.spec(config), {}
        base, full = (models.variants(config)[getattr(spec, end)] for end in ENDS)
        for component in spec.components:
            found[f"{ONLY}{component}"] = _with(base, component, full)
            found[f"{WITHOUT}{component}"] = _with(full, component, base)
        return found

    def faults(self, config: Config) -> Iterator[Fault]:
        spec, known = self.spec(config), models.variants(config)
        for name in config.variants:
            if name.startswith((ONLY, WITHOUT)):
                what = f"names that start with {ONLY} or {WITHOUT} are the ablation's: rename the"
                yield Fault(("variants", name), f"{what} variant")
        if spec is None:
            return
        place = (self.section,)
        yield from not_among((*place, "shapes"), "shape", spec.shapes, config.shapes)
        for end in ENDS:
            if (name := getattr(spec, end)) not in known:
                yield Fault((*place, end), unknown("variant", name, known))
        for shape, run in spec.shapes.items():
            at = (*place, "shapes", shape, "components")
            yield from not_among(at, "component", run.components or [], spec.components)
        base, full = known[spec.base], known[spec.full]
        differing = [key for key in base | full if base.get(key) != full.get(key)]
        of = (*place, "components"), "difference of base and full", spec.components
        yield from not_among(*of, differing)
        ends = [Variant.from_spec(name, known[name]).role() for name in (spec.base, spec.full)]
        if [role == "own" for role in ends] != [False, True]:
            yield Fault(
                place,
                f"base {spec.base!r} and full {spec.full!r} must be a variant of PyTorch's "
                "operators alone and one with operators of ours",
            )

    def uses(self, config: Config) -> Iterator[models.Use]:
        spec = self.spec(config)
        for end in ENDS if spec else ():
            yield models.use_of(config, (self.section, end), getattr(spec, end))


def _with(variant: dict, key: str, other: dict) -> dict:
    """Returns `variant` with `key` as in `other`, or without `key` if `other` lacks it."""
    rest = {name: value for name, value in variant.items() if name != key}
    return rest | ({key: other[key]} if key in other else {})
