"""Shows how near each operator comes to the limits of its device.

Reads the view `roofline`. For each operator, panels show its rate under the measured ceilings of
matmul and memory copy: TFLOP/s over operations per byte. An operator whose operations are not
counted has GB/s over the bytes that it moves. Panels below show the share of the roofline, a line
for each shape.
"""

import math
from typing import NamedTuple

import altair as alt
import duckdb

from tnp.dispatch.spec import PASSES
from tnp.figures import data, theme
from tnp.figures.data import Row
from tnp.figures.layout import CHARACTER_WIDTH, LABEL_HEIGHT, Layout

PANEL_WIDTH, PANEL_HEIGHT = 410, 260  # px
MARK_HEIGHT = 16  # px
LABEL_ROOM = 1.3  # room for a label right of the axis, as a share of it
MOST_SHAPES = 32  # an operator with more shapes shows only the neural process's
FEW_DECADES = 2.0  # an axis of fewer has numbers between powers of ten
SHAPE_LABEL = {"fontSize": 11, "color": theme.MUTED}
# Place of a label at the roofline → its offset, in px.
LABELS = {"low": {"dy": -10}, "raised": {"dy": -25}, "slope": {"dx": 10, "dy": 6, "align": "left"}}


class Plane(NamedTuple):
    """Names the columns of a rate and of its ceiling, and what it is drawn over."""

    x: str
    x_title: str
    rate: str
    unit: str
    roof: str


OPERATIONS = Plane("intensity", "intensity, FLOP/byte", "tflops", "TFLOP/s", "roofline_tflops")
TRAFFIC = Plane("megabytes", "read and written, MB", "gb_per_s", "GB/s", "ceiling_gb_per_s")

# Kind of a mark → its colour, shape and size.
OURS, OTHER, ELSE = "ours, the fastest there", "the fastest of the others", "all else"
MARKS = {
    OURS: ("#D55E00", "circle", 90),
    OTHER: ("#0072B2", "diamond", 90),
    ELSE: ("#8c959f", "triangle-up", 30),
}

QUERY = """
    select *
    from roofline
    where not is_ceiling(op)
    qualify batch is not null or count(distinct shape) over (partition by device, op) <= $most
    order by
        count(batch) over (partition by op) = 0, sum(flops) over (partition by op) desc nulls last,
        op, intensity, shape, pass, role, implementation
"""

TOOLTIP = [
    alt.Tooltip("evidence:N"),
    alt.Tooltip("implementation:N"),
    alt.Tooltip("shape:N"),
    alt.Tooltip("pass:N"),
    alt.Tooltip("time_ms:Q", format=".4~r", title="median, ms"),
    alt.Tooltip("tflops:Q", format=".3~r", title="TFLOP/s"),
    alt.Tooltip("gb_per_s:Q", format=".4~r", title="GB/s"),
    alt.Tooltip("intensity:Q", format=".3~r", title="FLOP/byte"),
    alt.Tooltip("share_of_roofline:Q", format=".1%"),
    alt.Tooltip("bound:N", title="bound by"),
]


