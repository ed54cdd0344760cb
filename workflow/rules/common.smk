"""The configuration checked, the device found, the jobs planned; what guards a run."""

import re
from pathlib import Path

from snakemake.logging import logger
from tnp.bench.outcome import CEILINGS
from tnp.bench.provenance import device_slug
from tnp.gates import GATES, gates_for
from workflow import plan, sources, start, summary
from workflow.progress import Progress
from workflow.validation import validate

try:
    validate(config, WRITTEN)
    SLUG = plan.device(config["device"], device_slug())
except ValueError as error:
    sys.exit(str(error))

DEVICE = "cpu" if SLUG == "cpu" else "cuda"
RUNS = f"data/runs/{SLUG}"
LOGS = f"{RUNS}/logs"

STEPS = plan.steps(config, DEVICE, SLUG)
OPS = plan.ops(config, DEVICE, SLUG)
TRAINING = plan.training(config, DEVICE, SLUG)

# Gates first, then the benchmarks round by round, training last.
ORDER = plan.running_order(STEPS | OPS)
PRIORITY = {job: len(ORDER) - rank for rank, job in enumerate(ORDER)}
GATE_PRIORITY = len(ORDER) + 1

# Gates share the device: they time nothing, and much of each is Python and float64.
GATES_AT_ONCE = 4

# Timings claim all cores, so nothing runs beside them; on a cluster they claim a GPU.
GPUS = 1 if DEVICE == "cuda" else 0

# The names in `tnp.figures.FIGURES`, without importing the libraries that draw.
FIGURES = ("speedup", "memory", "stages", "training", "roofline", "matrix", "ablation")

start.prepare_environment(workflow.basedir)


def one_of(names):
    """A wildcard's pattern that matches exactly `names`."""
    return "|".join(map(re.escape, names)) or "(?!)"


def outputs(kind, stem):
    """{table: file} of everything that a job writes."""
    return {table: f"{RUNS}/{table}/{stem}.parquet" for table in plan.TABLES[kind]}


def gate_files(gates):
    """Results of the gates that a benchmark waits for, of those that config.yaml names."""
    return [outputs("gate", gate)["gates"] for gate in gates if gate in config["gates"]]


def step_gates(parameters):
    return gate_files(parameters["gates"].split("|"))


def op_gates(parameters):
    """{implementation: results of the gates it waits for}."""
    op = parameters["op"]
    return {
        name: [] if op in CEILINGS else gate_files(gates_for({op: name}))
        for name in parameters["implementations"]
    }


def op_sources(parameters):
    return union(
        sources.of_op(parameters | {"implementation": name})
        for name in parameters["implementations"]
    )


def union(lists):
    return sorted(set().union(*lists))


def planned_tables():
    """Parquet files that the jobs of this device write."""
    jobs = [("gate", gate) for gate in config["gates"]]
    jobs += [("train", run) for run in TRAINING]
    for config_id, replicate in ORDER:
        kind = "step" if config_id in STEPS else "op"
        jobs.append((kind, f"{config_id}--r{replicate}"))
    return [file for job in jobs for file in outputs(*job).values()]


def existing_tables():
    """Parquet files that are already there: recorded ones, and those of earlier plans."""
    return [
        str(file)
        for root in ("data/recorded", "data/runs")
        for file in sorted(Path(root).glob("*/*/*.parquet"))
        if not file.name.startswith(".")
    ]


# A dry run and all that comes before this changes nothing, so it needs no lock.
onstart:
    try:
        LOCK = start.take_lock(Path(".snakemake/workflow.lock"))
        start.check_folders([RUNS, "data", "figures"])
        start.check_tables(existing_tables())
    except ValueError as error:
        sys.exit(str(error))
    for handler in logger.handlers:
        if handler.name == "DefaultStreamHandler":
            handler.addFilter(Progress(len(workflow.dag)))


onsuccess:
    print(summary.success(f"figures/{figure}.html" for figure in FIGURES))
    gates = [outputs("gate", gate)["gates"] for gate in config["gates"]]
    red = summary.red_gates(filter(Path.exists, map(Path, gates)))
    if red:
        sys.exit("\n".join(red))
