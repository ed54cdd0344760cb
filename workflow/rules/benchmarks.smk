"""Benchmarks: one job, and one process of its own, per configuration and replicate.

A rule is made for each kind of job that `workflow/studies` declares. An operator's configuration is
one size with all its implementations, timed in turn.
"""

for study in kinds().values():
    if study.script != "benchmark":
        continue

    rule:
        name:
            study.rule
        input:
            awaited(study.kind, REPLICATE),
        output:
            **FILES.outputs(study.kind, REPLICATE),
        log:
            f"{LOGS}/{REPLICATE}.log",
        wildcard_constraints:
            config_id=one_of(PLAN.jobs[study.kind]),
        priority: priority_of
        threads: CORES_A_GPU
        resources:
            **WHOLE_GPU,
            gpu=GPUS_A_JOB,
        params:
            **params_of(study.kind, REPLICATE),
            kind=study.kind,
        script:
            "../scripts/benchmark.py"


# Measures once more what `--config again=NAME` names, and nothing else.
rule again:
    input:
        to_measure_again,
    localrule: True
