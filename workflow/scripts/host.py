"""Measures what eager calls of one problem cost the host, in a process of its own."""

from pathlib import Path

from tnp.bench.isolate import run_isolated
from tnp.bench.process import device_lock
from tnp.store import write_table
from workflow.jobs import job

parameters = snakemake.params.parameters
with job(parameters["config_id"], snakemake.log[0]) as say:
    with device_lock(parameters["device_slug"], say=say):
        tables = run_isolated("host", parameters, parameters["timing"]["timeout_s"])
    for table, file in snakemake.output.items():
        write_table(Path(file), table, tables.get(table, []))
    failed = [row["reason"] for row in tables["host_calls"] if row["status"] == "error"]
    say(failed[0] if failed else f"{len(tables['host_calls'])} rows")
