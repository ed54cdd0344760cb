"""Correctness gates: what must hold before anything that uses it is timed."""


rule gate:
    output:
        **FILES.outputs(GATE, "{gate}{attempt}"),
    log:
        f"{LOGS}/{{gate}}{{attempt}}.log",
    wildcard_constraints:
        gate=one_of([*GATES, *generic_gates()]),
    priority: GATE_PRIORITY
    threads: lambda wildcards: math.ceil(CORES_A_GPU * gate_shares(wildcards) / GATES_AT_ONCE)
    resources:
        **gpu_shares(gate_shares),
        gpu=GPUS_A_JOB,
    params:
        device=DEVICE,
        slug=SLUG,
        part=part,
        shares=gate_shares,
        timeout_s=CONFIG.timing["timeout_s"],
        # This file is no output: Snakemake deletes the outputs of a job that it starts again.
        unfinished=f"{RUNS}/unfinished/{{gate}}.jsonl",
    script:
        "../scripts/gate.py"
