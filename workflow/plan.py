"""Plans what to run on a device: the jobs of all studies, their order, and what else has a name.

A plan depends on the configuration and the device alone. The rules turn each job into files.
"""

import hashlib
from collections.abc import Mapping
from functools import cached_property
from itertools import chain

from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import OWN
from tnp.gates import generic_gate
from workflow.studies import Config, Here, Job, kinds, studies

EVERY_OPERATOR = "operators"  # section `gates` may name all our operators' gates so
GATE = "gate"  # a kind of job that belongs to no study
# Tables that a job of each kind writes, one file of the same stem in each.
TABLES = {GATE: ("gates", "kernels", "code", "environments")} | {
    kind: study.tables for kind, study in kinds().items()
}


def device(wanted: str, found: str) -> str:
    """Returns the slug of the device to measure.

    Args:
        wanted: config.yaml's `device`. A slug is taken as it is: on a cluster, the jobs find the
            GPU, not the machine that plans.
        found: the slug of what is here.

    Raises:
        ValueError: a GPU is wanted and there is none.
    """
    if wanted == "cuda" and found == "cpu":
        raise ValueError("config.yaml: device: 'cuda', but no NVIDIA GPU is visible: use 'auto'")
    return found if wanted in ("auto", "cuda") else wanted


def gates(config: Config) -> list[str]:
    """Returns the gates that section `gates` names; "operators" names one of each of ours."""
    found = []
    for name in config.gates:
        found += own_gates() if name == EVERY_OPERATOR else [name]
    return list(dict.fromkeys(found))


def own_gates() -> list[str]:
    known = catalog()
    return [
        generic_gate(op, name)
        for op in known.operators
        for name in known.names(op)
        if known.role(op, name) == OWN
    ]


class Plan:
    """Holds the jobs of a configuration on one device.

    Args:
        config: what `validation.validate` returns.
        device: "cuda" or "cpu".
        slug: name of the device.
    """

    def __init__(self, config: Config, device: str, slug: str) -> None:
        self.config, self.device, self.slug = config, device, slug
        self.gates = gates(config)
        here = Here(config, device, slug)
        # Kind of job → id → parameters: of all jobs, and of benchmarks that are run unasked.
        self.jobs: dict[str, dict[str, Job]] = {kind: {} for kind in kinds()}
        self.benchmarks: dict[str, Job] = {}
        self.on_demand: dict[str, Job] = {}
        self._kinds: dict[str, str] = {}
        for study in studies():
            made = {job["config_id"]: job for job in study.jobs(here)}
            self.jobs[study.kind] |= made
            self._kinds |= dict.fromkeys(made, study.kind)
            if study.script == "benchmark":
                kept = self.on_demand if study.on_demand else self.benchmarks
                kept |= made

    def kind(self, config_id: str) -> str:
        """Returns the kind of a benchmark's job."""
        return self._kinds[config_id]

    def found(self, name: str) -> tuple[str, Job]:
        """Returns the kind and the parameters of a job, or (GATE, {}) for a gate."""
        every = ((kind, jobs[name]) for kind, jobs in self.jobs.items() if name in jobs)
        return next(every, (GATE, {}))

    @cached_property
    def order(self) -> list[tuple[str, int]]:
        return running_order(self.benchmarks)

    def studies(self) -> dict[str, list[tuple[str, int]]]:
        """Returns study → (id, replicate) of its jobs, in their order."""
        found: dict[str, list[tuple[str, int]]] = {}
        for config_id, replicate in self.order:
            found.setdefault(self.benchmarks[config_id]["study"], []).append((config_id, replicate))
        return found

    def elsewhere(self) -> dict[str, str]:
        """Returns study or training run → a sentence, for each that only other devices run."""
        entries = [study.entries(self.config) for study in studies() if not study.on_demand]
        every = {name: spec for found in entries for name, spec in found.items()}
        targets = [name for name in every if name not in self.config.training]
        here = [name for name in targets if self.device in every[name].devices]
        found = f"the device is {self.slug!r}"
        if self.device == "cpu" and self.config.device == "auto":
            found = "no NVIDIA GPU is visible"
        return {
            name: f"{name!r} is for {' and '.join(spec.devices)} alone, and {found}: what can be "
            f"run here is {', '.join([*here, 'figures', 'gates'])} and all"
            for name, spec in every.items()
            if self.device not in spec.devices
        }

    def names(self) -> dict[str, tuple[str, str]]:
        """Returns id → (kind, name) of every job that can be measured again on this device."""
        found = {f"gates--{name}": (GATE, name) for name in self.gates}
        for kind, jobs in self.jobs.items():
            for name, job in jobs.items():
                if name not in self.on_demand:
                    found |= dict.fromkeys(kinds()[kind].names(job), (kind, name))
        return found

    def names_elsewhere(self) -> dict[str, str]:
        """Returns id → a sentence that names its device, for each job that only others measure."""
        sentences = self.elsewhere()
        others = (Plan(self.config, other, other).names()
                  for other in self.config.compute_dtype if other != self.device)  # fmt: skip
        return {
            name: sentences[study]
            for name in chain.from_iterable(others)
            if (study := name.split("--")[0]) in sentences
        }

    def job(self, kind: str, config_id: str, replicate: str | None) -> Job:
        """Returns the parameters of one job; a training run has no replicates."""
        parameters = self.jobs[kind][config_id]
        if replicate is None:
            return parameters
        # A key that only orders the jobs does not change a job.
        ordering = ("replicates", "priority")
        of = {name: value for name, value in parameters.items() if name not in ordering}
        return of | {"replicate": int(replicate)}


def running_order(jobs: Mapping[str, Job]) -> list[tuple[str, int]]:
    """Returns (id, replicate) of every job, by priority of its study: a run that is cut off has the
    most valuable rows.

    Of equal priority replicate 1 of all comes first, then 2. Each round has an order of its own,
    drawn by hash: it is the same when a killed run continues.
    """
    every = [
        (config_id, replicate)
        for config_id, parameters in jobs.items()
        for replicate in range(1, parameters["replicates"] + 1)
    ]
    drawn = {job: hashlib.sha256(f"{job[1]} {job[0]}".encode()).hexdigest() for job in every}
    return sorted(every, key=lambda job: (jobs[job[0]]["priority"], job[1], drawn[job]))
