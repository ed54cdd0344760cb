"""Measures what eager calls of one problem, or steps of one shape, cost the host.

They run in a process of their own.
"""

from pathlib import Path

from tnp.bench.isolate import run_isolated
from tnp.bench.process import device_lock
from tnp.store.files import write_table
from workflow.jobs import job
from workflow.plan import TABLES

parameters, kind = snakemake.params.parameters, snakemake.params.kind
with job(parameters["config_id"], snakemake.log[0]) as say:
    with device_lock(parameters["device_slug"], say=say):
        tables = run_isolated(kind, parameters, parameters["timing"]["timeout_s"])
    for table, file in snakemake.output.items():
        write_table(Path(file), table, tables.get(table, []))
    rows = tables[TABLES[kind][0]]
    failed = [row["reason"] for row in rows if row["status"] not in ("ok", "unsupported")]
    say(failed[0] if failed else f"{len(rows)} rows")
