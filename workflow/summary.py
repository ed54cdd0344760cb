"""Writes the last lines of a finished run."""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from tnp.experiment.failures import TRANSIENT
from tnp.gates import gate
from tnp.store.schemas import TABLES
from workflow.attempts import ATTEMPTS, Attempts, attempt, tried_out

DATABASE = "data/results.duckdb"
QUERY = (
    f"{os.path.relpath(Path(sys.executable).with_name('duckdb'))} -readonly {DATABASE} "
    '"select device, shape, variant, checkpoint, cuda_graph, step_ms, speedup_best, verdict_best '
    'from speedup order by all"'
)


def red_gates(files: Iterable[Path]) -> list[str]:
    """Returns a sentence for each gate in `files` that has a failed check or raised an error.

    A gate that only records a measure has none.
    """
    from tnp.store.files import read_table

    sentences = []
    for file in files:
        rows = read_table(Path(file), "gates").to_pylist()
        harmless = ("unsupported", *TRANSIENT)
        red = [row for row in rows if row["status"] not in harmless and not row["passed"]]
        if red and gate(red[0]["gate"]).blocks:
            first = red[0]
            why = first["reason"] or (
                f"{first['check']}: {first['metric']} {first['value']:.3g}, "
                f"bound {first['bound']:.3g}"
            )
            sentences.append(f"Gate {first['gate']} is red: {why}.")
    return sentences


def not_finished(files: Iterable[Path], targets: Iterable[str]) -> list[str]:
    """Returns sentences that name the jobs that were ended early, and say how to go on.

    Args:
        files: results of jobs, `<table>/<stem>.parquet`. Tables without a `status` are skipped.
        targets: what the workflow was asked for. `all` goes on with what `again` has begun.
    """
    from tnp.store.files import read_table

    said, last, n_waiting = [], [], 0
    for file in files:
        table = file.parent.name
        if "status" not in TABLES[table].names or not file.is_file():
            continue
        rows = read_table(file, table).to_pylist()
        reasons = [row["reason"] for row in rows if row["status"] in TRANSIENT]
        if not reasons:
            continue
        stem = attempt(file).stem
        if table != "gates" and all(reason.startswith("gate ") for reason in reasons):
            n_waiting += 1
            continue
        said.append(f"Not finished: {'gate ' * (table == 'gates')}{stem}: {reasons[-1]}.")
        if tried_out(Attempts(file.parents[1]).of(table, stem)):
            last.append(re.sub(r"--r\d+$", "", stem))
    if n_waiting:
        said.append(f"Jobs that wait for gates which are not finished: {n_waiting}.")
    if said:
        names = sorted({"all" if target == "again" else target for target in targets})
        goes_on = f"snakemake --cores 1 {' '.join(names)}"
        said.append(f"Nothing is wrong with it. It goes on with: {goes_on}")
    if last:
        names = ",".join(dict.fromkeys(last))
        said.append(f"After {ATTEMPTS} attempts: snakemake again --config again={names}")
    return said


def success(drawn: bool) -> str:
    """Returns where the figures are and a query to try, or how to draw if nothing was `drawn`."""
    if not drawn:
        return "To draw what was measured: snakemake --cores 1 figures"
    figures = "  ".join(map(str, sorted(Path("figures").glob("*.html"))))
    lines = [f"Figures: {figures}"] if figures else []
    if Path(DATABASE).exists():
        lines.append(f"Ask the results: {QUERY}")
    return "\n".join(lines)
