"""Measures one configuration in a process of its own, but for what its gates stop."""

import json
from pathlib import Path

from tnp.bench.isolate import run_isolated, with_provenance
from tnp.bench.outcome import Rows, failure_rows, implementation_of, only, together
from tnp.bench.process import device_lock
from tnp.gates import Blocked
from tnp.store.files import write_table
from workflow import sources
from workflow.attempts import Attempts, note_state
from workflow.gate_process import stopped
from workflow.jobs import job

kind = snakemake.params.kind
parameters = sources.with_definitions(kind, snakemake.params.parameters)
gates = snakemake.params.gates
attempts = Attempts(Path(snakemake.output[0]).parents[1], planning=False)
name = f"{parameters['config_id']} r{parameters['replicate']}"


def measure() -> tuple[Rows, bool]:
    """The rows, and whether gates stopped some of them."""
    if kind != "op":
        stop = stopped(results(gates), json.loads(parameters["operators"]))
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


def outcome(row: dict) -> str:
    of_kind = {"step": (), "prediction": ("form",), "op": ("pass", "implementation")}
    what = "".join(f"{row[name]} " for name in of_kind[kind])
    if row["status"] != "ok":
        return f"{what}{row['status']}: {row['reason']}"
    return f"{what}{row['step_ms_p50' if kind == 'step' else 'time_ms_p50']:.4g} ms"


with job(name, snakemake.log[0]) as say:
    with device_lock(parameters["device_slug"], say=say):
        tables, refused = measure()
    own, rows = Path(snakemake.output[f"{kind}s"]), tables[f"{kind}s"]
    note_state(own, snakemake.params.state, refused)
    for table, file in snakemake.output.items():
        write_table(Path(file), table, tables.get(table, []))
    say(", ".join(map(outcome, rows)))
