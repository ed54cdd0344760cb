"""Shows every configuration in tables: speedup, time and memory, by checkpointing and CUDA graph.

Reads the view `matrix`. A table for each device and shape has a line for each variant, and a column
for each combination of switches. A cell has the speedup over step time, peak memory and tokens/s.
Sizes at which PyTorch was not run are left out: figure `memory` has them.
"""

import math
import textwrap

import altair as alt
import duckdb

from tnp.figures import data, switches, theme
from tnp.figures.data import Row
from tnp.figures.layout import Layout
from tnp.figures.words import words

TOOLTIP = ["variant:N", "switch:N", "evidence:N", "large:N", "small:N"]
CELL_WIDTH, CELL_HEIGHT = 145, 58  # px
PHONE_CELL_WIDTH = 79  # px, four side by side; time and memory have separate lines
PHONE_CELL_HEIGHT, PHONE_CHARACTERS = 88, 12  # px and on a line
COLUMNS = 1  # tables abreast
COLORS = ["#b58cc4", "#f6f5f6", "#5fb76b"]  # slower, as fast, faster: black text reads on all
EMPTY = "#e4e7eb"

# Column prefix in the view → the combination's name.
COMBINATIONS = dict(
    zip(("plain", "checkpoint", "cuda_graph", "checkpoint_cuda_graph"), switches.NAMES, strict=True)
)

VALUES = (
    *("step_ms", "tokens_per_s", "speedup", "status", "valid", "fastest", "winner"),
    "why_no_speedup",
)

QUERY = """
    from matrix
    qualify bool_or(role != 'own') over (partition by device, shape)
    order by n_context, n_target, batch desc, shape, variant
"""


def chart(connection: duckdb.DuckDBPyConnection, layout: Layout) -> alt.TopLevelMixin:
    """Draws tables coloured by log₂ of the speedup. Grey cells say why there is no number."""
    rows = data.query(connection, QUERY)
    if not rows:
        return theme.no_rows("no training step has been timed", "snakemake --cores 1 all", layout)
    devices = data.devices(connection, "matrix")
    variants = data.variants(connection)
    cells = [cell for row in rows for cell in _cells(row, layout)]
    octaves = max([1, *(math.ceil(abs(cell["log2_speedup"] or 0)) for cell in cells)])
    blocks = []
    for device, of_device in data.by_device(devices, cells):
        measured = data.steps_measured(connection, "matrix", device)
        of_shapes = data.grouped(of_device, "shape")
        panels = [_table(of_shape, variants, octaves, layout) for of_shape in of_shapes]
        blocks.append(layout.block(panels, device["name"], measured, COLUMNS))
    subtitle = [
        f"Large: speedup of the training step against {words('sdpa_flash')} at the same "
        "shape. Small: median step time, peak memory, and points per second. Green is faster, "
        "purple slower. Empty: nothing was run. Grey has no speedup: it failed, is not valid, or "
        "is not compared with a plain step.",
        f"Only the edge is coloured: {theme.WITHOUT_EVIDENCE}. Outlined: the fastest with "
        "evidence in its number format, and all within 1% of it. The figure speedup has the "
        "intervals.",
        *theme.in_8_bits(rows),
    ]
    return theme.page(theme.stacked(blocks), finding(cells, devices), subtitle, layout)


def finding(cells: list[Row], devices: dict[str, Row]) -> str:
    """Returns the fastest variants of each shape, the winner first, on the first device.

    Steps in 8 bits are not among them.
    """
    wide = [cell for cell in cells if cell["fastest"] and not cell["precision"]]
    fastest, device = data.of_first(devices, wide)
    if not fastest:
        return "No configuration could be timed yet"
    shapes: dict[tuple[str, ...], list[str]] = {}
    for of_shape in data.grouped(fastest, "shape"):
        of_shape.sort(key=lambda cell: (not cell["winner"], cell["variant"]))
        tied = tuple(dict.fromkeys(cell["variant"] for cell in of_shape))
        shapes.setdefault(tied, []).append(of_shape[0]["shape"])
    winners = [f"{theme.listed(tied)} at {theme.listed(names)}" for tied, names in shapes.items()]
    equal = " (named together: equal to within 1%)" if any(len(tied) > 1 for tied in shapes) else ""
    apart = theme.apart_from_8_bits(cells)
    return f"Fastest training step{apart} on {device}: {'; '.join(winners)}{equal}"


