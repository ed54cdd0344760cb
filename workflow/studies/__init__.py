"""Declares the kinds of study, a class each, and finds them.

A kind is a module here with a class derived from `Study`. Its section of config.yaml, its jobs,
their gates and their code are read from that class, and its rule is made from it.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple

from pydantic import create_model

from tnp.bench.policy import LATENCY
from workflow import settings, sources
from workflow.faults import Fault
from workflow.models import Use

Config = Any  # `settings.Shared` with the section of each kind
Job = dict[str, Any]  # the parameters of a job, as JSON can hold them
NO_STUDY: Mapping = {}


class Here(NamedTuple):
    """Holds a configuration and the device that it is planned for."""

    config: Config
    device: str  # "cuda" or "cpu"
    slug: str  # name of the device

    @property
    def dtype(self) -> str:
        return self.config.compute_dtype[self.device]

    def job(self, config_id: str, study: str, spec: settings.Study, **others: Any) -> Job:
        """Returns a job of `study`: the parameters that every kind of job has, and `others`."""
        return {
            "config_id": config_id,
            "study": study,
            "replicates": spec.replicates,
            "priority": spec.priority,
            "timing": self.timing(),
            "device": self.device,
            "device_slug": self.slug,
        } | others

    def timing(self, own: Any = NO_STUDY) -> dict[str, Any]:
        """Returns section `timing`, with the values of `own` in place of the section's.

        Key "latency" is left out, unless `own` is "latency".
        """
        known = self.config.timing
        if own == LATENCY:
            return known
        return {name: value for name, value in known.items() if name != LATENCY} | own


class Study:
    """Declares a kind of study: a section of config.yaml, and the jobs that it stands for."""

    section: ClassVar[str]  # its key in config.yaml
    holds: ClassVar[Any]  # what the section may contain
    default: ClassVar[Any] = None  # the value of an absent section
    kind: ClassVar[str]  # its jobs' kind, as `tnp.bench.isolate.run_isolated` takes it
    rule: ClassVar[str]  # the name of their rule, if that is not the kind
    tables: ClassVar[tuple[str, ...]]  # tables that a job writes, its own first
    script: ClassVar[str] = "benchmark"  # its script in workflow/scripts
    # The log of a job prints this column of milliseconds of each row, and the columns after it to
    # tell the row from the job's other rows. If None, the log prints the number of rows.
    said: ClassVar[tuple[str, ...] | None] = None
    gated: ClassVar[bool] = True  # whether its jobs wait for gates
    on_demand: ClassVar[bool] = False  # whether its jobs are no part of target `all`

    def __init_subclass__(cls) -> None:
        cls.rule = cls.__dict__.get("rule", cls.__dict__.get("kind", cls.kind))

    def spec(self, config: Config) -> Any:
        return getattr(config, self.section)

    def entries(self, config: Config) -> Mapping[str, settings.Study]:
        """Returns name → settings of the studies that the section holds; by default it is one."""
        spec = self.spec(config)
        return {} if spec is None else {self.section: spec}

    def here(self, here: Here) -> Iterator[tuple[str, Any]]:
        """Yields (name, settings) of the studies that the device takes part in."""
        for name, spec in self.entries(here.config).items():
            if here.device in spec.devices:
                yield name, spec

    def jobs(self, here: Here) -> Iterator[Job]:
        """Yields the jobs on a device, one for all its replicates.

        Each plan must give the same parameters: a job whose parameters changed is measured again.
        """
        raise NotImplementedError

    def faults(self, config: Config) -> Iterator[Fault]:
        """Yields the faults of its section."""
        return iter(())

    def uses(self, config: Config) -> Iterator[Use]:
        """Yields the implementations that its section names."""
        return iter(())

    def gates(self, job: Job) -> list[str] | dict[str, list[str]]:
        """Returns the gates that a job waits for, by contender for a benchmark of an operator."""
        return job["gates"].split("|") if self.gated else []

    def code(self, job: Job) -> sources.Found:
        """Returns the hashes of all definitions that a job runs, by name."""
        raise NotImplementedError

    def completed(self, job: Job) -> Job:
        """Returns a job for its process: with `definitions`, its code's hashes, if it is gated."""
        return job | {"definitions": sources.code(self.code(job))} if self.gated else job

    def names(self, job: Job) -> list[str]:
        """Returns the ids by which `again` may name a job."""
        return [job["config_id"]]

    def params(self, runs: str, stem: str) -> dict[str, str]:
        """Returns further parameters of its rule, as patterns; a job has them beside its own."""
        return {}


@cache
def studies() -> tuple[Study, ...]:
    """Returns one instance of each class of studies that a module of this folder declares."""
    found = []
    for module in pkgutil.iter_modules(__path__, f"{__name__}."):
        members = vars(importlib.import_module(module.name)).values()
        for one in members:
            if inspect.isclass(one) and issubclass(one, Study) and one.__module__ == module.name:
                found.append(one())
    return tuple(found)


@cache
def kinds() -> dict[str, Study]:
    """Returns kind of job → the first study of that kind, which describes how its jobs run."""
    return {study.kind: study for study in reversed(studies())}


@cache
def configuration() -> type[settings.Shared]:
    """Returns the model of config.yaml: the shared sections, and a section per kind of study."""
    sections = {study.section: (study.holds, study.default) for study in studies()}
    return create_model("Config", __base__=settings.Shared, **sections)
