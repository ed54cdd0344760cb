"""How near each operator comes to what its device can do.

Reads the view `roofline`. Per device and operator: achieved TFLOP/s under the measured ceilings of
matmul and memory copy, and the same as a share of the roofline at that shape.
"""

import math

import altair as alt
import duckdb

from tnp.figures import data, theme
from tnp.figures.data import Row

PANEL_WIDTH, PANEL_HEIGHT = 480, 290  # px
SLOT_HEIGHT = 15  # px, per implementation of a shape
MOST_SHAPES = 24  # of an operator; of more, those of the neural process alone
CLOSE_DECADES = 1.0  # of intensity: shapes nearer to each other would overprint
PASSES = ("forward", "backward")
SHAPE_LABEL = {"fontSize": 12, "color": theme.MUTED}

QUERY = """
    select *
    from roofline
    where not is_ceiling(op)
    qualify batch is not null or count(distinct shape) over (partition by device, op) <= $most
    order by
        sum(flops) over (partition by op) desc nulls last, op, intensity, shape, pass, role,
        implementation
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


def chart(connection: duckdb.DuckDBPyConnection) -> alt.TopLevelMixin:
    """Log-log roofline per pass above the shares of it, shape by shape."""
    rows = data.query(connection, QUERY, most=MOST_SHAPES)
    if not rows:
        return theme.no_rows(
            "no operator has been timed", "snakemake --cores 1 all    # on a GPU host"
        )
    devices = data.devices(connection, "roofline")
    colors = data.variant_colors(connection)
    blocks = []
    for slug, device in devices.items():
        of_device = [row for row in rows if row["device"] == slug]
        for op in dict.fromkeys(row["op"] for row in of_device):
            of_op = [row for row in of_device if row["op"] == op]
            passes = [name for name in PASSES if any(row["pass"] == name for row in of_op)]
            # Where no operations are counted, on a log axis of them there is nothing to draw.
            counted = any(row["tflops"] for row in of_op)
            panels = [_roofline(of_op, name, colors) for name in passes if counted]
            panels += [_shares(of_op, name, colors, titled=not counted) for name in passes]
            title = f"{op} on {device['name']}"
            dtypes = ", ".join(sorted({row["dtype"] for row in of_op}))
            questions = [row["question"] for row in of_op]
            when = data.recorded(connection, "roofline", device, questions)
            measured = data.joined([when, dtypes])
            blocks.append(theme.block(panels, title, measured, len(passes)))
    subtitle = [
        "The roofline is the most that the device can do: the rate of a large matmul (flat line) "
        "or of a memory copy (slope), both measured on it. Intensity: operations per byte, where "
        "each operand passes through memory once.",
        "Medians with cold caches; whiskers: the shortest and the longest run. Lower panels: the "
        "same points as a share of the line above them; where only bytes are counted, of the "
        f"copy. Hollow: {theme.WITHOUT_EVIDENCE}.",
    ]
    # Each operator has implementations of its own: lines as many, and a legend of them.
    panels = theme.stacked(blocks).resolve_scale(color="independent")
    return theme.page(panels, finding(rows, devices), subtitle)


def finding(rows: list[Row], devices: dict[str, Row]) -> str:
    """Who of ours comes nearest to its roofline, and the best peer there: of the operator that is
    drawn first, on the first device.

    A share above 1 says that the ceiling was measured too low, and nothing of the kernel.
    """
    known = [row for row in rows if 0 < (row["share_of_roofline"] or 0) <= 1]
    timed, device = data.of_first(devices, known)
    if not timed:
        return "No operator has both a timing and a measured ceiling"
    timed = [row for row in timed if row["op"] == timed[0]["op"]]
    own = [row for row in timed if row["own"]]
    if not own:
        return _sentence(max(timed, key=lambda row: row["share_of_roofline"]), device)
    best = max(own, key=lambda row: (bool(row["counts"]), row["share_of_roofline"]))
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
        f"{'' if row['counts'] else f' ({theme.WITHOUT_EVIDENCE})'}"
    )


def _outcome(row: Row) -> str:
    """The status, or "not_counted" of a timing that is known not to count."""
    return "not_counted" if row["status"] == "ok" and row["counts"] is False else row["status"]


def _points(rows: list[Row], pass_: str) -> list[Row]:
    return [
        row
        | {
            "low": row["share_low"],
            "high": row["share_high"],
            "label": f"{row['share_of_roofline']:.0%}, {_rate(row)}, {row['implementation']}",
            "counts": row["counts"] is True,
            "evidence": theme.evidence(row["counts"]),
        }
        for row in rows
        if row["pass"] == pass_ and row["share_of_roofline"]
    ]


def _rate(row: Row) -> str:
    """TFLOP/s, or GB/s where no operations are counted."""
    if row["tflops"] is None:
        return f"{theme.number(row['gb_per_s'])} GB/s"
    return f"{theme.number(row['tflops'])} TFLOP/s"


def _roofline(rows: list[Row], pass_: str, colors: alt.Scale) -> alt.TopLevelMixin:
    points = _points(rows, pass_)
    roof = _roof([row for row in rows if row["share_of_roofline"]])
    timed = [row["tflops"] for row in rows if row["tflops"]]
    lowest = min(timed + [point["tflops"] for point in roof], default=1.0)
    highest = max([point["tflops"] for point in roof], default=1.0)
    x_scale = alt.Scale(type="log", nice=False)
    y_scale = alt.Scale(type="log", nice=False, domain=[lowest / 1.5, highest * 2])
    x = alt.X("intensity:Q", scale=x_scale, title="intensity, FLOP/byte")
    x = x.axis(values=[10.0**n for n in range(-3, 8)], format=",")
    y = alt.Y("tflops:Q", scale=y_scale, title="TFLOP/s")
    y = y.axis(values=[m * 10.0**n for n in range(-4, 5) for m in (1, 2, 5)], format=",")
    marks = data.drawing(points).encode(
        x=x, y=y, color=_color(rows, colors), tooltip=_tooltip(rows)
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
        *theme.filled_or_hollow(marks, "point", size=80, opacity=1),
    ).properties(width=PANEL_WIDTH, height=PANEL_HEIGHT, title=alt.Title(pass_, fontSize=14))


def _roof(rows: list[Row]) -> list[Row]:
    """The roofline's corners, beyond the intensities of `rows` by a factor of two."""
    if not rows:
        return []
    compute, copy = rows[0]["ceiling_tflops"], rows[0]["ceiling_gb_per_s"]
    ridge = compute / copy * 1000
    intensities = [row["intensity"] for row in rows]
    ends = [min(*intensities, ridge) / 2, ridge, max(*intensities, ridge) * 2]
    return [{"intensity": end, "tflops": min(compute, end * copy / 1000)} for end in ends]


