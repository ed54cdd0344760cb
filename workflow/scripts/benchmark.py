"""Measures one configuration in a process of its own, but for what its gates stop."""

import json
from pathlib import Path

from tnp.bench.isolate import run_isolated, with_provenance
from tnp.bench.outcome import Rows, failure_rows, implementation_of, only, together
from tnp.bench.process import device_lock
from tnp.gates import Blocked
from tnp.store.files import write_table
from workflow.attempts import Attempts, note_state
from workflow.gate_process import stopped
from workflow.jobs import job
from workflow.studies import kinds

given = dict(snakemake.params.items())
kind, state, gates = given["kind"], given.get("state"), given.get("gates", [])
study = kinds()[kind]
parameters = study.completed(given["parameters"]) | {
    name: given[name] for name in study.params("", "")
}
attempts = Attempts(Path(snakemake.output[0]).parents[1], planning=False)
name = f"{parameters['config_id']} r{parameters['replicate']}"


def measure() -> tuple[Rows, bool]:
    """Returns the rows, and whether gates stopped some of them."""
    if isinstance(gates, list):
        stop = stopped(results(gates), json.loads(parameters["operators"])) if gates else None
        return measured(parameters, stop), stop is not None
    stops = {
        contender: stopped(results(names), {parameters["op"]: implementation_of(contender)})
        for contender, names in gates.items()
    }
    allowed = [name for name, stop in stops.items() if stop is None]
    parts = [measured(only(parameters, allowed), None)] if allowed else []
    parts += [measured(only(parameters, [name]), stop) for name, stop in stops.items() if stop]
    return together(parts), len(allowed) < len(stops)


def results(names: list[str]) -> list[Path]:
    return [attempts.last("gates", name) for name in names]


def measured(part: dict, stop: Blocked | None) -> Rows:
    if stop is None:
        return run_isolated(kind, part, parameters["timing"]["timeout_s"])
    rows = failure_rows(kind, part, stop.status, stop.reason)
    return with_provenance(rows, parameters["device_slug"], None)


def outcome(rows: list[dict]) -> str:
    """Returns each row's time, or how many rows there are if the study has no time to say."""
    if study.said is not None:
        return ", ".join(map(said, rows))
    failed = [row for row in rows if row["status"] not in ("ok", "unsupported")]
    if all(row["status"] == "unsupported" for row in rows):
        failed = rows
    return f"{failed[0]['status']}: {failed[0]['reason']}" if failed else f"{len(rows)} rows"


def said(row: dict) -> str:
    what = "".join(f"{row[name]} " for name in study.said[1:])
    if row["status"] != "ok":
        return f"{what}{row['status']}: {row['reason']}"
    return f"{what}{row[study.said[0]]:.4g} ms"


with job(name, snakemake.log[0]) as say:
    with device_lock(parameters["device_slug"], say=say):
        tables, refused = measure()
    own = study.tables[0]
    if state is not None:
        note_state(Path(snakemake.output[own]), state, refused)
    for table, file in snakemake.output.items():
        write_table(Path(file), table, tables.get(table, []))
    say(outcome(tables[own]))
