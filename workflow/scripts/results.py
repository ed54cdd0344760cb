"""Builds the store from every row there is, and draws from it what the rule is named after.

That is every figure, one of them, or the index alone.
"""

import traceback
from pathlib import Path

from tnp.figures import FIGURES, finding, render, render_index
from tnp.store.files import all_files, build_database
from workflow import sources
from workflow.jobs import job
from workflow.summary import DATABASE

asked, everything = snakemake.rule, ("all", "figures")
failed, findings = [], {}
with job("results", snakemake.log[0]) as say:
    files, views = all_files(), sources.views()
    build_database(files, Path(views[0]).parent, Path(DATABASE))
    say(f"{len(files)} files, {len(views)} views in {DATABASE}")
    for figure in FIGURES:
        page, image = (Path("figures", f"{figure}.{kind}") for kind in ("html", "svg"))
        try:
            if asked in (*everything, str(page), str(image)):
                findings[figure] = render(figure, Path(DATABASE), page, image)
                say(f"{page}")
            elif asked == "figures/index.html":
                findings[figure] = finding(figure, Path(DATABASE))
        except Exception as error:  # the other figures can do without it
            traceback.print_exc()
            failed.append(f"{page} ({type(error).__name__}: {error})")
    if asked in (*everything, "figures/index.html"):
        render_index(Path("figures", "index.html"), findings)
        say("figures/index.html")
    if failed:
        raise RuntimeError(f"not drawn: {', '.join(failed)}")
