"""Every configuration in tables: speedup, time and memory, by checkpointing and CUDA graph.

Reads the view `matrix`. One table per device and shape: a line per variant, a column per
combination of switches, a cell of speedup over step time and peak memory.
"""

import math

import altair as alt
import duckdb

from tnp.figures import data, switches, theme
from tnp.figures.data import Row
from tnp.figures.words import words

TOOLTIP = ["variant:N", "switch:N", "evidence:N", "large:N", "small:N"]
CELL_WIDTH, CELL_HEIGHT = 145, 40  # px
COLUMNS = 1  # tables abreast
COLORS = ["#b58cc4", "#f6f5f6", "#5fb76b"]  # slower, as fast, faster: black text reads on all
EMPTY = "#e4e7eb"

# Column prefix in the view → the combination's name.
COMBINATIONS = dict(
    zip(("plain", "checkpoint", "cuda_graph", "checkpoint_cuda_graph"), switches.NAMES, strict=True)
)

QUERY = """
    select * from matrix order by n_context, n_target, batch desc, shape, variant
"""


def chart(connection: duckdb.DuckDBPyConnection) -> alt.TopLevelMixin:
    """Tables coloured by log₂ of the speedup; grey cells say why there is no number."""
    rows = data.query(connection, QUERY)
    if not rows:
        return theme.no_rows("no training step has been timed", "snakemake --cores 1 all")
    devices = data.devices(connection, "matrix")
    variants = data.variants(connection)
    cells = [cell for row in rows for cell in _cells(row)]
    octaves = max([1, *(math.ceil(abs(cell["log2_speedup"] or 0)) for cell in cells)])
    blocks = []
    for slug, device in devices.items():
        measured = data.steps_measured(connection, "matrix", device)
        of_device = [cell for cell in cells if cell["device"] == slug]
        panels = [_table(of_shape, variants, octaves) for of_shape in switches.panels(of_device)]
        blocks.append(theme.block(panels, device["name"], measured, COLUMNS))
    subtitle = [
        f"Large: speedup of the training step against {words('sdpa_flash')} at the same "
        "shape. Small: median step time and peak memory. Green is faster, purple "
        "slower. Grey has no speedup: never timed, does not count, or no plain step to compare "
        "with.",
        f"Coloured at the edge alone: {theme.WITHOUT_EVIDENCE}. With a thin outline: the shortest "
        "step with evidence. No error bars in a table: the figure speedup has the intervals.",
    ]
    return theme.page(theme.stacked(blocks), finding(cells, devices), subtitle)


def finding(cells: list[Row], devices: dict[str, Row]) -> str:
    """The variant with the shortest step at each shape, on the first device that timed anything."""
    timed, device = data.of_first(devices, [cell for cell in cells if _fastest([cell])])
    if not timed:
        return "No configuration could be timed yet"
    shapes: dict[str, list[str]] = {}
    for of_shape in switches.panels(timed):
        (fastest,) = _fastest(of_shape)
        shapes.setdefault(fastest["variant"], []).append(fastest["shape"])
    winners = [f"{variant} at {theme.listed(names)}" for variant, names in shapes.items()]
    return f"Shortest training step on {device}: {'; '.join(winners)}"


def _fastest(cells: list[Row]) -> list[Row]:
    """The cell with the shortest step, of those with evidence if there are any."""
    timed = [cell for cell in cells if cell["step_ms"] is not None and cell["counts"] is not False]
    return [min(timed, key=lambda cell: (not cell["counts"], cell["step_ms"]))] if timed else []


def _cells(row: Row) -> list[Row]:
    """The wide row of the view as one cell per combination of switches."""
    keys = ("device", "shape", "variant", "batch", "n_context", "n_target")
    cells = []
    for prefix, name in COMBINATIONS.items():
        values = {key: row[f"{prefix}_{key}"] for key in ("step_ms", "speedup", "status", "counts")}
        speedup, memory = values["speedup"], row[f"{prefix}_peak_memory_gib"]
        cells.append(
            {key: row[key] for key in keys}
            | values
            | {
                "switch": name,
                "log2_speedup": math.log2(speedup) if speedup else None,
                "evidence": theme.evidence(values["counts"]),
                "large": theme.times(speedup) if speedup else "",
                "small": _small(values, memory),
            }
        )
    return cells


def _small(values: Row, memory: float | None) -> str:
    """The second line of a cell: time and memory, or why there are none."""
    if values["counts"] is False and values["status"] == "ok":
        return theme.status_text("not_counted")
    if values["step_ms"] is not None:
        time = theme.duration(values["step_ms"])
        return f"{time} · {theme.number(memory)} GiB" if memory else time
    return theme.status_text(values["status"]) if values["status"] else "not run"


def _table(cells: list[Row], variants: list[str], octaves: int) -> alt.TopLevelMixin:
    """Lines and columns of the shape, without those where nothing was run."""
    run = [cell for cell in cells if cell["status"]]
    present = [name for name in variants if any(cell["variant"] == name for cell in run)]
    combinations = [name for name in switches.NAMES if any(cell["switch"] == name for cell in run)]
    cells = [
        cell for cell in cells if cell["variant"] in present and cell["switch"] in combinations
    ]
    timed = [cell for cell in cells if cell["log2_speedup"] is not None]
    x = alt.X("switch:N", scale=alt.Scale(domain=combinations), title=None).axis(
        orient="top", labelAngle=0, labelColor=theme.MUTED, labelLimit=CELL_WIDTH
    )
    y = theme.line("variant:N", present, variants)
    color = alt.Color(
        "log2_speedup:Q",
        scale=alt.Scale(domain=[-octaves, 0, octaves], range=COLORS, interpolate="lab"),
        title="speedup",
        legend=alt.Legend(
            values=list(range(-octaves, octaves + 1)),
            labelExpr="(datum.value < 0 ? '1/' + pow(2, -datum.value) : pow(2, datum.value)) + '×'",
            gradientLength=200,
        ),
    )
    base = data.drawing(timed).encode(x=x, y=y)
    grid = data.drawing(cells).encode(x=x, y=y)
    return alt.layer(
        grid.mark_rect(color=EMPTY, stroke="white", strokeWidth=2).encode(tooltip="small:N"),
        base.transform_filter("datum.counts")
        .mark_rect(stroke="white", strokeWidth=2)
        .encode(color=color, tooltip=TOOLTIP),
        base.transform_filter("!datum.counts").mark_rect(fill="white").encode(tooltip=TOOLTIP),
        base.transform_filter("!datum.counts")
        .mark_rect(filled=False, strokeWidth=4, width=CELL_WIDTH - 8, height=CELL_HEIGHT - 8)
        .encode(color=color, tooltip=TOOLTIP),
        data.drawing(_fastest(cells))
        .mark_rect(filled=False, stroke=theme.INK, strokeWidth=2)
        .encode(x=x, y=y),
        grid.mark_text(dy=-7, fontSize=14, fontWeight="bold").encode(text="large:N"),
        grid.transform_filter("datum.large != ''")
        .mark_text(dy=9, fontSize=11)
        .encode(text="small:N"),
        grid.transform_filter("datum.large == ''")
        .mark_text(fontSize=11, fontStyle="italic", color=theme.MUTED)
        .encode(text="small:N"),
    ).properties(
        width=CELL_WIDTH * len(combinations),
        height=CELL_HEIGHT * len(present),
        title=switches.panel_title(cells[0]),
    )
