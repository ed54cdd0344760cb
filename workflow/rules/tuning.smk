"""Tuning, on demand: `snakemake tune` times every candidate and rewrites the tuned tables.

The tables are no rule's output: they are committed, and nothing else may wait for a tuning.
"""

from workflow import tuning_plan

PROBLEMS = tuning_plan.problems(config, DEVICE, SLUG)


rule trials:
    output:
        trials=f"{RUNS}/trials/{{problem}}{{attempt}}.parquet",
        environments=f"{RUNS}/environments/tuning--{{problem}}{{attempt}}.parquet",
    log:
        f"{LOGS}/tuning--{{problem}}{{attempt}}.log",
    wildcard_constraints:
        problem=one_of(PROBLEMS),
    threads: workflow.cores
    resources:
        gpu=GPUS,
    params:
        code=lambda wildcards: sources.fingerprint("trials", tuning_plan.code()),
        parameters=lambda wildcards: PROBLEMS[wildcards.problem],
    script:
        "../scripts/trials.py"


# Without an output it always runs, and always from the trials that are there.
rule tune:
    input:
        trials=[
            f"{RUNS}/trials/{problem}{ATTEMPTS.planned('trials', problem)}.parquet"
            for problem in PROBLEMS
        ],
        ops=[
            planned("op", f"{config_id}--r{replicate}")[table]
            for config_id, replicate in tuning_plan.operator_jobs(config, OPS)
            for table in ("ops", "environments")
        ],
        views=sources.views(),
    log:
        "data/runs/logs/tune.log",
    script:
        "../scripts/tune.py"
