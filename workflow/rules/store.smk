"""The store: every measured row, recorded or of this machine, in one DuckDB file."""


# All that has to run on the measured machine; what follows can be done anywhere.
rule measurements:
    input:
        planned_tables(),


rule store:
    input:
        tables=sorted({*planned_tables(), *again_tables(), *existing_tables()}),
        views=sources.views(),
        code=sources.of_store(),
    output:
        "data/results.duckdb",
    log:
        "data/runs/logs/store.log",
    script:
        "../scripts/store.py"
