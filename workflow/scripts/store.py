"""Builds the DuckDB file from every Parquet file."""

from pathlib import Path

from tnp.store import build_database
from workflow.jobs import job

tables, views = map(list, (snakemake.input.tables, snakemake.input.views))

with job("store", snakemake.log[0]) as say:
    build_database(
        [Path(file) for file in tables], Path(views[0]).parent, Path(snakemake.output[0])
    )
    say(f"{len(tables)} files, {len(views)} views in {snakemake.output[0]}")
