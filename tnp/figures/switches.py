"""Marks a step's switches, checkpointing and CUDA graph, in the panels of several figures."""

from collections.abc import Sequence

import altair as alt

from tnp.figures import theme
from tnp.figures.data import Row
from tnp.figures.layout import Layout

# A step's two switches as one mark: order, name and shape.
NAMES = ["neither", "checkpointing", "CUDA graph", "both"]
SHAPES = ["circle", "square", "triangle-right", "diamond"]

MARK_HEIGHT = 18  # px


def name(row: Row) -> str:
    """Returns the name of a row's `checkpoint` and `cuda_graph`."""
    return NAMES[bool(row["checkpoint"]) + 2 * bool(row["cuda_graph"])]


def configuration(row: Row) -> str:
    """Returns "separate with checkpointing", or "separate" without a switch."""
    switches = [label for label in NAMES[1:3] if name(row) in (label, "both")]
    return " with ".join([row["variant"], *([" + ".join(switches)] if switches else [])])


def panel_title(row: Row, layout: Layout, notes: Sequence[str] = ()) -> alt.Title:
    """Returns a title: the shape's name over its sizes and `notes`."""
    tasks = "1 task" if row["batch"] == 1 else f"{row['batch']} tasks"
    sizes = f"{tasks} of {row['n_context']:,} context and {row['n_target']:,} target points"
    return layout.title(row["shape"], [sizes, *notes])


def shape_encoding() -> alt.Shape:
    """Encodes switches as the shape of a mark, with a legend that all panels share."""
    return alt.Shape("switch:N", scale=alt.Scale(domain=NAMES, range=SHAPES), title=None).legend(
        symbolOpacity=1
    )


def failures(rows: Sequence[Row], drawn: set[str], y: alt.Y) -> tuple[list[alt.Chart], list[str]]:
    """Says why configurations have no mark: texts on lines without any mark, and notes.

    `drawn` are the variants with a mark, which get notes. `y` encodes the lines.
    """
    texts: dict[str, Row] = {}
    notes: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: NAMES.index(name(row))):
        if row["status"] == "ok":
            continue
        if row["variant"] in drawn:
            which = configuration(row)
            if name(row) == NAMES[0]:
                which += " without checkpointing or graph"
            notes.setdefault(theme.status_text(row["status"]), []).append(which)
        elif row["variant"] not in texts:
            texts[row["variant"]] = {
                "variant": row["variant"],
                "text": theme.status_text(row["status"]),
                "reason": theme.one_line(row["reason"] or row["why_not"]),
            }
    said = [f"Not drawn ({why}): {'; '.join(names)}." for why, names in notes.items()]
    return theme.in_place(list(texts.values()), {"y": y}), said
