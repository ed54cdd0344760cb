"""Fills the tables of SPECIFICATION.md: `python -m workflow.specification`, or `make report`.

The project was created from five documents. A file of workflow/asked holds all that one of them
asks for, an entry for each thing. Each TOML array, such as `[[model]]`, is a part of the document.
An entry states what is lacking. Gates, studies and numbers that it names are looked up in the
recorded rows: a red gate, a missing row or a number that misses its goal is lacking too.
"""

import tempfile
import tomllib
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from fnmatch import filter as filter_names
from functools import cache
from pathlib import Path
from typing import NamedTuple

import duckdb
import pyarrow as pa

from tnp.figures import report
from tnp.figures.report import Table
from tnp.gates import gate
from tnp.store.files import build_database
from tnp.util.atomic_files import parquet_files
from workflow.configuration import read
from workflow.plan import Plan
from workflow.validation import validate

PAGE = Path("SPECIFICATION.md")
ASKED = Path("workflow/asked")
# GPUs, the preferred one first, each with the prefix of its text in *shown by*.
DEVICES = {"nvidia-h200": "", "nvidia-h100-80gb-hbm3": "H100: "}
# Views in which a number's query sees the rows of one device only.
OF_DEVICE = (
    "memory",
    "own_operators",
    "profiles",
    "roofline",
    "speedup",
    "stg_ops",
    "stg_stages",
    "training_seeds",
)
WORKS, PARTLY, MISSING = STATES = ("works", "partly", "missing")


class Thing(NamedTuple):
    """Holds one thing that a document asks for, as its entry states it.

    Args:
        asked: the thing, in our words.
        where: paths, and commands. Empty where nothing serves the thing.
        gates: gates that prove it.
        studies: studies and training runs of config.yaml that measure it, or patterns of their
            names such as "latency_*".
        number: SQL that returns one row: a text (null if nothing is recorded), and whether it
            reaches what was asked. `Rows` says which tables it reads.
        lacks: a sentence on what is missing, as far as gates, studies and number do not show it.
        note: a sentence on a difference from the document, or on what is shown.
    """

    asked: str
    where: list[str] = []
    gates: list[str] = []
    studies: list[str] = []
    number: str = ""
    lacks: str = ""
    note: str = ""


class Standing(NamedTuple):
    """Holds what the recorded rows say about a thing."""

    shown: str  # gates, studies and the number
    state: str  # one of STATES
    remark: str  # what is lacking or differs, as the entry says


def documents() -> dict[str, list[tuple[str, Thing]]]:
    """Returns document → (part, thing) of each thing that it asks for, in its order."""
    return {
        path.stem: [
            (part, Thing(**entry))
            for part, entries in tomllib.loads(path.read_text()).items()
            for entry in entries
        ]
        for path in sorted(ASKED.glob("*.toml"))
    }


@cache
def plan() -> Plan:
    """Returns the plan of config.yaml on a GPU."""
    return Plan(validate(read(Path("config.yaml"))), "cuda", "cuda")


def studies() -> dict[str, list[set[str]]]:
    """Returns study or training run → for each of its jobs on a GPU, the `config_id`s of its rows.

    An operator's job has its own, and one for each implementation.
    """
    found: dict[str, list[set[str]]] = {}
    for jobs in plan().jobs.values():
        for config_id, job in jobs.items():
            ids = {config_id, *job["implementations"].values()} if "op" in job else {config_id}
            found.setdefault(job.get("study", config_id), []).append(ids)
    return found


