"""Tuning, on demand: `snakemake tune` times every kernel and configuration and rewrites the table.

A trial is a contender of an ordinary operator benchmark. The table is no rule's output: it is
committed, and nothing else may wait for a tuning.
"""

TRIALS = FILES.of_replicates(running_order(PLAN.on_demand))
TIMED = FILES.of_replicates(deciding(CONFIG, PLAN.jobs["op"]))


# Without an output it always runs, and always from the rows that are there.
rule tune:
    input:
        trials=[files["ops"] for files in TRIALS],
        ops=[files["ops"] for files in TIMED],
        environments=[files["environments"] for files in TRIALS + TIMED],
    log:
        "data/runs/logs/tune.log",
    params:
        device=SLUG,
    script:
        "../scripts/tune.py"
