"""Fills the tables of SPECIFICATION.md: `python -m workflow.specification`, or `make report`.

The project was created from five documents. A file of workflow/asked holds all that one of them
asks for, an entry for each thing. Each TOML array, such as `[[model]]`, is a part of the document.
An entry states what is lacking. Gates, studies and numbers that it names are looked up in the
recorded rows: a red gate, a missing row or a number that misses its goal is lacking too.
"""

import tempfile
import tomllib
from argparse import ArgumentParser
from collections.abc import Mapping
from fnmatch import filter as filter_names
from functools import cache
from pathlib import Path
from typing import NamedTuple

import duckdb

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
DEVICE = "nvidia-h200"
# Numbers read rows of DEVICE alone in these.
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
        number: SQL for one row: a text, null while no row is recorded, and whether it reaches
            what was asked. `Rows` says which tables it reads.
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

    A job of an operator has one for each implementation.
    """
    found: dict[str, list[set[str]]] = {}
    for jobs in plan().jobs.values():
        for config_id, job in jobs.items():
            ids = {config_id, *job["implementations"].values()} if "op" in job else {config_id}
            found.setdefault(job.get("study", config_id), []).append(ids)
    return found


class Rows:
    """Holds what the recorded rows say about gates and jobs.

    A number's query reads the views of the store. The views in OF_DEVICE have rows of DEVICE alone.
    `speedup_of_every_gpu` is view `speedup` with all its rows. `gates_of_phases` has a `gate` that
    a phase asks for in each row, also where the gate has not run.

    Args:
        connection: an open store.
        jobs: what `studies` returns.
    """

    def __init__(
        self, connection: duckdb.DuckDBPyConnection, jobs: Mapping[str, list[set[str]]]
    ) -> None:
        self.connection, self.jobs = connection.cursor(), jobs
        self.connection.execute("create temp table speedup_of_every_gpu as from speedup")
        for view in OF_DEVICE:
            self.connection.execute(
                f"create temp table {view} as from {view} where device = '{DEVICE}'"
            )
        self.connection.execute(
            "create temp table gates_of_phases as select unnest($gates) as gate",
            {"gates": [name for name in plan().gates if gate(name).phase is not None]},
        )
        # Several numbers read it, and it takes ten seconds.
        self.connection.execute("create temp table gate_status as from gate_status")
        query = "select gate, sum(n_checks)::int, sum(n_failed)::int from gate_status group by gate"
        self.gates = {name: counts for name, *counts in self.connection.execute(query).fetchall()}
        # A step that does not fit the memory has no valid row: `oom` is its answer.
        query = f"""
            select config_id from training where device = '{DEVICE}'
            union
            select config_id from measurements
            where device = '{DEVICE}' and (valid or (kind = 'step' and status = 'oom'))
        """
        self.measured = {config_id for (config_id,) in self.connection.execute(query).fetchall()}

    def standing(self, thing: Thing) -> Standing:
        """Returns how a thing stands."""
        shown, whole = [], [not thing.lacks]
        if thing.gates:
            counts = [self.gates[name] for name in thing.gates if name in self.gates]
            n_checks, n_failed = (sum(one[i] for one in counts) for i in (0, 1))
            said = f"{n_checks:,} checks, {n_failed:,} red"
            n_missing = len(thing.gates) - len(counts)
            if n_missing:
                said = f"{said}, {n_missing} not run" if counts else "not run"
            shown.append(f"{report.code(thing.gates)}: {said}")
            whole.append(n_failed == 0 and n_missing == 0)
        if thing.studies:
            jobs = [ids for study in thing.studies for ids in self._jobs_of(study)]
            n_measured = sum(bool(ids & self.measured) for ids in jobs)
            shown.append(f"{report.code(thing.studies)}: {n_measured} of {len(jobs)}")
            whole.append(n_measured == len(jobs))
        if thing.number:
            text, reached = self.connection.execute(thing.number).fetchone()
            shown.append(text or "no row")
            whole.append(bool(text) and reached)
        state = MISSING if not thing.where else WORKS if all(whole) else PARTLY
        return Standing("; ".join(shown), state, f"{thing.lacks} {thing.note}".strip())

    def _jobs_of(self, study: str) -> list[set[str]]:
        """Returns the ids of each job of a study, or of all whose names match a pattern."""
        names = filter_names(self.jobs, study)
        if not names:
            raise ValueError(
                f"{ASKED} names {study!r}: config.yaml has no study or run of this name"
            )
        return [ids for name in names for ids in self.jobs[name]]


def tables(rows: Rows) -> dict[str, Table]:
    """Returns a table for each document, by the name of its file, and "asked", which counts."""
    found, counts = {}, []
    for name, things in documents().items():
        lines, states, before = [], [], ""
        for part, thing in things:
            standing = rows.standing(thing)
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
    return report.filled(PAGE, tables(Rows(connection, studies())))


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
