"""Profiles one implementation of a problem with Nsight Compute, in a process of its own."""

from pathlib import Path

from tnp.bench.isolate import run_isolated
from tnp.bench.process import device_lock
from tnp.store.files import write_table
from workflow.jobs import job

parameters = snakemake.params.parameters | {"reports": snakemake.params.reports}
with job(parameters["config_id"], snakemake.log[0]) as say:
    with device_lock(parameters["device_slug"], say=say):
        tables = run_isolated("profile", parameters, parameters["timing"]["timeout_s"])
    for table, file in snakemake.output.items():
        write_table(Path(file), table, tables.get(table, []))
    rows = tables["profiles"]
    failed = [f"{row['status']}: {row['reason']}" for row in rows if row["status"] != "ok"]
    say(failed[0] if failed else f"{len(rows)} kernels")
