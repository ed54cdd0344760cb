"""Training runs: a killed one continues from its last checkpoint."""


rule train:
    input:
        awaited("train", TRAINED),
    output:
        **FILES.outputs("train", TRAINED),
    log:
        f"{LOGS}/{TRAINED}.log",
    wildcard_constraints:
        config_id=one_of(TRAINING),
    threads: CORES_A_GPU
    resources:
        **WHOLE_GPU,
        gpu=GPUS_A_JOB,
    params:
        **params_of("train", TRAINED),
        # This folder is no output: Snakemake deletes the outputs of a job that it starts again.
        checkpoints=f"{RUNS}/checkpoints/{TRAINED}",
    script:
        "../scripts/train.py"