def _cells(row: Row, layout: Layout) -> list[Row]:
    """Returns a cell for each combination of switches, from the view's wide row."""
    keys = ("device", "shape", "variant", "batch", "n_context", "n_target", "precision")
    cells = []
    for prefix, name in COMBINATIONS.items():
        values = {key: row[f"{prefix}_{key}"] for key in VALUES}
        speedup = values["speedup"]
        small = _small(values, row[f"{prefix}_peak_memory_gib"])
        cells.append(
            {key: row[key] for key in keys}
            | values
            | {
                "switch": name,
                "log2_speedup": math.log2(speedup) if speedup else None,
                "evidence": theme.evidence(values["valid"]),
                "large": theme.times(speedup) if speedup else "",
                "small": " · ".join(small),
                "lines": _phone_lines(small) if layout.narrow else small,
            }
        )
    return cells


def _small(values: Row, memory: float | None) -> list[str]:
    """Returns the lines under a cell's speedup, or one that says why there is none."""
    if values["valid"] is False and values["status"] == "ok":
        return [theme.status_text("not_counted")]
    if values["step_ms"] is not None:
        held = f" · {theme.number(memory)} GiB" if memory else ""
        rate = values["tokens_per_s"]
        return [theme.duration(values["step_ms"]) + held, *([theme.tokens(rate)] if rate else [])]
    return [theme.status_text(values["status"])] if values["status"] else []


def _phone_lines(texts: list[str]) -> list[str]:
    """Returns lines that are narrow enough for a cell on a phone."""
    parts = (part for text in texts for part in text.split(" · "))
    return [line for part in parts for line in textwrap.wrap(part, PHONE_CHARACTERS)]


def _table(
    cells: list[Row], variants: list[str], octaves: int, layout: Layout
) -> alt.TopLevelMixin:
    """Draws the shape's lines and columns, without those where nothing ran."""
    cells = [cell for cell in cells if cell["status"]]
    present = [name for name in variants if any(cell["variant"] == name for cell in cells)]
    combinations = [name for name in switches.NAMES if any(c["switch"] == name for c in cells)]
    timed = [cell for cell in cells if cell["log2_speedup"] is not None]
    width, height = (
        (PHONE_CELL_WIDTH, PHONE_CELL_HEIGHT) if layout.narrow else (CELL_WIDTH, CELL_HEIGHT)
    )
    x = alt.X("switch:N", scale=alt.Scale(domain=combinations), title=None).axis(
        orient="top", labelAngle=0, labelColor=theme.MUTED, labelLimit=width
    )
    y = layout.line("variant:N", present, variants, height)
    color = alt.Color(
        "log2_speedup:Q",
        scale=alt.Scale(domain=[-octaves, 0, octaves], range=COLORS, interpolate="lab"),
        title="speedup",
        legend=alt.Legend(
            values=list(range(-octaves, octaves + 1)),
            labelExpr="(datum.value < 0 ? '1/' + pow(2, -datum.value) : pow(2, datum.value)) + '×'",
            gradientLength=200,
            columns=5,
        ),
    )
    base = data.drawing(timed).encode(x=x, y=y)
    grid = data.drawing(cells).encode(x=x, y=y)
    without = grid.transform_filter("datum.large == ''")
    small = {"fontSize": 11, "lineHeight": 13, "color": theme.INK}
    return alt.layer(
        without.mark_rect(color=EMPTY, stroke="white", strokeWidth=2).encode(
            tooltip=["small:N", alt.Tooltip("why_no_speedup:N", title="why")]
        ),
        base.transform_filter("datum.valid")
        .mark_rect(stroke="white", strokeWidth=2)
        .encode(color=color, tooltip=TOOLTIP),
        base.transform_filter("!datum.valid").mark_rect(fill="white").encode(tooltip=TOOLTIP),
        base.transform_filter("!datum.valid")
        .mark_rect(filled=False, strokeWidth=4, width=width - 8, height=height - 8)
        .encode(color=color, tooltip=TOOLTIP),
        data.drawing([cell for cell in cells if cell["fastest"]])
        .mark_rect(filled=False, stroke=theme.INK, strokeWidth=2)
        .encode(x=x, y=y),
        grid.mark_text(dy=6 - height / 3, fontSize=14, fontWeight="bold").encode(text="large:N"),
        grid.transform_filter("datum.large != ''")
        .mark_text(dy=-8 if layout.narrow else 5, **small)
        .encode(text="lines:N"),
        without.mark_text(
            dy=-10 if layout.narrow else 0, fontStyle="italic", **small | {"color": theme.MUTED}
        ).encode(text="lines:N"),
        *theme.names(present, y, height, layout),
        width=width * len(combinations),
        height=layout.height(len(present), height),
        title=switches.panel_title(cells[0], layout),
    )
