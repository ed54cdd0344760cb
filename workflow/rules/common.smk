"""The configuration checked, the device found, the jobs planned; what guards a run."""

import gc
import math
import re
from contextlib import suppress
from pathlib import Path

from snakemake.logging import logger
from tnp.bench.provenance import device_slug, free_gb
from tnp.dispatch.registry import catalog
from tnp.gates import COMPILED, GATES, generic_gates, n_shares
from tnp.experiment.gpu_memory import gates_at_once, limit_gb
from tnp.figures.story import STORY
from workflow import gpus, sources, start, summary
from workflow.attempts import PATTERN, named
from workflow.files import Files
from workflow.plan import GATE, Plan, device, running_order
from workflow.problems import target
from workflow.progress import Progress
from workflow.studies import kinds
from workflow.studies.ops import deciding
from workflow.targets import refusal
from workflow.validation import validate

# A plan reads millions of nodes of syntax trees that live as long as it does: to look for cycles
# among them every 700 allocations makes a dry run slower.
gc.set_threshold(100_000)

# Names of jobs to measure again. The rest of `config` is the experiment.
again = config.pop("again", None)

try:
    CONFIG = validate(config, WRITTEN)
    GPU_LIMIT_GB = limit_gb()
    SLUG = device(CONFIG.device, device_slug())
except ValueError as error:
    sys.exit(str(error))

# An entry of another package with a fault is left out, and the rest goes on.
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

PLAN = Plan(CONFIG, DEVICE, SLUG)
TRAINING = PLAN.jobs["train"]

# Gates first, then the benchmarks round by round, training last.
PRIORITY = {job: len(PLAN.order) - rank for rank, job in enumerate(PLAN.order)}
GATE_PRIORITY = len(PLAN.order) + 1

# On a cluster a job's own process reads this file too, while the plan is being carried out.
PLANNING = workflow.is_main_process

ELSEWHERE = PLAN.elsewhere()
try:
    AGAIN = set()
    if PLANNING and again is not None:
        AGAIN = named(again, PLAN.names(), PLAN.names_elsewhere())
except ValueError as error:
    sys.exit(str(error))

FILES = Files(PLAN, RUNS, AGAIN, PLANNING)

# Gates share a device as far as its memory reaches: they time nothing, and much of each is Python
# and float64.
GATES_AT_ONCE = gates_at_once(free_gb() if DEVICE == "cuda" else None, GPU_LIMIT_GB)

# With several GPUs, each is a resource of Snakemake with GATES_AT_ONCE shares. A gate takes one for
# each of its processes. Any other job takes all of its GPU.
SEVERAL = range(CONFIG.gpus if DEVICE == "cuda" and CONFIG.gpus > 1 else 0)
N_GPUS = len(SEVERAL) or 1
for number in SEVERAL:
    workflow.register_resource(f"gpu{number}", GATES_AT_ONCE)


def gate_shares(wildcards):
    """Returns in how many processes a gate runs, each of which counts as a gate here."""
    return n_shares(wildcards.gate, target(DEVICE), GATES_AT_ONCE)


# The jobs of one GPU share its cores, and a timing takes all, so that nothing runs beside it there.
# A cluster reserves GPUS_A_JOB for each job.
CORES_A_GPU = max(1, workflow.cores // N_GPUS)
GPUS_A_JOB = 1 if DEVICE == "cuda" and not SEVERAL else 0


def part(wildcards):
    """Returns what a job has of the host's GPUs and cores, or None for all."""
    if SEVERAL:
        return gpus.part_of(wildcards.get("gate") or wildcards.config_id, PLAN, N_GPUS)


def gpu_shares(share):
    """Returns a rule's resources: `share(wildcards)` of the job's own GPU, and 0 of the others."""

    def of(number):
        return lambda wildcards: share(wildcards) * (part(wildcards).number == number)

    return {f"gpu{number}": of(number) for number in SEVERAL}


WHOLE_GPU = gpu_shares(lambda wildcards: GATES_AT_ONCE)

start.prepare_environment(workflow.basedir)


# Stems of a benchmark's files, and of a training's.
REPLICATE, TRAINED = "{config_id}--r{replicate}{attempt}", "{config_id}{attempt}"


wildcard_constraints:
    attempt=PATTERN,
    replicate=r"\d+",


def one_of(names):
    """A wildcard's pattern that matches exactly `names`."""
    return "|".join(map(re.escape, names)) or "(?!)"


def awaited(kind, stem):
    """Results of the gates that a job waits for."""
    return lambda of: FILES.awaited(kind, of.config_id, stem.format(**of))


def params_of(kind, stem):
    """Parameters of the jobs of a rule; a training run has no replicates."""
    return {
        "parameters": lambda of: PLAN.job(kind, of.config_id, of.get("replicate")),
        "gates": lambda of: FILES.gates(kind, of.config_id),
        "part": part,
    } | kinds()[kind].params(RUNS, stem)


def priority_of(wildcards):
    return PRIORITY.get((wildcards.config_id, int(wildcards.replicate)), 0)


def nothing_here(study):
    return lambda wildcards: sys.exit(ELSEWHERE[study])


def made_by_rules():
    """A pattern that matches every file that the rules until here make."""
    files = [file for rule in workflow.rules for file in rule.output]
    return "|".join(
        re.sub(r"\(\?P<\w+>", "(?:", file.regex().pattern) for file in files
    )


def unknown_target(wildcards):
    known = [rule.name for rule in workflow.rules if not rule.has_wildcards()]
    sys.exit(refusal(wildcards.target, known))


def of_plan(wildcards):
    """Returns the files of all jobs. It is a function: a run that needs no files reads no code."""
    return [*FILES.of_plan(), *FILES.of_again()]


def to_measure_again(wildcards):
    if not AGAIN:
        sys.exit("say what: snakemake again --config again=NAME")
    return FILES.of_again()


def drawn(wildcards):
    """Returns the figures that exist, for a report; nothing waits for them."""
    return [
        before_update(report(file, category=question, labels={"figure": name}))
        for question, names in STORY.items()
        for name in names
        if Path(file := f"figures/{name}.svg").exists()
    ]


def measures_nothing():
    """Whether all jobs to be done only draw: what measures writes files that are its outputs."""
    return not any(job.output for job in workflow.dag.needrun_jobs())


def of_jobs(jobs):
    """Returns an input function: all files of these jobs."""
    return lambda wildcards: [
        file for files in FILES.of_replicates(jobs) for file in files.values()
    ]


def results_of(table, jobs):
    """Returns an input function: the files of `table` of these jobs."""
    return lambda wildcards: [files[table] for files in FILES.of_replicates(jobs)]


# A dry run and all that comes before this changes nothing, so it needs no lock.
onstart:
    try:
        LOCK = start.take_lock(Path(".snakemake/workflow.lock"))
        start.check_folders(FOLDERS)
        if not measures_nothing():  # a job that draws reads the tables itself
            start.check_tables()
        if any("gpu" in job.rule.resources for job in workflow.dag.needrun_jobs()):
            if workflow.local_exec:
                start.check_device(SLUG)
            gpus.check(CONFIG.gpus, workflow.cores, workflow.local_exec)
        start.check_new(
            job.output[0] for job in workflow.dag.needrun_jobs() if job.output
        )
    except ValueError as error:
        sys.exit(str(error))
    # The folder serves only jobs that share no file system. A kill would leave it behind.
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
