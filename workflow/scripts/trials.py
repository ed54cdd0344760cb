"""Times every candidate of one problem."""

from pathlib import Path

from tnp.bench.process import device_lock
from tnp.bench.tuning import tune
from tnp.store import write_table
from workflow.jobs import job

parameters = snakemake.params.parameters


def outcome(rows: list[dict]) -> str:
    ok = [row for row in rows if row["status"] == "ok"]
    if not ok:
        return f"{rows[0]['status']}: {rows[0]['reason']}"
    best = min(ok, key=lambda row: row["time_ms_p50"])
    return (
        f"{best['kernel']} {best['launch_config']} {best['time_ms_p50']:.4g} ms, "
        f"best of {len(ok)} ({len(rows) - len(ok)} failed)"
    )


with job(f"tuning {snakemake.wildcards.problem}", snakemake.log[0]) as say:
    with device_lock(parameters["device_slug"], say=say):
        tables = tune(parameters, parameters["timing"]["timeout_s"])
    for table, file in snakemake.output.items():
        write_table(Path(file), table, tables[table])
    say(outcome(tables["trials"]))