class Rows:
    """Holds what the recorded rows of one device say about jobs, and those of all about gates.

    A number's query reads the views of the store. The views in OF_DEVICE have rows of the device
    alone, and variable `device` names it.
    `speedup_of_every_gpu` is view `speedup` with all its rows. `gates_of_phases` has a `gate` that
    a phase asks for in each row, also where the gate has not run.

    Args:
        connection: an open store.
        jobs: what `studies` returns.
        device: one of DEVICES.
        gate_status: the rows of this view. They are the same for every device, and take ten
            seconds.
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        jobs: Mapping[str, list[set[str]]],
        device: str,
        gate_status: pa.Table,
    ) -> None:
        # Temporary tables and variables belong to the cursor.
        self.connection, self.jobs, self.device = connection.cursor(), jobs, device
        self.connection.execute(f"set variable device = '{device}'")
        self.number = cache(self._number)
        self.connection.execute("create temp table speedup_of_every_gpu as from speedup")
        for view in OF_DEVICE:
            self.connection.execute(
                f"create temp table {view} as from {view} where device = getvariable('device')"
            )
        self.connection.execute(
            "create temp table gates_of_phases as select unnest($gates) as gate",
            {"gates": [name for name in plan().gates if gate(name).phase is not None]},
        )
        self.connection.register("gate_status", gate_status)
        query = """
            select gate, sum(n_checks)::int, sum(n_failed)::int,
                count(*) filter (passed is null and n_skipped < n_checks)
            from gate_status group by gate
        """
        self.gates = {name: counts for name, *counts in self.connection.execute(query).fetchall()}
        # Jobs of several studies may measure one thing, and only the current code counts. A step
        # that does not fit the memory has no valid row: `oom` is its answer. `auto` is not of
        # ours: it chooses another implementation.
        query = """
            with answers as (
                select
                    comparison_key,
                    bool_or(valid or (kind = 'step' and status = 'oom')) as measured,
                    bool_and(role = 'own' and implementation is distinct from 'auto'
                        and status != 'unsupported') as ours
                from measurements
                where device = getvariable('device') and is_current
                group by comparison_key
            )
            select
                config_id,
                bool_or(coalesce(measured, false)),
                bool_or(ours and not coalesce(measured, false))
            from measurements inner join answers using (comparison_key)
            where device = getvariable('device')
            group by config_id
            union all
            select distinct config_id, true, false from training
            where device = getvariable('device')
        """
        answers = self.connection.execute(query).fetchall()
        self.measured = {config_id for config_id, is_measured, _ in answers if is_measured}
        self.lacking = {config_id for config_id, _, is_lacking in answers if is_lacking}

    def standing(self, thing: Thing) -> Standing:
        """Returns the state of a thing, and its evidence."""
        parts: list[tuple[str, bool]] = []  # of *shown by*, and whether nothing is lacking
        if thing.gates:
            counts = [self.gates[name] for name in thing.gates if name in self.gates]
            n_checks, n_failed, n_unfinished = (sum(one[i] for one in counts) for i in range(3))
            said = f"{n_checks:,} checks, {n_failed:,} red"
            if n_unfinished:
                said += f", {n_unfinished} not finished"
            n_missing = len(thing.gates) - len(counts)
            if n_missing:
                said = f"{said}, {n_missing} not run" if counts else "not run"
            is_whole = n_failed == n_unfinished == n_missing == 0
            parts.append((f"{report.code(thing.gates)}: {said}", is_whole))
        start = DEVICES[self.device]  # of the first part that is this device's
        if thing.studies:
            n_measured, n_jobs = self.n_measured(thing), len(self._jobs(thing))
            said = f"{start}{report.code(thing.studies)}: {n_measured} of {n_jobs}"
            parts.append((said, n_measured == n_jobs))
            start = ""
        if thing.number:
            text, reached = self.number(thing.number)
            parts.append((start + (text or "no row"), bool(text) and bool(reached)))
        whole = not thing.lacks and all(holds for _, holds in parts)
        state = MISSING if not thing.where else WORKS if whole else PARTLY
        shown = "; ".join(said if holds else f"**{said}**" for said, holds in parts)
        return Standing(shown, state, f"{thing.lacks} {thing.note}".strip())

    def has_number(self, thing: Thing) -> bool:
        """Returns whether a row is recorded that a thing's number reads."""
        return bool(thing.number and self.number(thing.number)[0])

    def n_measured(self, thing: Thing) -> int:
        """Returns how many jobs of a thing's studies are measured and lack none of ours."""
        jobs = self._jobs(thing)
        return sum(bool(ids & self.measured) and not ids & self.lacking for ids in jobs)

    def _number(self, query: str) -> tuple[str | None, bool | None]:
        """Returns the text of a number, and whether it reaches what was asked."""
        return self.connection.execute(query).fetchone() or (None, None)

    def _jobs(self, thing: Thing) -> list[set[str]]:
        return [ids for study in thing.studies for ids in self._jobs_of(study)]

    def _jobs_of(self, study: str) -> list[set[str]]:
        """Returns the ids of each job of a study, or of all whose names match a pattern."""
        names = filter_names(self.jobs, study)
        if not names:
            raise ValueError(
                f"{ASKED} names {study!r}: config.yaml has no study or run of this name"
            )
        return [ids for name in names for ids in self.jobs[name]]


def shown_device(thing: Thing, devices: Sequence[Rows]) -> Rows:
    """Returns the device where most of a thing's jobs are measured.

    At a tie it is the first that has a number, or else the first.
    """
    return max(devices, key=lambda rows: (rows.n_measured(thing), rows.has_number(thing)))


def tables(devices: Sequence[Rows]) -> dict[str, Table]:
    """Returns a table for each document, by its file's name, and "asked", a count of states."""
    found, counts = {}, []
    for name, things in documents().items():
        lines, states, before = [], [], ""
        for part, thing in things:
            standing = shown_device(thing, devices).standing(thing)
            where = report.code(thing.where)
            first = part if part != before else ""
            lines.append((first, thing.asked, where, *standing))
            states.append(standing.state)
            before = part
        columns = ["part", "asked", "where", "shown by", "state", "lacking, or different"]
        found[name] = columns, lines
        counts.append((name.replace("_", " "), *map(states.count, STATES)))
    return found | {"asked": (["document", *STATES], counts)}


def page(connection: duckdb.DuckDBPyConnection) -> str:
    """Returns the text of SPECIFICATION.md with its tables filled from an open store."""
    jobs, gate_status = studies(), connection.sql("from gate_status").to_arrow_table()
    devices = [Rows(connection, jobs, device, gate_status) for device in DEVICES]
    return report.filled(PAGE, tables(devices))


def main() -> None:
    """Writes the page from the recorded rows."""
    about = __doc__.split("\n")[0]
    ArgumentParser(prog="python -m workflow.specification", description=about).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder, "results.duckdb")
        build_database(parquet_files(report.RECORDED), report.VIEWS, database)
        with duckdb.connect(str(database), read_only=True) as connection:
            PAGE.write_text(page(connection))


if __name__ == "__main__":
    main()
