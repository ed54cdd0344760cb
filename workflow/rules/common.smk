"""The configuration checked, the device found, the jobs planned; what guards a run."""

import gc
import json
import math
import re
from contextlib import suppress
from functools import cache
from pathlib import Path

from snakemake.logging import logger
from tnp.bench.child import require_visible
from tnp.bench.outcome import implementation_of
from tnp.bench.process import DeviceMissing
from tnp.bench.provenance import device_slug, free_gb
from tnp.dispatch.registry import catalog
from tnp.experiment.code_hash import digest
from tnp.gates import COMPILED, GATES, gates_of, generic_gates
from tnp.experiment.gpu_memory import gates_at_once, limit_gb
from tnp.store.schemas import CEILINGS
from tnp.figures.story import STORY
from workflow import operator_plan, plan, sources, start, summary
from workflow.attempts import PATTERN, Attempts, is_of, keep, named
from workflow.progress import Progress
from workflow.faults import unknown
from workflow.validation import validate

# A plan reads millions of nodes of syntax trees that live as long as it does: to look for cycles
# among them every 700 allocations took a third of a dry run.
gc.set_threshold(100_000)

# What is to be measured again, beside what is there. The rest of `config` is the experiment.
again = config.pop("again", None)

try:
    validate(config, WRITTEN)
    GPU_LIMIT_GB = limit_gb()
    SLUG = plan.device(config["device"], device_slug())
except ValueError as error:
    sys.exit(str(error))

# What of other packages cannot be taken; the rest goes on.
for fault in catalog().faults if workflow.is_main_process else ():
    print(fault, file=sys.stderr)

DEVICE = "cpu" if SLUG == "cpu" else "cuda"
RUNS = f"data/runs/{SLUG}"
LOGS = f"{RUNS}/logs"
FOLDERS = (RUNS, "data", "figures")  # that are written to

try:
    start.check_no_file_for_folder(FOLDERS)
except ValueError as error:
    sys.exit(str(error))

PLANNED_GATES = plan.gates(config)
STEPS = plan.steps(config, DEVICE, SLUG)
OPS = plan.ops(config, DEVICE, SLUG)
TUNING = operator_plan.tuning(config, DEVICE, SLUG)  # on demand alone
OF_OPERATORS = OPS | TUNING
TRAINING = plan.training(config, DEVICE, SLUG)
HOST = plan.host(config, DEVICE, SLUG)
HOST_STEPS = plan.host_steps(config, DEVICE, SLUG)
PREDICTIONS = plan.predictions(config, DEVICE, SLUG)
PROFILES = plan.profiles(config, DEVICE, SLUG)
BENCHMARKS = {"step": STEPS, "op": OPS, "prediction": PREDICTIONS, "host": HOST}
BENCHMARKS |= {"host_step": HOST_STEPS, "profile": PROFILES}
JOBS = BENCHMARKS | {"op": OF_OPERATORS, "train": TRAINING}
SCRIPTS = dict.fromkeys(("step", "op", "prediction"), "benchmark")
SCRIPTS |= dict.fromkeys(("host", "host_step"), "host")
SCRIPTS |= {"profile": "profile", "train": "train"}
OF_BENCHMARKS = STEPS | OPS | PREDICTIONS | HOST | HOST_STEPS | PROFILES

# Gates first, then the benchmarks round by round, training last.
ORDER = plan.running_order(OF_BENCHMARKS)
PRIORITY = {job: len(ORDER) - rank for rank, job in enumerate(ORDER)}
GATE_PRIORITY = len(ORDER) + 1

# On a cluster a job's own process reads this file too, while the plan is being carried out.
PLANNING = workflow.is_main_process
ATTEMPTS = Attempts(RUNS, PLANNING)

ELSEWHERE = plan.elsewhere(config, DEVICE, SLUG)
try:
    AGAIN = set()
    if PLANNING and again is not None:
        here = (config, DEVICE, SLUG)
        AGAIN = named(again, plan.names(*here), plan.names_elsewhere(*here))
except ValueError as error:
    sys.exit(str(error))

# Gates share the device as far as its memory reaches: they time nothing, and much of each is Python
# and float64.
GATES_AT_ONCE = gates_at_once(free_gb() if DEVICE == "cuda" else None, GPU_LIMIT_GB)

# Timings claim all cores, so nothing runs beside them; on a cluster they claim a GPU.
GPUS = 1 if DEVICE == "cuda" else 0

start.prepare_environment(workflow.basedir)


