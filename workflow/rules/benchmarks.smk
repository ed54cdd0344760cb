"""Benchmarks: one job, and one process of its own, per configuration and replicate.

An operator's configuration is one size with all its implementations, timed in turn.
"""


rule step:
    input:
        gates_of_step,
    output:
        **outputs("step", "{config_id}--r{replicate}{attempt}"),
    log:
        f"{LOGS}/{{config_id}}--r{{replicate}}{{attempt}}.log",
    wildcard_constraints:
        config_id=one_of(STEPS),
        replicate=r"\d+",
    priority: lambda wildcards: PRIORITY.get((wildcards.config_id, int(wildcards.replicate)), 0)
    threads: workflow.cores
    resources:
        gpu=GPUS,
    params:
        kind="step",
        code=lambda wildcards: step_code(wildcards.config_id),
        gates=lambda wildcards: step_gates(STEPS[wildcards.config_id]),
        state=step_state,
        parameters=lambda wildcards: plan.job(
            STEPS, wildcards.config_id, wildcards.replicate
        ),
    script:
        "../scripts/benchmark.py"


rule op:
    input:
        gates_of_op,
    output:
        **outputs("op", "{config_id}--r{replicate}{attempt}"),
    log:
        f"{LOGS}/{{config_id}}--r{{replicate}}{{attempt}}.log",
    wildcard_constraints:
        config_id=one_of(OF_OPERATORS),
        replicate=r"\d+",
    priority: lambda wildcards: PRIORITY.get((wildcards.config_id, int(wildcards.replicate)), 0)
    threads: workflow.cores
    resources:
        gpu=GPUS,
    params:
        kind="op",
        code=lambda wildcards: op_code(wildcards.config_id),
        gates=lambda wildcards: op_gates(OF_OPERATORS[wildcards.config_id]),
        state=op_state,
        parameters=lambda wildcards: plan.job(
            OF_OPERATORS, wildcards.config_id, wildcards.replicate
        ),
    script:
        "../scripts/benchmark.py"


rule host_calls:
    output:
        **outputs("host", "{config_id}--r{replicate}{attempt}"),
    log:
        f"{LOGS}/{{config_id}}--r{{replicate}}{{attempt}}.log",
    wildcard_constraints:
        config_id=one_of(HOST),
        replicate=r"\d+",
    priority: lambda wildcards: PRIORITY.get((wildcards.config_id, int(wildcards.replicate)), 0)
    threads: workflow.cores
    resources:
        gpu=GPUS,
    params:
        code=lambda wildcards: host_code(wildcards.config_id),
        parameters=lambda wildcards: plan.job(
            HOST, wildcards.config_id, wildcards.replicate
        ),
    script:
        "../scripts/host.py"


# What `--config again=NAME` names, once more, and nothing else.
rule again:
    input:
        to_measure_again,
    localrule: True
