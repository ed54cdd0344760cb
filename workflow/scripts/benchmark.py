"""Measures one configuration in a process of its own, but for what its gates stop."""

import json
from pathlib import Path

from tnp.bench.isolate import run_isolated, with_provenance
from tnp.bench.outcome import Rows, failure_rows, implementation_of, only, together
from tnp.bench.process import device_lock
from tnp.gates import Blocked
from workflow.attempts import attempt
from workflow.gate_process import stopped
from workflow.jobs import job, write
from workflow.studies import kinds

given = dict(snakemake.params.items())
kind, gates = given["kind"], given["gates"]
study = kinds()[kind]
parameters = study.completed(given["parameters"]) | {
    name: given[name] for name in study.params("", "")
}
results = {attempt(file).stem: file for file in map(Path, snakemake.input)}
name = f"{parameters['config_id']} r{parameters['replicate']}"


def measure() -> Rows:
    """Returns the rows, each contender's failed where its gates stop it."""
    if isinstance(gates, list):
        return measured(parameters, stop(gates, json.loads(parameters.get("operators", "{}"))))
    op = parameters["op"]
    stops = {one: stop(of, {op: implementation_of(one)}) for one, of in gates.items()}
    allowed = [one for one, blocked in stops.items() if blocked is None]
    parts = [measured(only(parameters, allowed), None)] if allowed else []
    parts += [
        measured(only(parameters, [one]), blocked) for one, blocked in stops.items() if blocked
    ]
    return together(parts)


def stop(names: list[str], implementations: dict[str, str]) -> Blocked | None:
    return stopped([results[name] for name in names], implementations)


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


with job(name, snakemake.log[0], given["part"]) as say:
    with device_lock(parameters["device_slug"], say=say):
        tables = measure()
    write(snakemake.output, tables)
    say(outcome(tables[study.tables[0]]))
