"""Benchmarks: one job, and one process of its own, per configuration and replicate.

An operator's configuration is one size with all its implementations, timed in turn.
"""


rule step:
    input:
        awaited("step", REPLICATE),
    output:
        **outputs("step", REPLICATE),
    log:
        f"{LOGS}/{REPLICATE}.log",
    wildcard_constraints:
        config_id=one_of(STEPS),
    priority: priority_of
    threads: workflow.cores
    resources:
        gpu=GPUS,
    params:
        **params_of("step"),
        kind="step",
    script:
        "../scripts/benchmark.py"


use rule step as op with:
    input:
        awaited("op", REPLICATE),
    output:
        **outputs("op", REPLICATE),
    wildcard_constraints:
        config_id=one_of(OF_OPERATORS),
    params:
        **params_of("op"),
        kind="op",


use rule step as prediction with:
    input:
        awaited("prediction", REPLICATE),
    output:
        **outputs("prediction", REPLICATE),
    wildcard_constraints:
        config_id=one_of(PREDICTIONS),
    params:
        **params_of("prediction"),
        kind="prediction",


rule host_calls:
    output:
        **outputs("host", REPLICATE),
    log:
        f"{LOGS}/{REPLICATE}.log",
    wildcard_constraints:
        config_id=one_of(HOST),
    priority: priority_of
    threads: workflow.cores
    resources:
        gpu=GPUS,
    params:
        code=lambda wildcards: code("host", wildcards.config_id),
        parameters=lambda wildcards: parameters_of("host", wildcards),
        kind="host",
    script:
        "../scripts/host.py"


use rule host_calls as host_steps with:
    output:
        **outputs("host_step", REPLICATE),
    wildcard_constraints:
        config_id=one_of(HOST_STEPS),
    params:
        code=lambda wildcards: code("host_step", wildcards.config_id),
        parameters=lambda wildcards: parameters_of("host_step", wildcards),
        kind="host_step",


# It times nothing that is compared, so it waits for no gate.
rule profile:
    output:
        **outputs("profile", REPLICATE),
    log:
        f"{LOGS}/{REPLICATE}.log",
    wildcard_constraints:
        config_id=one_of(PROFILES),
    priority: priority_of
    threads: workflow.cores
    resources:
        gpu=GPUS,
    params:
        code=lambda wildcards: code("profile", wildcards.config_id),
        parameters=lambda wildcards: parameters_of("profile", wildcards),
        # For Nsight Compute's own window. Not an output: it is there only where profiling worked.
        reports=f"{RUNS}/ncu/{REPLICATE}",
    script:
        "../scripts/profile.py"


# What `--config again=NAME` names, once more, and nothing else.
rule again:
    input:
        to_measure_again,
    localrule: True
