"""A target for each study of config.yaml, by its name, and targets of gates alone.

`snakemake --cores 1 headline` measures study `headline` and what it waits for, nothing else. `gates`
runs every gate of config.yaml, also those that nothing of this device waits for. `compiled` checks
what the compiler says of every kernel for every target.
"""


# Inputs are functions, so that Snakemake reads only the code of requested targets.
rule gates:
    input:
        lambda wildcards: FILES.of_gates(PLAN.gates),


rule compiled:
    input:
        lambda wildcards: FILES.planned(GATE, COMPILED)["gates"],


for study, jobs in PLAN.studies().items():

    rule:
        name:
            study
        input:
            of_jobs(jobs),


for study in ELSEWHERE.keys() - CONFIG.training:

    rule:
        name:
            study
        input:
            nothing_here(study),


# Snakemake takes a name that is no rule for a file to be made. This rule matches each name without a
# folder, and each path in the folders that the workflow writes, if no rule has it as its output.
rule unknown_target:
    input:
        unknown_target,
    output:
        "{target}",
    wildcard_constraints:
        target=rf"[^/]+|(?!{made_by_rules()})(?:data|figures)/.+",
