"""Says which files the jobs of a plan write, which gates' files they wait for, and what voids them.

A job's files are `<runs>/<table>/<stem><attempt>.parquet`. A benchmark's stem is
`<config_id>--r<replicate>`, a training run's and a gate's is its name.
"""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tnp.experiment.code_hash import digest
from workflow import sources
from workflow.attempts import Attempts, is_of
from workflow.plan import GATE, TABLES, Plan
from workflow.studies import kinds

Gates = list[str] | dict[str, list[str]]  # of a job; of an operator's benchmark by contender


class Files:
    """The files of a plan's jobs.

    Args:
        plan: the jobs.
        runs: folder of the device.
        attempts: the files that are there.
        again: (kind, name) of the jobs that are to be measured once more.
    """

    def __init__(
        self,
        plan: Plan,
        runs: str,
        attempts: Attempts,
        again: Iterable[tuple[str, str]] = (),
    ) -> None:
        self._plan, self._runs, self._attempts, self._again = plan, runs, attempts, set(again)
        self.code = cache(self._code)

    def outputs(self, kind: str, stem: str) -> dict[str, str]:
        """Returns table → file of everything that a job writes."""
        return {table: f"{self._runs}/{table}/{stem}.parquet" for table in TABLES[kind]}

    def planned(self, kind: str, stem: str) -> dict[str, str]:
        """Returns the files of the attempt that counts: the last, or the next if that failed."""
        again = (kind, stem) in self._again
        return self.outputs(kind, stem + self._attempts.planned(TABLES[kind][0], stem, again))

    def of_replicates(self, jobs: Iterable[tuple[str, int]]) -> list[dict[str, str]]:
        """Returns table → file of each benchmark's job, (id, replicate)."""
        return [self.planned(self._plan.kind(name), f"{name}--r{r}") for name, r in jobs]

    def of_gates(self, gates: Iterable[str]) -> list[str]:
        """Returns the results of those of `gates` that config.yaml names."""
        return [self.planned(GATE, gate)["gates"] for gate in gates if gate in self._plan.gates]

    def gates(self, kind: str, config_id: str) -> Gates:
        """Returns the gates that a job waits for, of those that config.yaml names."""
        gates = kinds()[kind].gates(self._plan.jobs[kind][config_id])
        if isinstance(gates, list):
            return self._named(gates)
        return {name: self._named(of) for name, of in gates.items()}

    def awaited(self, kind: str, config_id: str, replicate: str | None, attempt: str) -> list[str]:
        """Returns the gates' files that a job waits for: none if its own is there, and of now.

        As plain inputs, gates that run again would take all that waits for them with them.
        """
        stem = config_id if replicate is None else f"{config_id}--r{replicate}"
        own = Path(self.outputs(kind, stem + attempt)[TABLES[kind][0]])
        if not kinds()[kind].gated or is_of(own, self.state(kind, config_id, replicate)):
            return []
        return self.of_gates(_all(self.gates(kind, config_id)))

    def state(self, kind: str, config_id: str, replicate: str | None) -> str:
        """Returns a digest of all that a result depends on."""
        parameters = self._plan.job(kind, config_id, replicate)
        depends_on = [self.code(kind, config_id), parameters, self.gates(kind, config_id)]
        return digest(json.dumps(depends_on, sort_keys=True))

    def params(self, kind: str, config_id: str, replicate: str | None) -> dict[str, Any]:
        """Returns the parameters of a job's rule. The job runs again where one changes."""
        found = {
            "code": self.code(kind, config_id),
            "parameters": self._plan.job(kind, config_id, replicate),
        }
        if kinds()[kind].gated:
            found["gates"] = self.gates(kind, config_id)
            found["state"] = self.state(kind, config_id, replicate)
        return found

    def gates_waited_for(self) -> list[str]:
        """Returns the gates that jobs of this device wait for, in the order of config.yaml."""
        found: set[str] = set()
        for kind, jobs in self._plan.jobs.items():
            for config_id in jobs.keys() - self._plan.on_demand.keys():
                found.update(_all(self.gates(kind, config_id)))
        return [gate for gate in self._plan.gates if gate in found]

    def of_plan(self) -> list[str]:
        """Returns the files of all jobs that are run unasked, and of the gates they wait for."""
        jobs = [(GATE, gate) for gate in self.gates_waited_for()]
        jobs += [("train", run) for run in self._plan.jobs["train"]]
        jobs += [(self._plan.kind(name), f"{name}--r{r}") for name, r in self._plan.order]
        jobs += self._further_replicates()
        return [file for job in jobs for file in self.planned(*job).values()]

    def of_again(self) -> list[str]:
        """Returns the files that `again` adds: a further replicate of a benchmark."""
        files: list[str] = []
        for kind, name in sorted(self._again):
            stem = name
            if name in self._plan.benchmarks:
                made = self._attempts.replicates(TABLES[kind][0], name)
                stem += f"--r{max(made, default=0) + 1}"
            files += self.planned(kind, stem).values()
        return files

    def _further_replicates(self) -> list[tuple[str, str]]:
        """Returns (kind, stem) of replicates past the planned ones that did not come about."""
        jobs = []
        for config_id, parameters in self._plan.benchmarks.items():
            kind = self._plan.kind(config_id)
            table = TABLES[kind][0]
            for r in self._attempts.replicates(table, config_id):
                stem = f"{config_id}--r{r}"
                if r > parameters["replicates"] and self._attempts.to_be_tried_again(table, stem):
                    jobs.append((kind, stem))
        return jobs

    def _named(self, gates: Iterable[str]) -> list[str]:
        return [gate for gate in gates if gate in self._plan.gates]

    def _code(self, kind: str, config_id: str) -> str:
        study = kinds()[kind]
        found = study.code(self._plan.jobs[kind][config_id])
        if config_id in self._plan.on_demand:  # the table that it is for voids no trial
            found = sources.code(found)
        return sources.fingerprint(study.script, found)


def _all(gates: Gates) -> list[str]:
    return gates if isinstance(gates, list) else sorted(set().union(*gates.values()))