def chart(connection: duckdb.DuckDBPyConnection, layout: Layout) -> alt.TopLevelMixin:
    """Draws a log-log roofline of each operator, and below it the shares by shape."""
    rows = data.query(connection, QUERY, most=MOST_SHAPES)
    if not rows:
        return theme.no_rows(
            "no operator has been timed", "snakemake --cores 1 all    # on a GPU", layout
        )
    devices = data.devices(connection, "roofline")
    blocks = []
    for device, of_device in data.by_device(devices, rows):
        for of_op in data.grouped(of_device, "op"):
            op = of_op[0]["op"]
            passes = [name for name in PASSES if any(row["pass"] == name for row in of_op)]
            # Labels of this operator only: with room for the longest of all, two panels do not fit.
            labels = list(dict.fromkeys(row["shape"] for row in of_op))
            points = {name: _points(of_op, name) for name in passes}
            # An operator without counted operations has nothing on a log axis of operations.
            plane = OPERATIONS if any(row["tflops"] for row in of_op) else TRAFFIC
            shown = passes if any(points.values()) else []
            panels = [_roofline(points[name], name, plane, layout) for name in shown]
            panels += [_shares(of_op, points[name], name, labels, layout) for name in passes]
            title = f"{theme.sentence(op)} on {device['name']}"
            dtypes = ", ".join(sorted({row["dtype"] for row in of_op}))
            keys = [row["comparison_key"] for row in of_op]
            when = data.recorded(connection, "roofline", device, keys)
            blocks.append(layout.block(panels, title, data.joined([when, dtypes]), len(passes)))
    subtitle = [
        "The roofline is the limit of the device: the measured rate of a large matmul or of a "
        "memory copy, whichever binds. Operators that write little are compared with a measured "
        "sum, which only reads. Points are medians with cold caches; whiskers: the shortest and "
        "the longest run. Intensity: operations per byte, if each operand passes through memory "
        "once. Operators whose operations are not counted stand over the bytes that they move.",
        "“All else” are slower implementations, ours and others'; the tooltips name them. Hollow: "
        f"{theme.WITHOUT_EVIDENCE}.",
    ]
    return theme.page(theme.stacked(blocks), finding(rows, devices), subtitle, layout)


def finding(rows: list[Row], devices: dict[str, Row]) -> str:
    """Names our operator nearest to its roofline, and the best peer there.

    It takes the operator that is drawn first, on the first device. A share above 1 only shows that
    the ceiling was measured too low, so it is left out.
    """
    known = [row for row in rows if 0 < (row["share_of_roofline"] or 0) <= 1]
    timed, device = data.of_first(devices, known)
    if not timed:
        return "No operator has both a timing and a measured ceiling"
    timed = [row for row in timed if row["op"] == timed[0]["op"]]
    own = [row for row in timed if row["own"]]
    if not own:
        return _sentence(max(timed, key=lambda row: row["share_of_roofline"]), device)
    best = max(own, key=lambda row: (bool(row["valid"]), row["share_of_roofline"]))
    alike = [best[name] for name in ("op", "pass", "shape")]
    peers = [
        row
        for row in timed
        if not row["own"] and [row[name] for name in ("op", "pass", "shape")] == alike
    ]
    peer = max(peers, key=lambda row: row["share_of_roofline"], default=None)
    reaches = f"; {peer['implementation']} reaches {peer['share_of_roofline']:.0%}" if peer else ""
    return _sentence(best, device) + reaches


def _sentence(row: Row, device: str) -> str:
    return (
        f"{theme.sentence(row['op'])} {row['pass']} of {row['implementation']} reaches "
        f"{row['share_of_roofline']:.0%} of the {device} roofline at {row['shape']}"
        f"{'' if row['valid'] else f' ({theme.WITHOUT_EVIDENCE})'}"
    )


def _outcome(row: Row) -> str:
    """Returns the status, or "not_counted" for a timing known to be invalid."""
    return "not_counted" if row["status"] == "ok" and row["valid"] is False else row["status"]


def _points(rows: list[Row], pass_: str) -> list[Row]:
    """Returns the rows of one pass with a share and the kind of their mark. Ours come last."""
    points = []
    known = [row for row in rows if row["pass"] == pass_ and row["share_of_roofline"]]
    for of_shape in data.grouped(known, "shape"):
        of_shape.sort(key=lambda row: (row["own"], bool(row["valid"]), row["share_of_roofline"]))
        best = {row["own"]: row for row in of_shape}  # the last of each kind
        for row in of_shape:
            kind = ELSE if row is not best[row["own"]] else OURS if row["own"] else OTHER
            evidence = {"valid": row["valid"] is True, "evidence": theme.evidence(row["valid"])}
            size = {"megabytes": row["bytes"] and row["bytes"] / 1e6}
            points.append(row | evidence | size | {"kind": kind})
    return points


def _rate(row: Row) -> str:
    """Returns TFLOP/s, or GB/s if no operations are counted."""
    if row["tflops"] is None:
        return f"{theme.number(row['gb_per_s'])} GB/s"
    return f"{theme.number(row['tflops'])} TFLOP/s"


