"""Builds the store from every row there is, and draws every figure from it."""

import traceback
from pathlib import Path

from tnp.figures import FIGURES, render, render_index
from tnp.store import all_files, build_database
from workflow import sources
from workflow.jobs import job
from workflow.summary import DATABASE

failed = []
with job("results", snakemake.log[0]) as say:
    files, views = all_files(), sources.views()
    build_database(files, Path(views[0]).parent, Path(DATABASE))
    say(f"{len(files)} files, {len(views)} views in {DATABASE}")
    findings = {}
    for figure in FIGURES:
        page = Path("figures", f"{figure}.html")
        try:
            findings[figure] = render(figure, Path(DATABASE), page, page.with_suffix(".svg"))
            say(f"{page}")
        except Exception as error:  # the other figures can do without it
            traceback.print_exc()
            failed.append(f"{page} ({type(error).__name__}: {error})")
    render_index(Path("figures", "index.html"), findings)
    if failed:
        raise RuntimeError(f"not drawn: {', '.join(failed)}")
