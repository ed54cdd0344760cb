"""Enters what won on this device in the tuned tables: kernels by its trials, implementations by its
operator benchmarks.
"""

import json
import tempfile
from pathlib import Path

import duckdb

from tnp import choice
from tnp.contract import Problem, Target
from tnp.ops import auto
from tnp.ops.attention import OPERATOR
from tnp.store import build_database
from workflow.jobs import job

trials, ops, views = map(list, (snakemake.input.trials, snakemake.input.ops, snakemake.input.views))

KERNELS = "from tuning where kernel is not null"
IMPLEMENTATIONS = "from operator_choice where capability is not null"


def winners(files: list[str], query: str) -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder, "measured.duckdb")
        build_database([Path(file) for file in files], Path(views[0]).parent, database)
        with duckdb.connect(str(database), read_only=True) as connection:
            return connection.sql(query).to_arrow_table().to_pylist()


def problem(row: dict) -> Problem:
    return OPERATOR.problem(row["dtype"], **{name: row[name] for name in OPERATOR.sizes})


def enter(row: dict, entry: choice.Entry) -> None:
    target = Target("cuda", row["device"], row["capability"])
    choice.write(target, [entry], choice.COMMITTED)


with job("tune", snakemake.log[0]) as say:
    if not trials and not ops:
        say("nothing to do: tuning needs an NVIDIA GPU and shapes in config.yaml's `tuning`")
    if trials:
        rows = winners(trials, KERNELS)
        for row in rows:
            of, config = f"attention.{row['operation']}", json.loads(row["launch_config"])
            enter(row, choice.entry(of, problem(row), row["kernel"], config))
        better = sum(not row["default_stays"] for row in rows)
        say(
            f"{better} of {len(rows)} problems have something better than the default: "
            f"{choice.COMMITTED}"
        )
    if ops:
        rows = winners(ops, IMPLEMENTATIONS)
        entries = [auto.entry_of(row, row["capability"], row["implementation"]) for row in rows]
        auto.write_table([*auto.table(), *entries])
        for row in rows:
            if row["op"] == OPERATOR.name:
                enter(row, choice.entry(OPERATOR.name, problem(row), row["implementation"]))
        say(f"implementations of {len(rows)} operators and shapes: {auto.TABLE}")
