"""Shows what limits each kernel: its shares of the GPU's peaks, counted by Nsight Compute.

Reads the view `profiled_passes`. A panel for each device, operator and problem has a line for each
pass and implementation, with the shares of its dominant kernel.
"""

import altair as alt
import duckdb

from tnp.figures import data, theme
from tnp.figures.data import Row
from tnp.figures.host import sizes
from tnp.figures.layout import Layout

PANEL_WIDTH = 820  # px
COLUMNS = 1
LINE_HEIGHT = 18  # px
TEXT_ROOM = 1.15  # room for text right of the axis, as a share of it

# Column of the view → name, colour and shape of its mark.
MEASURES = {
    "sm_percent": ("SM throughput", "#D55E00", "circle"),
    "dram_percent": ("DRAM throughput", "#0072B2", "diamond"),
    "l2_percent": ("L2 throughput", "#009E73", "square"),
    "occupancy_percent": ("occupancy", "#8c959f", "triangle-up"),
}

QUERY = """
    select * from profiled_passes
    order by device, op, shape, problem, pass = 'backward', own, implementation
"""

TOOLTIP = [
    alt.Tooltip("line:N", title="implementation"),
    alt.Tooltip("kernel:N", title="dominant kernel"),
    alt.Tooltip("dominant:N", title="of the pass's time"),
    alt.Tooltip("measure:N", title="share of the peak of"),
    alt.Tooltip("percent:Q", format=".1f", title="percent"),
    alt.Tooltip("room:N", title="registers and shared memory"),
    alt.Tooltip("waits:N", title="warps wait for"),
]


def chart(connection: duckdb.DuckDBPyConnection, layout: Layout) -> alt.TopLevelMixin:
    """Draws percent of each peak, a line for each pass and implementation."""
    rows = data.query(connection, QUERY)
    if not rows:
        return theme.no_rows("no kernel was profiled", "snakemake --cores 1 profiles", layout)
    for row in rows:
        row["line"] = f"{row['implementation']}: {row['pass']}"
    labels = list(dict.fromkeys(row["line"] for row in rows))
    blocks = []
    for device, of_device in data.by_device(data.devices(connection, "profiled_passes"), rows):
        problems = data.grouped(of_device, "op", "shape", "problem")
        panels = [_panel(of_problem, labels, layout) for of_problem in problems]
        when = data.recorded(connection, "profiled_passes", device)
        blocks.append(layout.block(panels, device["name"], when, COLUMNS))
    subtitle = [
        "Marks show the longest kernel of each pass, in percent of the device's peak. Occupancy: "
        "active warps, in percent of those that an SM can hold. Each line has the time of all "
        "kernels of its pass. It also says what warps of the longest kernel wait for, in percent "
        "of their time between two instructions. The tooltips have the kernel's name.",
        "Nsight Compute runs each kernel alone, several times, with cold caches and unlocked "
        "clocks: these times are no benchmark.",
    ]
    return theme.page(theme.stacked(blocks), finding(rows), subtitle, layout)


def finding(rows: list[Row]) -> str:
    """Names the kernel nearest to a peak: one of ours if any has a profile."""
    known = [row for row in rows if _nearest(row)]
    if not known:
        return "No kernel could be profiled"
    best = max([row for row in known if row["own"]] or known, key=lambda row: _nearest(row)[1])
    column, percent = _nearest(best)
    return (
        f"{theme.sentence(best['op'])} {best['pass']} of {best['implementation']} at "
        f"{best['shape']} reaches {percent:.0f}% of the peak of {MEASURES[column][0]}"
    )


def _nearest(row: Row) -> tuple[str, float] | None:
    """Returns the peak nearest to being reached, without occupancy, and how near in percent."""
    found = {name: row[name] for name in MEASURES if row[name] and name != "occupancy_percent"}
    return max(found.items(), key=lambda one: one[1]) if found else None


def _panel(rows: list[Row], labels: list[str], layout: Layout) -> alt.TopLevelMixin:
    first = rows[0]
    lines = [row["line"] for row in rows]
    room = 0 if layout.narrow else TEXT_ROOM
    scale = alt.Scale(domain=[0, 100 * (1 + room)], nice=False)
    axis = alt.Axis(values=[0, 25, 50, 75, 100], titleAnchor="start")
    y = layout.line("line:N", lines, labels, LINE_HEIGHT)
    marks = [mark for row in rows for mark in _marks(row)]
    x = alt.X("percent:Q", scale=scale, axis=axis, title="percent of the peak")
    layers = [_points(marks, x, y)] if marks else []
    said = [{"line": row["line"], "text": _said(row, layout)} for row in rows if _profiled(row)]
    texts = data.drawing(said).encode(y=y, text="text:N")
    if layout.narrow:
        texts = texts.encode(x=alt.value(layout.width(PANEL_WIDTH)))
        layers += theme.text(texts, dy=-LINE_HEIGHT, align="right")
    else:
        layers += theme.text(texts.encode(x=alt.datum(103, scale=scale)))
    failed = [
        {"line": row["line"], "text": theme.status_text(row["status"]), "reason": row["reason"]}
        for row in rows
        if not _profiled(row)
    ]
    layers += theme.in_place(failed, {"y": y}) if failed else []
    title = f"{theme.sentence(first['op'])} at {first['shape']}"
    title = layout.title(title, [sizes(first["problem"])], 120)
    return theme.panel(layers, y, lines, LINE_HEIGHT, PANEL_WIDTH, title, layout)


def _points(marks: list[Row], x: alt.X, y: alt.Y) -> alt.Chart:
    names, colors, shapes = zip(*MEASURES.values(), strict=True)
    points = data.drawing(marks).mark_point(filled=True, size=70, opacity=1)
    return points.encode(
        x=x,
        y=y,
        color=alt.Color("measure:N", title=None).scale(domain=names, range=colors),
        shape=alt.Shape("measure:N", title=None).scale(domain=names, range=shapes),
        tooltip=TOOLTIP,
    )


def _profiled(row: Row) -> bool:
    return row["status"] == "ok"


def _marks(row: Row) -> list[Row]:
    """Returns a mark for each peak, with the text of its tooltip."""
    about = {"line": row["line"], "kernel": row["kernel"]}
    about["dominant"] = "" if row["dominant_share"] is None else f"{row['dominant_share']:.0%}"
    about["room"] = f"{row['registers']} a thread, {(row['shared_bytes'] or 0) / 1000:.0f} kB"
    about["waits"] = _waits(row) or "not asked"
    return [
        about | {"measure": measure, "percent": row[column]}
        for column, (measure, *_) in MEASURES.items()
        if row[column] is not None
    ]


def _said(row: Row, layout: Layout) -> str:
    """Returns the time of a pass and, if there is room, what its warps wait for."""
    kernels = f"{row['n_kernels']} kernel{'s' if row['n_kernels'] > 1 else ''}"
    time = "" if row["duration_us"] is None else f"{theme.number(row['duration_us'])} µs"
    said = [time] if layout.narrow else [f"{time}, {kernels}" if time else kernels, _waits(row)]
    return "; ".join(filter(None, said))


def _waits(row: Row) -> str:
    """Returns the main reasons to wait; "" for quick sections."""
    return ", ".join(
        f"{row[f'stall_{n}']} {row[f'stall_{n}_percent']:.0f}%"
        for n in (1, 2, 3)
        if row[f"stall_{n}"]
    )
