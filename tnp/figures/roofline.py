"""Shows how near each operator comes to the limits of its device.

Reads the view `roofline`. For the operator with most operations, panels show TFLOP/s under the
measured ceilings of matmul and memory copy. For each operator, panels show the share of its
roofline, a line for each shape.
"""

import math

import altair as alt
import duckdb

from tnp.figures import data, theme
from tnp.figures.data import Row
from tnp.figures.layout import LABEL_HEIGHT, Layout

PANEL_WIDTH, PANEL_HEIGHT = 410, 260  # px
MARK_HEIGHT = 16  # px
LABEL_ROOM = 1.3  # room for a label right of the axis, as a share of it
MOST_SHAPES = 32  # an operator with more shapes shows only the neural process's
CLOSE_DECADES = 1.0  # of intensity; labels that are nearer would overlap
PASSES = ("forward", "backward")
SHAPE_LABEL = {"fontSize": 11, "color": theme.MUTED}

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
    """Draws a log-log roofline of the first operator, then the shares of all operators by shape."""
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
            counted = op == of_device[0]["op"] and any(row["tflops"] for row in of_op)
            panels = [_roofline(points[name], name, layout) for name in passes if counted]
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
        "once.",
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
            points.append(row | evidence | {"kind": kind})
    return points


def _rate(row: Row) -> str:
    """Returns TFLOP/s, or GB/s if no operations are counted."""
    if row["tflops"] is None:
        return f"{theme.number(row['gb_per_s'])} GB/s"
    return f"{theme.number(row['tflops'])} TFLOP/s"


def _roofline(points: list[Row], pass_: str, layout: Layout) -> alt.TopLevelMixin:
    roof = _roof(points)
    timed = [point["tflops"] for point in points if point["tflops"]]
    lowest = min(timed + [corner["tflops"] for corner in roof], default=1.0)
    highest = max([corner["tflops"] for corner in roof], default=1.0)
    x_scale = alt.Scale(type="log", nice=False)
    y_scale = alt.Scale(type="log", nice=False, domain=[lowest / 1.5, highest * 2])
    x = alt.X("intensity:Q", scale=x_scale, title="intensity, FLOP/byte")
    x = x.axis(values=[10.0**n for n in range(-3, 8)], format=",")
    y = alt.Y("tflops:Q", scale=y_scale, title="TFLOP/s")
    y = y.axis(
        values=[m * 10.0**n for n in range(-4, 5) for m in (1, 2, 5)],
        format=",",
        orient=layout.side,
    )
    line = data.drawing(roof).mark_line(color=theme.INK, strokeWidth=2)
    names = data.drawing(_shape_labels(points)).encode(x=x, y=y, text="label:N")
    return alt.layer(
        line.encode(x=x, y=y),
        names.transform_filter("datum.bound == 'compute' && !datum.raised").mark_text(
            dy=-10, **SHAPE_LABEL
        ),
        names.transform_filter("datum.bound == 'compute' && datum.raised").mark_text(
            dy=-25, **SHAPE_LABEL
        ),
        names.transform_filter("datum.bound == 'memory'").mark_text(
            dx=10, dy=6, align="left", **SHAPE_LABEL
        ),
        *_marks(points, x=x, y=y),
        width=layout.plot_width(PANEL_WIDTH),
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


def _roof(rows: list[Row]) -> list[Row]:
    """Returns the roofline's corners, twice beyond the intensities of `rows` on both sides."""
    if not rows:
        return []
    # The lowest roof of several number formats: points of the others lie above it.
    compute = min(row["ceiling_tflops"] for row in rows)
    copy = min(row["ceiling_gb_per_s"] for row in rows)
    ridge = compute / copy * 1000
    intensities = [row["intensity"] for row in rows]
    ends = [min(*intensities, ridge) / 2, ridge, max(*intensities, ridge) * 2]
    return [{"intensity": end, "tflops": min(compute, end * copy / 1000)} for end in ends]


def _tooltip(rows: list[Row]) -> list[alt.Tooltip]:
    """Leaves out columns that none of `rows` has: a copy has no FLOP/s."""
    empty = {name for row in rows[:1] for name in row if all(row[name] is None for row in rows)}
    return [shown for shown in TOOLTIP if shown.shorthand.split(":")[0] not in empty]


def _shape_labels(points: list[Row]) -> list[Row]:
    """Returns one label on the roofline for each intensity, with all its shapes."""
    columns: dict[float, list[Row]] = {}
    for point in points:
        columns.setdefault(round(math.log10(point["intensity"]), 1), []).append(point)
    labels, previous, raised = [], -math.inf, False
    for decade in sorted(columns):  # a label close to the one on its left stands higher
        raised = decade - previous < CLOSE_DECADES and not raised
        previous = decade
        point = columns[decade][0]
        labels.append(
            {
                "intensity": point["intensity"],
                "tflops": point["roofline_tflops"],
                "bound": point["bound"],
                "raised": raised,
                "label": ", ".join(dict.fromkeys(row["shape"] for row in columns[decade])),
            }
        )
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
