"""Makes the store of the measurements, and draws the figures from it.

Both are made of whatever rows there are, recorded or of this machine, and both are no rule's
output: Snakemake deletes an output before the job that makes it anew, which then may fail, and it
fixes a job's inputs before it knows what will have been measured. Without an output a rule always
runs, so that what was deleted or damaged is there again after it. A file that is asked for alone is
therefore a rule's name: `snakemake --cores 1 figures/speedup.html`.

A report has files that jobs make or read. So the figures that are there already are inputs, which
have no influence on anything else: `snakemake --report report.html figures` after they were drawn.
"""


# This target is all that has to run on the measured machine. What follows can run anywhere.
rule measurements:
    input:
        of_plan,


# Measures nothing.
rule figures:
    input:
        drawn,
    log:
        "data/runs/logs/results.log",
    localrule: True
    script:
        "../scripts/results.py"


FIGURES = [name for names in STORY.values() for name in names]
FIGURE_FILES = [
    f"figures/{name}.{kind}" for name in FIGURES for kind in ("html", "svg")
]

# Each takes all cores, so one at a time builds the database. It is built where rows have changed.
for file in [summary.DATABASE, "figures/index.html", *FIGURE_FILES]:

    rule:
        name:
            file
        input:
            drawn,
        log:
            f"data/runs/logs/{Path(file).name}.log",
        localrule: True
        threads: workflow.cores
        script:
            "../scripts/results.py"
