"""What is made of the measurements: the store, and the figures drawn from it.

Both are made of whatever rows there are, recorded or of this machine, and both are no rule's
output: Snakemake deletes an output before the job that makes it anew, which then may fail, and it
fixes a job's inputs before it knows what will have been measured. Without an output a rule always
runs, so that what was deleted or damaged is there again after it. That takes a minute.

A report has files that jobs make or read. So the figures that are there already are inputs, which
have no influence on anything else: `snakemake --report report.html figures` after they were drawn.
"""


localrules:
    figures,


# All that has to run on the measured machine; what follows can be done anywhere.
rule measurements:
    input:
        planned_tables(),
        again_tables(),


# Measures nothing.
rule figures:
    input:
        drawn,
    log:
        "data/runs/logs/results.log",
    script:
        "../scripts/results.py"
