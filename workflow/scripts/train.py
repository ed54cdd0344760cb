"""Trains one run, from its last checkpoint if there is one, and records what it logged."""

import json
from pathlib import Path

from tnp import train
from tnp.bench.isolate import device_lock, with_provenance
from tnp.bench.provenance import environment
from tnp.store import write_table
from workflow.jobs import job

parameters = snakemake.params.parameters

with job(f"train {parameters['run']}", snakemake.log[0], capture=False) as say:
    with device_lock(parameters["device_slug"]):
        rows = train.run(parameters, Path(snakemake.params.checkpoints))
    state = environment(parameters["device"])
    tables = {"training": rows, "environments": [state]}
    tables = with_provenance(tables, parameters["device_slug"], state["environment_id"])
    for table, content in tables.items():
        write_table(Path(snakemake.output[table]), table, content)
    Path(snakemake.log[0]).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    say(f"{rows[-1]['step']} steps, held-out {rows[-1]['heldout_log_likelihood']:.3f} nats")
