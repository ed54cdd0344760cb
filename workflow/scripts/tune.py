"""Enters what won on this device in the tuned tables: kernels by its trials, implementations by its
operator benchmarks.
"""

import tempfile
from pathlib import Path

import duckdb

from tnp.ops import auto, tuning
from tnp.store import build_database
from workflow.jobs import job

trials, ops, views = map(list, (snakemake.input.trials, snakemake.input.ops, snakemake.input.views))

# The larger of two problems in one bucket last.
KERNELS = "from tuning where kernel is not null order by 1.0 * batch * n_heads * n_q * n_k"
IMPLEMENTATIONS = "from operator_choice where capability is not null"


def winners(files: list[str], query: str) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder, "measured.duckdb")
        build_database([Path(file) for file in files], Path(views[0]).parent, database)
        with duckdb.connect(str(database), read_only=True) as connection:
            return connection.sql(query).to_arrow_table().to_pylist()


with job("tune", snakemake.log[0]) as say:
    if not trials and not ops:
        say("nothing to do: tuning needs an NVIDIA GPU and shapes in config.yaml's `tuning`")
    if trials:
        rows = winners(trials, KERNELS)
        tuning.write_table([*tuning.table(), *map(tuning.entry_of, rows)])
        better = sum(not row["default_stays"] for row in rows)
        say(
            f"{better} of {len(rows)} problems have something better than the default: "
            f"{tuning.TABLE}"
        )
    if ops:
        rows = winners(ops, IMPLEMENTATIONS)
        entries = [auto.entry_of(row, row["capability"], row["implementation"]) for row in rows]
        auto.write_table([*auto.table(), *entries])
        say(f"implementations of {len(rows)} operators and shapes: {auto.TABLE}")
