"""The figures: one chart a module of `tnp.figures`, drawn from the store."""


rule figure:
    input:
        database="data/results.duckdb",
        code=lambda wildcards: sources.of_figure(wildcards.figure),
    output:
        page="figures/{figure}.html",
        image="figures/{figure}.svg",
    log:
        "data/runs/logs/figure--{figure}.log",
    wildcard_constraints:
        figure=one_of(FIGURES),
    script:
        "../scripts/figure.py"
