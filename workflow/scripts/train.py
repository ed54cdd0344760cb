"""Trains one run, from its last checkpoint if there is one, and records what it logged."""

import json
import math
from collections.abc import Callable
from pathlib import Path

from tnp.bench.child import require_device
from tnp.bench.isolate import with_provenance
from tnp.bench.process import device_lock
from tnp.bench.provenance import environment
from tnp.train import recorded_runs
from workflow.gate_process import stopped
from workflow.jobs import job, write

parameters = snakemake.params.parameters
device, slug = parameters["device"], parameters["device_slug"]
# A checkpoint is refused where the run's parameters changed; the gates it waits for are none.
own = {name: value for name, value in parameters.items() if name != "gates"}


def run(say: Callable[[str], None]) -> list[dict]:
    rows: list[dict] = []
    require_device(slug)
    with device_lock(slug, say=say):
        recorded_runs.run(own, device, Path(snakemake.params.checkpoints), rows.append)
    return rows


name, log = f"train {parameters['run']}", snakemake.log[0]
with job(name, log, snakemake.params.part, capture=False) as say:
    stop = stopped(list(map(Path, snakemake.input)), json.loads(parameters["operators"]))
    rows = [] if stop else run(say)
    state = environment(device)
    tables = {"training": rows, "environments": [state]}
    write(snakemake.output, with_provenance(tables, slug, state["environment_id"]))
    Path(log).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    if stop:
        say(f"not trained: {stop.reason}")
    else:
        step, held_out = rows[-1]["step"], rows[-1]["heldout_log_likelihood"]
        said = f"held-out {held_out:.3f} nats a target"
        say(f"{step} steps, {said if math.isfinite(held_out) else 'where it diverged'}")
