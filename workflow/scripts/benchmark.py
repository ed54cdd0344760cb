"""Measures one configuration in a process of its own, or records which red gate forbids it."""

from pathlib import Path

from tnp.bench.isolate import run_isolated, with_provenance
from tnp.bench.outcome import failure_rows
from tnp.store import write_table
from workflow.gate_process import red
from workflow.jobs import job

parameters, kind = snakemake.params.parameters, snakemake.params.kind
implementation = parameters.get("implementation") or parameters["variant_spec"]["attention"]
name = f"{parameters['config_id']} r{parameters['replicate']}"


def measure() -> dict[str, list[dict]]:
    reason = red(snakemake.input.get("gates", []), implementation)
    if reason is not None:
        tables = failure_rows(kind, parameters, "gate_failed", reason)
        return with_provenance(tables, parameters["device_slug"], None)
    return run_isolated(kind, parameters, parameters["timing"]["timeout_s"])


def outcome(row: dict) -> str:
    if row["status"] != "ok":
        return f"{row['status']}: {row['reason']}"
    if kind == "step":
        return f"{row['step_ms_p50']:.4g} ms"
    return f"{row['pass']} {row['time_ms_p50']:.4g} ms"


with job(name, snakemake.log[0]) as say:
    tables = measure()
    for table, file in snakemake.output.items():
        write_table(Path(file), table, tables.get(table, []))
    say(", ".join(map(outcome, tables[f"{kind}s"])))
