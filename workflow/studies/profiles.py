"""Profiles one launch of each implementation with Nsight Compute."""

from collections.abc import Iterator
from itertools import product
from typing import Any

from tnp.experiment.code_hash import HOUSE
from tnp.experiment.fingerprints import BENCHMARK
from workflow import problems, settings, sources
from workflow.faults import Place
from workflow.studies import Config, Here, Job, Study
from workflow.studies.ops import Ops, Sizes, job


class Settings(settings.Study):
    devices: settings.unique(settings.one_of("cuda"), 1) = ["cuda"]
    sections: settings.one_of("quick", "full")
    ops: settings.some(Sizes)


class Profiles(Ops):
    section = "profiles"
    holds = Settings
    default = None
    kind = "profile"
    tables = ("profiles", "environments")
    gated = False  # it times nothing that is compared
    said = None
    entries, completed, names = Study.entries, Study.completed, Study.names

    def operators(self, config: Config) -> Iterator[tuple[Place, str, Any]]:
        spec = self.spec(config)
        for name, entry in spec.ops.items() if spec else ():
            yield (self.section, "ops", name), entry.op or name, entry

    def devices(self, config: Config, spec: Any) -> list[str]:
        return self.spec(config).devices

    def jobs(self, here: Here) -> Iterator[Job]:
        for study, spec in self.here(here):
            for entry, of in spec.ops.items():
                op = of.op or entry
                of_op = problems.of_operator(here.config, op, of, here.dtype)
                for named, name in product(of_op, problems.implementations(op, of.implementations)):
                    shape = named.shape.replace("/", "-")
                    config_id = f"{study}--{entry}--{shape}--{name}"
                    about = {"sections": spec.sections, "implementation": name}
                    yield job(here, study, spec, config_id, named, [name], **about)

    def gates(self, job: Job) -> list[str]:
        return []

    def code(self, job: Job) -> sources.Found:
        """Returns hashes of two modules: one starts the other by name, in another process."""
        op, name, slug = (job[key] for key in ("op", "implementation", "device_slug"))
        found = sources.reached("tnp.bench.profiles:measure_profiles", HOUSE)
        found |= sources.reached("tnp.bench.profile_launch:launch", HOUSE)
        return found | sources.of_operator(op, name, BENCHMARK, slug, HOUSE)

    def params(self, runs: str, stem: str) -> dict[str, str]:
        # Nsight Compute's own window opens the report. It is not an output of the rule: it exists
        # only where profiling worked.
        return {"reports": f"{runs}/ncu/{stem}"}
