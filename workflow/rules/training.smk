"""Training runs: a killed one continues from its last checkpoint."""


rule train:
    input:
        gates_of_training,
    output:
        **outputs("train", "{run}{attempt}"),
    log:
        f"{LOGS}/{{run}}{{attempt}}.log",
    wildcard_constraints:
        run=one_of(TRAINING),
    threads: workflow.cores
    resources:
        gpu=GPUS,
    params:
        code=lambda wildcards: train_code(wildcards.run),
        gates=lambda wildcards: step_gates(TRAINING[wildcards.run]),
        state=train_state,
        parameters=lambda wildcards: TRAINING[wildcards.run],
        # Not an output: Snakemake deletes the outputs of a job that it starts again.
        checkpoints=lambda wildcards: f"{RUNS}/checkpoints/{wildcards.run}{wildcards.attempt}",
    script:
        "../scripts/train.py"