# Of the files of a benchmark's job, and of a training's.
REPLICATE, TRAINED = "{config_id}--r{replicate}{attempt}", "{config_id}{attempt}"


wildcard_constraints:
    attempt=PATTERN,
    replicate=r"\d+",


def one_of(names):
    """A wildcard's pattern that matches exactly `names`."""
    return "|".join(map(re.escape, names)) or "(?!)"


def outputs(kind, stem):
    """{table: file} of everything that a job writes."""
    return {table: f"{RUNS}/{table}/{stem}.parquet" for table in plan.TABLES[kind]}


def planned(kind, stem):
    """{table: file} of the attempt that counts: the last one, or the next where that failed."""
    again = (kind, stem) in AGAIN
    return outputs(kind, stem + ATTEMPTS.planned(plan.TABLES[kind][0], stem, again))


def named_gates(gates):
    """Those that config.yaml names."""
    return [gate for gate in gates if gate in PLANNED_GATES]


def gate_files(gates):
    """Results of the gates that a benchmark waits for, of those that config.yaml names."""
    return [planned("gate", gate)["gates"] for gate in named_gates(gates)]


def parameters_of(kind, wildcards):
    """Of one job."""
    if kind == "train":
        return TRAINING[wildcards.config_id]
    return plan.job(JOBS[kind], wildcards.config_id, wildcards.replicate)


def awaited_gates(kind, config_id):
    """Gates that a job waits for; of an operator's benchmark {contender: its gates}."""
    parameters = JOBS[kind][config_id]
    if kind != "op":
        return named_gates(parameters["gates"].split("|"))
    op = parameters["op"]
    return {
        name: (
            [] if op in CEILINGS else named_gates(gates_of(op, implementation_of(name)))
        )
        for name in parameters["implementations"]
    }


def gates_waited_for():
    """Gates that jobs of this device wait for, in the order of config.yaml."""
    jobs = {"step": STEPS, "op": OPS, "prediction": PREDICTIONS, "train": TRAINING}
    found = set()
    for kind, ids in jobs.items():
        for config_id in ids:
            gates = awaited_gates(kind, config_id)
            found.update(*gates.values() if kind == "op" else [gates])
    return [gate for gate in PLANNED_GATES if gate in found]


@cache
def code(kind, config_id):
    """Fingerprint of all that a job runs."""
    found = sources.of_job(kind, JOBS[kind][config_id])
    if config_id in TUNING:  # the table that it is for voids no trial
        found = sources.code(found)
    return sources.fingerprint(SCRIPTS[kind], found)


def state(kind, wildcards):
    """All that a result depends on."""
    config_id, parameters = wildcards.config_id, parameters_of(kind, wildcards)
    depends_on = [code(kind, config_id), parameters, awaited_gates(kind, config_id)]
    return digest(json.dumps(depends_on, sort_keys=True))


def params_of(kind):
    """What the jobs of a rule are told, by which they run again where it changes."""
    return {
        "code": lambda wildcards: code(kind, wildcards.config_id),
        "gates": lambda wildcards: awaited_gates(kind, wildcards.config_id),
        "state": lambda wildcards: state(kind, wildcards),
        "parameters": lambda wildcards: parameters_of(kind, wildcards),
    }


def awaited(kind, stem):
    """Results of the gates that a job waits for: of none where its own is there and of now.

    As plain inputs, gates that run again would take all that waits for them with them.
    """

    def files(wildcards):
        own = outputs(kind, stem.format(**wildcards))[plan.TABLES[kind][0]]
        if is_of(Path(own), state(kind, wildcards)):
            return []
        gates = awaited_gates(kind, wildcards.config_id)
        return gate_files(
            sorted(set().union(*gates.values())) if kind == "op" else gates
        )

    return files


def priority_of(wildcards):
    return PRIORITY.get((wildcards.config_id, int(wildcards.replicate)), 0)


def planned_tables():
    """Parquet files that the jobs of this device write, and the gates that they wait for."""
    jobs = [("gate", gate) for gate in gates_waited_for()]
    jobs += [("train", run) for run in TRAINING]
    jobs += [(benchmark(config_id), f"{config_id}--r{r}") for config_id, r in ORDER]
    jobs += further_replicates()
    return [file for job in jobs for file in planned(*job).values()]


def benchmark(config_id):
    return next(kind for kind, jobs in BENCHMARKS.items() if config_id in jobs)


