"""Draws one figure."""

from pathlib import Path

from tnp.figures import render
from workflow.jobs import job

figure = snakemake.wildcards.figure

with job(f"figure {figure}", snakemake.log[0]) as say:
    render(
        figure,
        Path(snakemake.input.database),
        Path(snakemake.output.page),
        Path(snakemake.output.image),
    )
    say(snakemake.output.page)
