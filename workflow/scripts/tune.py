"""Enters the winners of this device's trials in the tuned table."""

import tempfile
from pathlib import Path

import duckdb

from tnp.ops.tuning import TABLE, entry_of, table, write_table
from tnp.store import build_database
from workflow.jobs import job

trials, views = map(list, (snakemake.input.trials, snakemake.input.views))


def winners() -> list[dict]:
    """Of view `tuning`, the larger of two problems in one bucket last."""
    query = "from tuning where kernel is not null order by 1.0 * batch * n_heads * n_q * n_k"
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder, "trials.duckdb")
        build_database([Path(file) for file in trials], Path(views[0]).parent, database)
        with duckdb.connect(str(database), read_only=True) as connection:
            return connection.sql(query).to_arrow_table().to_pylist()


with job("tune", snakemake.log[0]) as say:
    if not trials:
        say("nothing to do: tuning needs an NVIDIA GPU and shapes in config.yaml's `tuning`")
    else:
        rows = winners()
        write_table([*table(), *map(entry_of, rows)])
        better = sum(not row["default_stays"] for row in rows)
        say(f"{better} of {len(rows)} problems have something better than the default: {TABLE}")