def further_replicates():
    """Jobs of replicates past the planned ones that were asked for once and did not come about."""
    jobs = []
    for config_id, parameters in OF_BENCHMARKS.items():
        kind = benchmark(config_id)
        table = plan.TABLES[kind][0]
        stems = [f"{config_id}--r{r}" for r in ATTEMPTS.replicates(table, config_id)]
        regular = {f"{config_id}--r{r + 1}" for r in range(parameters["replicates"])}
        jobs += [
            (kind, stem)
            for stem in stems
            if stem not in regular and ATTEMPTS.to_be_tried_again(table, stem)
        ]
    return jobs


def again_tables():
    """Parquet files that are added for what `again` names: a further replicate of a benchmark."""
    files = []
    for kind, name in sorted(AGAIN):
        stem = name
        if kind in BENCHMARKS:
            table = plan.TABLES[kind][0]
            stem += f"--r{max(ATTEMPTS.replicates(table, name), default=0) + 1}"
        files += planned(kind, stem).values()
    return files


def nothing_here(study):
    return lambda wildcards: sys.exit(ELSEWHERE[study])


def made_by_rules():
    """A pattern that matches every file that the rules until here make."""
    files = [file for rule in workflow.rules for file in rule.output]
    return "|".join(
        re.sub(r"\(\?P<\w+>", "(?:", file.regex().pattern) for file in files
    )


def is_in_folder(target):
    return len(Path(target).parts) > 1


def unknown_target(wildcards):
    target = wildcards.target
    targets = sorted(rule.name for rule in workflow.rules if not rule.has_wildcards())
    meant = f"figures/{Path(target).stem}.html"
    if target in targets:  # Snakemake has cut off the './', or the way to this folder
        sys.exit(f"write {target!r} as it stands here, with nothing in front of it")
    if target == "figures/headline.svg":
        sys.exit(f"{target!r} is drawn from the recorded rows alone: run `make report`")
    if meant in targets:
        sys.exit(f"unknown target {target!r}: did you mean {meant!r}?")
    alike = [name for name in targets if is_in_folder(name) == is_in_folder(target)]
    sys.exit(unknown("target", target, alike))


def to_measure_again(wildcards):
    if not AGAIN:
        sys.exit("say what: snakemake again --config again=NAME")
    return again_tables()


def drawn(wildcards):
    """The figures that are there, for a report; nothing waits for them."""
    return [
        before_update(report(file, category=question, labels={"figure": name}))
        for question, names in STORY.items()
        for name in names
        if Path(file := f"figures/{name}.svg").exists()
    ]


def measures_nothing():
    """Whether all jobs to be done only draw: what measures writes files that are its outputs."""
    return not any(job.output for job in workflow.dag.needrun_jobs())


def check_device():
    """ValueError if jobs are to run here on a GPU that is not here; a cluster's see for themselves."""
    if workflow.local_exec and any(
        "gpu" in job.rule.resources for job in workflow.dag.needrun_jobs()
    ):
        try:
            require_visible(SLUG)
        except DeviceMissing as error:
            raise ValueError(
                f"config.yaml: {error}; set it to 'auto', or run it on a cluster with --workflow-profile profiles/slurm"
            ) from None


# A dry run and all that comes before this changes nothing, so it needs no lock.
onstart:
    try:
        LOCK = start.take_lock(Path(".snakemake/workflow.lock"))
        start.check_folders(FOLDERS)
        if not measures_nothing():  # a job that draws reads the tables itself
            start.check_tables()
        check_device()
        keep(file for job in workflow.dag.needrun_jobs() for file in job.output)
    except ValueError as error:
        sys.exit(str(error))
    # Empty, but for jobs that share no file system: a kill would leave it behind.
    with suppress(OSError):
        workflow.snakemake_tmp_dir.rmdir()
    for handler in logger.handlers:
        if handler.name == "DefaultStreamHandler":
            handler.addFilter(Progress(len(workflow.dag)))


onsuccess:
    jobs = list(workflow.dag.jobs)
    written = [
        Path(file)
        for job in jobs
        for file in job.output
        if file.endswith(".parquet")
    ]
    gates = [file for file in written if file.parent.name == "gates"]
    # Jobs that measure have output files, and jobs that draw have none.
    drawn_too = any(job.is_script for job in jobs if not job.output)
    targets = {
        rule.name for rule in workflow.dag.targetrules
    } | workflow.dag.targetfiles
    said = [summary.success(drawn_too), *summary.not_finished(written, targets)]
    print("\n".join(said).strip())
    red = summary.red_gates(filter(Path.exists, gates))
    if red:
        sys.exit("\n".join(red))
