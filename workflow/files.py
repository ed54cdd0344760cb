"""Says which files the jobs of a plan write, and which gates' files they wait for.

A job's files are `<runs>/<table>/<stem>--<state>-<number>.parquet`: see `workflow/attempts.py`. A
benchmark's stem is `<config_id>--r<replicate>`, a training run's and a gate's is its name.
"""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from tnp.experiment.code_hash import digest
from workflow import sources
from workflow.attempts import Attempt, Attempts
from workflow.plan import GATE, TABLES, Plan
from workflow.studies import kinds

Gates = list[str] | dict[str, list[str]]  # by contender for a benchmark of an operator
Replicate = int | str | None  # None for gates and training runs


class Files:
    """Names the files of a plan's jobs.

    Args:
        plan: the jobs.
        runs: folder of the device.
        again: (kind, name) of the jobs that are to be measured once more.
        planning: whether jobs may get new files. A process that the workflow started for one of its
            jobs must find the files that were planned before.
    """

    def __init__(
        self, plan: Plan, runs: str, again: Iterable[tuple[str, str]] = (), planning: bool = True
    ) -> None:
        self._plan, self._runs, self._again, self._planning = plan, runs, set(again), planning
        self._attempts = Attempts(runs)
        self.planned = cache(self._planned)
        self._code = cache(self._code_of)

    def outputs(self, kind: str, stem: str) -> dict[str, str]:
        """Returns table → file of everything that a job writes."""
        return {table: f"{self._runs}/{table}/{stem}.parquet" for table in TABLES[kind]}

    def _planned(self, kind: str, name: str, replicate: Replicate = None) -> dict[str, str]:
        """Returns the files of a job's last result if that counts, else of its next."""
        stem = name if replicate is None else f"{name}--r{replicate}"
        made = self._attempts.of(TABLES[kind][0], stem)
        if made and not self._planning:
            return self.outputs(kind, made[-1].file.stem)
        state = self.state(kind, name, replicate)
        if made and made[-1].state == state and self._counts(kind, name, made[-1]):
            return self.outputs(kind, made[-1].file.stem)
        number = made[-1].number + 1 if made else 1
        return self.outputs(kind, f"{stem}--{state}-{number}")

    def _counts(self, kind: str, name: str, last: Attempt) -> bool:
        """Returns whether a result is whole, and is neither killed nor to be measured again.

        A result that gates refused counts until one of them has a newer result.
        """
        files = map(Path, self.outputs(kind, last.file.stem).values())
        if (kind, last.stem) in self._again or not all(map(Path.exists, files)):
            return False
        if self._attempts.to_be_tried_again(TABLES[kind][0], last.stem):
            return False
        if kind == GATE or not self._attempts.refused(TABLES[kind][0], last.stem):
            return True
        gates = map(Path, self.of_gates(_all(self.gates(kind, name))))
        written = last.file.stat().st_mtime_ns
        return all(gate.exists() and gate.stat().st_mtime_ns <= written for gate in gates)

    def state(self, kind: str, name: str, replicate: Replicate = None) -> str:
        """Returns a digest of all that decides a result: its code, its job, its gates' names."""
        if kind == GATE:
            return sources.fingerprint(GATE, sources.of_gate(name))
        of = [self._code(kind, name), self._plan.job(kind, name, replicate), self.gates(kind, name)]
        return digest(json.dumps(of, sort_keys=True))

    def gates(self, kind: str, name: str) -> Gates:
        """Returns the gates that a job waits for, of those that config.yaml names."""
        gates = kinds()[kind].gates(self._plan.jobs[kind][name])
        if isinstance(gates, list):
            return self._named(gates)
        return {contender: self._named(of) for contender, of in gates.items()}

    def awaited(self, kind: str, name: str, stem: str) -> list[str]:
        """Returns the gates' files that a job waits for: none if its result is there.

        As plain inputs, gates that run again would take all that waits for them with them.
        """
        own = Path(self.outputs(kind, stem)[TABLES[kind][0]])
        return [] if own.exists() else self.of_gates(_all(self.gates(kind, name)))

    def of_replicates(self, jobs: Iterable[tuple[str, int]]) -> list[dict[str, str]]:
        """Returns table → file of each benchmark's job, (id, replicate)."""
        return [self.planned(self._plan.kind(name), name, r) for name, r in jobs]

    def of_gates(self, gates: Iterable[str]) -> list[str]:
        """Returns the files of `gates`, which config.yaml names."""
        return [self.planned(GATE, gate)["gates"] for gate in gates]

    def gates_waited_for(self) -> list[str]:
        """Returns the gates that jobs of this device wait for, in the order of config.yaml."""
        found: set[str] = set()
        for kind, jobs in self._plan.jobs.items():
            for name in jobs.keys() - self._plan.on_demand.keys():
                found.update(_all(self.gates(kind, name)))
        return [gate for gate in self._plan.gates if gate in found]

    def of_plan(self) -> list[str]:
        """Returns the files of all jobs that are run unasked, and of the gates they wait for."""
        jobs = [(GATE, gate) for gate in self.gates_waited_for()]
        jobs += [("train", run) for run in self._plan.jobs["train"]]
        jobs += [(self._plan.kind(name), name, r) for name, r in self._plan.order]
        jobs += self._further_replicates()
        return [file for job in jobs for file in self.planned(*job).values()]

    def of_again(self) -> list[str]:
        """Returns the files that `again` adds: a further replicate of a benchmark."""
        files: list[str] = []
        for kind, name in sorted(self._again):
            replicate = None
            if name in self._plan.benchmarks:
                made = self._attempts.replicates(TABLES[kind][0], name)
                replicate = max(made, default=0) + 1
            files += self.planned(kind, name, replicate).values()
        return files

    def _further_replicates(self) -> list[tuple[str, str, int]]:
        """Returns replicates past the planned ones that did not come about."""
        jobs = []
        for name, parameters in self._plan.benchmarks.items():
            kind = self._plan.kind(name)
            table = TABLES[kind][0]
            for r in self._attempts.replicates(table, name):
                ended = self._attempts.to_be_tried_again(table, f"{name}--r{r}")
                if r > parameters["replicates"] and ended:
                    jobs.append((kind, name, r))
        return jobs

    def _named(self, gates: Iterable[str]) -> list[str]:
        return [gate for gate in gates if gate in self._plan.gates]

    def _code_of(self, kind: str, name: str) -> str:
        study = kinds()[kind]
        found = study.code(self._plan.jobs[kind][name])
        if name in self._plan.on_demand:  # the table that it is for voids no trial
            found = sources.code(found)
        return sources.fingerprint(study.script, found)


def _all(gates: Gates) -> list[str]:
    return gates if isinstance(gates, list) else sorted(set().union(*gates.values()))
