"""Tuning, on demand: `snakemake tune` times every kernel and configuration and rewrites the table.

A trial is a contender of an ordinary operator benchmark. The table is no rule's output: it is
committed, and nothing else may wait for a tuning.
"""

TRIALS = running_order(PLAN.on_demand)
TIMED = deciding(CONFIG, PLAN.jobs["op"])


# A rule without an output always runs, and always from the rows that are there.
rule tune:
    input:
        trials=results_of("ops", TRIALS),
        ops=results_of("ops", TIMED),
        environments=results_of("environments", TRIALS + TIMED),
    log:
        "data/runs/logs/tune.log",
    params:
        device=SLUG,
    script:
        "../scripts/tune.py"