def _roofline(points: list[Row], pass_: str, plane: Plane, layout: Layout) -> alt.TopLevelMixin:
    points = [point for point in points if point[plane.x] and point[plane.rate]]
    roof, width = _roof(points, plane), layout.plot_width(PANEL_WIDTH)
    rates = [row[plane.rate] for row in [*points, *roof]] or [1.0]
    x_scale = alt.Scale(type="log", nice=False)
    y_scale = alt.Scale(type="log", nice=False, domain=[min(rates) / 1.5, max(rates) * 2])
    x = alt.X(f"{plane.x}:Q", scale=x_scale, title=plane.x_title)
    decades = math.log10(roof[-1][plane.x] / roof[0][plane.x]) if roof else 1.0
    steps = (1, 2, 5) if decades < FEW_DECADES else (1,)
    x = x.axis(values=[m * 10.0**n for n in range(-3, 8) for m in steps], format=",")
    y = alt.Y(f"{plane.rate}:Q", scale=y_scale, title=plane.unit)
    y = y.axis(
        values=[m * 10.0**n for n in range(-4, 5) for m in (1, 2, 5)],
        format=",",
        orient=layout.side,
    )
    line = data.drawing(roof).mark_line(color=theme.INK, strokeWidth=2)
    names = data.drawing(_shape_labels(points, plane, width / decades))
    names = names.encode(x=x, y=y, text="label:N")
    return alt.layer(
        line.encode(x=x, y=y),
        *(
            names.transform_filter(f"datum.place == '{place}'").mark_text(**at, **SHAPE_LABEL)
            for place, at in LABELS.items()
        ),
        *_marks(points, x=x, y=y),
        width=width,
        height=PANEL_HEIGHT,
        title=layout.title(pass_),
    )


def _marks(points: list[Row], **position: alt.X | alt.Y) -> list[alt.Chart]:
    """Encodes colour, shape and size by the kind of a point."""
    colors, shapes, sizes = zip(*MARKS.values(), strict=True)
    kinds = list(MARKS)
    base = data.drawing(points).encode(
        color=alt.Color("kind:N", title=None).scale(domain=kinds, range=colors),
        shape=alt.Shape("kind:N", title=None).scale(domain=kinds, range=shapes),
        size=alt.Size("kind:N", title=None).scale(domain=kinds, range=sizes),
        tooltip=_tooltip(points),
        **position,
    )
    return theme.filled_or_hollow(base, "point", opacity=1)


def _roof(rows: list[Row], plane: Plane) -> list[Row]:
    """Returns the roofline's corners, beyond `rows` on both sides."""
    if not rows:
        return []
    copy = min(row["ceiling_gb_per_s"] for row in rows)
    sizes = [row[plane.x] for row in rows]
    if plane is TRAFFIC:
        return [{plane.x: end, plane.rate: copy} for end in (min(sizes) / 4, max(sizes) * 4)]
    # The lowest roof of several number formats: points of the others lie above it.
    compute = min(row["ceiling_tflops"] for row in rows)
    ridge = compute / copy * 1000
    ends = [min(*sizes, ridge) / 2, ridge, max(*sizes, ridge) * 2]
    return [{plane.x: end, plane.rate: min(compute, end * copy / 1000)} for end in ends]


def _tooltip(rows: list[Row]) -> list[alt.Tooltip]:
    """Leaves out columns that none of `rows` has: a copy has no FLOP/s."""
    empty = {name for row in rows[:1] for name in row if all(row[name] is None for row in rows)}
    return [shown for shown in TOOLTIP if shown.shorthand.split(":")[0] not in empty]


