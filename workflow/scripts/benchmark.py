"""Measures one configuration in a process of its own, but for what a red gate forbids."""

import json
from pathlib import Path

from tnp.bench.isolate import run_isolated, with_provenance
from tnp.bench.outcome import Rows, failure_rows, implementation_of, only, together
from tnp.bench.process import device_lock
from tnp.store import write_table
from workflow import sources
from workflow.attempts import Attempts, note_state
from workflow.gate_process import red
from workflow.jobs import job

kind = snakemake.params.kind
parameters = sources.with_definitions(kind, snakemake.params.parameters)
gates = snakemake.params.gates
attempts = Attempts(Path(snakemake.output[0]).parents[1], planning=False)
name = f"{parameters['config_id']} r{parameters['replicate']}"


def measure() -> Rows:
    if kind != "op":
        return measured(parameters, red(results(gates), json.loads(parameters["operators"])))
    reasons = {
        contender: red(results(names), {parameters["op"]: implementation_of(contender)})
        for contender, names in gates.items()
    }
    allowed = [name for name, reason in reasons.items() if reason is None]
    parts = [measured(only(parameters, allowed), None)] if allowed else []
    for forbidden, reason in reasons.items():
        if reason is not None:
            parts.append(measured(only(parameters, [forbidden]), reason))
    return together(parts)


def results(names: list[str]) -> list[Path]:
    return [attempts.last("gates", name) for name in names]


def refused(rows: list[dict]) -> bool:
    return any(row["status"] == "gate_failed" for row in rows)


def measured(part: dict, forbidden: str | None) -> Rows:
    if forbidden is None:
        return run_isolated(kind, part, parameters["timing"]["timeout_s"])
    rows = failure_rows(kind, part, "gate_failed", forbidden)
    return with_provenance(rows, parameters["device_slug"], None)


def outcome(row: dict) -> str:
    of_kind = {"step": (), "prediction": ("form",), "op": ("pass", "implementation")}
    what = "".join(f"{row[name]} " for name in of_kind[kind])
    if row["status"] != "ok":
        return f"{what}{row['status']}: {row['reason']}"
    return f"{what}{row['step_ms_p50' if kind == 'step' else 'time_ms_p50']:.4g} ms"


with job(name, snakemake.log[0]) as say:
    with device_lock(parameters["device_slug"], say=say):
        tables = measure()
    own, rows = Path(snakemake.output[f"{kind}s"]), tables[f"{kind}s"]
    note_state(own, snakemake.params.state, refused(rows))
    for table, file in snakemake.output.items():
        write_table(Path(file), table, tables.get(table, []))
    say(", ".join(map(outcome, rows)))
