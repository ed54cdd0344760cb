"""Panels of one line per variant, with a mark per combination of checkpointing and CUDA graph."""

from collections.abc import Iterator, Sequence

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
    """ "separate with checkpointing", or "separate" where no switch is on."""
    switches = [label for label in NAMES[1:3] if name(row) in (label, "both")]
    return " with ".join([row["variant"], *([" + ".join(switches)] if switches else [])])


def panels(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """Yields the rows of each shape."""
    for shape in dict.fromkeys(row["shape"] for row in rows):
        yield [row for row in rows if row["shape"] == shape]


def panel_title(row: Row, layout: Layout, notes: Sequence[str] = ()) -> alt.Title:
    """Returns the shape's name over its sizes and over `notes`."""
    tasks = "1 task" if row["batch"] == 1 else f"{row['batch']} tasks"
    sizes = f"{tasks} of {row['n_context']:,} context and {row['n_target']:,} target points"
    return layout.title(row["shape"], [sizes, *notes])


def shape_encoding() -> alt.Shape:
    """Mark shape by switches, with the legend that all panels share."""
    return alt.Shape("switch:N", scale=alt.Scale(domain=NAMES, range=SHAPES), title=None).legend(
        symbolOpacity=1
    )


def lines(
    variants: Sequence[str], labels: Sequence[str], layout: Layout
) -> tuple[theme.Encodings, list[alt.Chart]]:
    """Returns a line for each of a panel's variants, and their names where they are not at its
    side.
    """
    y = layout.line("variant:N", variants, labels, MARK_HEIGHT)
    return {"y": y}, theme.names("variant:N", variants, y, MARK_HEIGHT, layout)


def failures(
    rows: Sequence[Row], drawn: set[str], lines: theme.Encodings
) -> tuple[list[alt.Chart], list[str]]:
    """Returns why configurations have no mark: on the lines of variants without any, else as notes.

    `drawn` are the variants with a mark.
    """
    texts: dict[str, Row] = {}
    notes: dict[str, list[str]] = {}
    for row in sorted(rows, key=lambda row: NAMES.index(name(row))):
        if row["status"] == "ok":
            continue
        if row["variant"] in drawn:
            notes.setdefault(theme.status_text(row["status"]), []).append(configuration(row))
        elif row["variant"] not in texts:
            texts[row["variant"]] = {
                "variant": row["variant"],
                "text": theme.status_text(row["status"]),
                "reason": theme.one_line(row["reason"] or row["why_not"]),
            }
    said = [f"Not drawn ({why}): {'; '.join(names)}." for why, names in notes.items()]
    return theme.in_place(list(texts.values()), lines), said
