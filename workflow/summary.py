"""What a finished run says last."""

from collections.abc import Iterable
from pathlib import Path

DATABASE = "data/results.duckdb"
QUERY = (
    f'duckdb -readonly {DATABASE} "select device, shape, variant, checkpoint, cuda_graph, step_ms, '
    'speedup_best, verdict_best from speedup order by all"'
)


def red_gates(files: Iterable[str]) -> list[str]:
    """One sentence per gate in `files` that has a failed or unfinished check."""
    from tnp.store import read_table

    sentences = []
    for file in files:
        rows = read_table(Path(file), "gates").to_pylist()
        red = [row for row in rows if row["status"] != "unsupported" and not row["passed"]]
        if red:
            first = red[0]
            why = first["reason"] or (
                f"{first['check']}: {first['metric']} {first['value']:.3g}, "
                f"bound {first['bound']:.3g}"
            )
            sentences.append(f"Gate {first['gate']} is red: {why}.")
    return sentences


def success(drawn: bool) -> str:
    """Where to look, and one query to try; what to do next where nothing was `drawn`."""
    if not drawn:
        return "To draw what was measured: snakemake --cores 1 figures"
    figures = "  ".join(map(str, sorted(Path("figures").glob("*.html"))))
    lines = [f"Figures: {figures}"] if figures else []
    if Path(DATABASE).exists():
        lines.append(f"Ask the results: {QUERY}")
    return "\n".join(lines)
