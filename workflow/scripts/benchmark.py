"""Measures one configuration in a process of its own, but for what a red gate forbids."""

from pathlib import Path

from tnp.bench.isolate import run_isolated, with_provenance
from tnp.bench.outcome import failure_rows, only, together
from tnp.store import write_table
from workflow.gate_process import red
from workflow.jobs import job

parameters, kind = snakemake.params.parameters, snakemake.params.kind
name = f"{parameters['config_id']} r{parameters['replicate']}"


def measure() -> dict[str, list[dict]]:
    reasons = {name: red(files, name) for name, files in snakemake.params.gates.items()}
    parts = []
    for forbidden, reason in reasons.items():
        if reason is not None:
            rows = failure_rows(kind, part([forbidden]), "gate_failed", reason)
            parts.append(with_provenance(rows, parameters["device_slug"], None))
    if allowed := [name for name, reason in reasons.items() if reason is None]:
        parts.append(run_isolated(kind, part(allowed), parameters["timing"]["timeout_s"]))
    return together(parts)


def part(implementations: list[str]) -> dict:
    return parameters if kind == "step" else only(parameters, implementations)


def outcome(row: dict) -> str:
    what = "" if kind == "step" else f"{row['pass']} {row['implementation']} "
    if row["status"] != "ok":
        return f"{what}{row['status']}: {row['reason']}"
    return f"{what}{row['step_ms_p50' if kind == 'step' else 'time_ms_p50']:.4g} ms"


with job(name, snakemake.log[0]) as say:
    tables = measure()
    for table, file in snakemake.output.items():
        write_table(Path(file), table, tables.get(table, []))
    say(", ".join(map(outcome, tables[f"{kind}s"])))