def _implementations(rows: list[Row], colors: alt.Scale) -> list[str]:
    present = {row["implementation"] for row in rows}
    return [name for name in colors.domain if name in present]


def _color(rows: list[Row], colors: alt.Scale) -> alt.Color:
    """The colours of all variants, with a legend of those drawn."""
    legend = alt.Legend(values=_implementations(rows, colors))
    return alt.Color("implementation:N", scale=colors, legend=legend, title=None)


def _tooltip(rows: list[Row]) -> list[alt.Tooltip]:
    """Without what none of `rows` has: an operator that only moves bytes has no FLOP/s."""
    empty = {name for name in rows[0] if all(row[name] is None for row in rows)}
    return [shown for shown in TOOLTIP if shown.shorthand.split(":")[0] not in empty]


def _shape_labels(points: list[Row]) -> list[Row]:
    """One label on the roofline per intensity: shapes that share one share the label."""
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


def _shares(rows: list[Row], pass_: str, colors: alt.Scale, titled: bool) -> alt.TopLevelMixin:
    points = _points(rows, pass_)
    shapes = list(dict.fromkeys(row["shape"] for row in rows))
    color = _color(rows, colors)
    implementations = _implementations(rows, colors)
    x_scale = alt.Scale(domain=[0, 1.9], nice=False)  # room for labels
    axis = alt.Axis(values=[0, 0.25, 0.5, 0.75, 1], format="%")
    x = alt.X("share_of_roofline:Q", scale=x_scale, axis=axis, title="share of the roofline")
    low, high = (alt.X(f"{end}:Q", scale=x_scale, axis=axis) for end in ("low", "high"))
    lines = {
        "y": alt.Y("shape:N", scale=alt.Scale(domain=shapes, padding=0.1), title=None),
        "yOffset": alt.YOffset("implementation:N", scale=alt.Scale(domain=implementations)),
    }
    base = data.drawing(points).encode(**lines)
    failed = [
        row
        | {
            "text": f"{row['implementation']}: {theme.status_text(_outcome(row))}",
            "reason": row["reason"] or row["why_not"],
        }
        for row in rows
        if row["pass"] == pass_ and _outcome(row) != "ok"
    ]
    return alt.layer(
        base.transform_filter("datum.counts")
        .mark_bar(height=SLOT_HEIGHT - 6, opacity=0.35)
        .encode(x=x, color=color),
        base.mark_rule(strokeWidth=2).encode(x=low, x2="high:Q", color=color),
        *theme.filled_or_hollow(
            base.encode(x=x, color=color, tooltip=_tooltip(rows)), "point", size=60, opacity=1
        ),
        *theme.text(base.encode(x=high, text="label:N"), dx=8),
        *theme.in_place(failed, lines),
    ).properties(
        width=PANEL_WIDTH,
        height=SLOT_HEIGHT * len(implementations) * len(shapes),
        title=alt.Title(pass_ if titled else "", fontSize=14),
    )