def _shape_labels(points: list[Row], plane: Plane, decade: float) -> list[Row]:
    """Returns a label on the roofline for each column of points, with its shapes.

    A label that would overlap another stands higher. One that overlaps there too is left out: the
    lines below the plane name all shapes. `decade` is the px of a power of ten.
    """
    columns: dict[float, list[Row]] = {}
    for point in points:
        columns.setdefault(round(math.log10(point[plane.x]), 1), []).append(point)
    labels: list[Row] = []
    ends = dict.fromkeys(LABELS, -math.inf)  # px
    for power in sorted(columns):
        point = columns[power][0]
        shapes = list(dict.fromkeys(row["shape"] for row in columns[power]))
        text = ", ".join(shapes) if len(shapes) < 3 else f"{shapes[0]} and {len(shapes) - 1} more"
        width = len(text) * CHARACTER_WIDTH * SHAPE_LABEL["fontSize"]
        flat = plane is TRAFFIC or point["bound"] == "compute"
        start = power * decade - width / 2 if flat else power * decade
        fitting = [place for place in (("low", "raised") if flat else ("slope",))
                   if start > ends[place]]  # fmt: skip
        if fitting:
            ends[fitting[0]] = start + width + SHAPE_LABEL["fontSize"]  # a gap
            at = {plane.x: point[plane.x], plane.rate: point[plane.roof]}
            labels.append(at | {"place": fitting[0], "label": text})
    return labels


def _shares(
    rows: list[Row], points: list[Row], pass_: str, labels: list[str], layout: Layout
) -> alt.TopLevelMixin:
    drawn = list(dict.fromkeys(point["shape"] for point in points))
    title = layout.title(pass_, _not_drawn(rows, pass_), 90)
    if not drawn:
        return theme.nothing("nothing was timed", layout.width(PANEL_WIDTH), title)
    best = [point for point in points if point["kind"] != ELSE]
    highest = max([1.0, *(point["share_high"] or 0 for point in points)])
    room = 0 if layout.narrow else LABEL_ROOM
    scale = alt.Scale(domain=[0, highest * (1 + room)], nice=False)
    axis = alt.Axis(values=[0, 0.25, 0.5, 0.75, 1], format="%")
    x = alt.X("share_of_roofline:Q", scale=scale, axis=axis, title="share of the roofline")
    low = alt.X("share_low:Q", scale=scale, axis=axis)
    y = layout.line("shape:N", drawn, labels, MARK_HEIGHT)
    texts = data.drawing(
        [_label(best, shape, with_rate=not layout.narrow) for shape in drawn]
    ).encode(y=y, text="text:N")
    if layout.narrow:  # beside the line's name
        at = {"dy": -(MARK_HEIGHT + LABEL_HEIGHT) / 2, "align": "right"}
        texts = texts.encode(x=alt.value(layout.width(PANEL_WIDTH)))
    else:
        at = {"dx": 8}
        texts = texts.encode(x=alt.X("share_high:Q", scale=scale, axis=axis))
    spans = data.drawing(best).mark_rule(strokeWidth=2, color=theme.MUTED)
    spans = spans.encode(x=low, x2="share_high:Q", y=y)
    layers = [spans, *_marks(points, x=x, y=y), *theme.text(texts, **at)]
    return theme.panel(layers, y, drawn, MARK_HEIGHT, PANEL_WIDTH, title, layout)


def _label(best: list[Row], shape: str, with_rate: bool) -> Row:
    """Returns the rate of ours at `shape`, and of the fastest other."""
    said = {row["own"]: row for row in best if row["shape"] == shape}
    texts = []
    if ours := said.get(True):
        rate = f", {_rate(ours)}" if with_rate else ""
        texts.append(f"ours {ours['share_of_roofline']:.0%}{rate}")
    if other := said.get(False):
        texts.append(f"{other['implementation']} {other['share_of_roofline']:.0%}")
    end = max(row["share_high"] or row["share_of_roofline"] for row in said.values())
    return {"shape": shape, "share_high": end, "text": "; ".join(texts)}


def _not_drawn(rows: list[Row], pass_: str) -> list[str]:
    """Returns a sentence about implementations that were tried without a valid time."""
    shapes: dict[str, list[str]] = {}
    of_pass = [row for row in rows if row["pass"] == pass_]
    for row in of_pass:
        if _outcome(row) != "ok":
            failed = f"{row['implementation']} ({theme.status_text(_outcome(row))})"
            shapes.setdefault(failed, []).append(row["shape"])
    every = len({row["shape"] for row in of_pass})
    said = [
        failed if len(names) == every else f"{failed} at {theme.listed(names)}"
        for failed, names in shapes.items()
    ]
    return [f"Not drawn: {'; '.join(said)}."] if said else []
