"""Shows how far two equal things differ, and how often they would wrongly be called different.

Reads the views `equal_things` and `noise`. A panel for each device has a line for each operator's
pass and size of a step. A mark compares two copies of one implementation, or two runs of one
training step.
"""

import altair as alt
import duckdb

from tnp.figures import data, theme
from tnp.figures.data import Row
from tnp.figures.layout import LABEL_HEIGHT, Layout

PANEL_WIDTH = 640  # px
MARK_HEIGHT = 16  # px
MARGIN = 0.01  # times within 1 % are the same
RIGHT, WRONG = "#0072B2", "#D55E00"  # called the same; called faster or slower

QUERY = """
    select
        device,
        kind,
        part,
        shape,
        name as variant,
        n_pairs,
        ratio,
        low,
        high,
        verdict,
        contains_1,
        split_part(part, ' ', 1) as op,
        split_part(part, ' ', 2) as pass,
        coalesce(verdict in ('faster', 'slower'), false) as wrong
    from equal_things
    order by kind desc, part, ratio
"""

NOISE = "select * from noise"

TOOLTIP = [
    alt.Tooltip("line:N", title="compared"),
    alt.Tooltip("variant:N", title="with itself"),
    alt.Tooltip("shape:N", title="size"),
    alt.Tooltip("ratio:Q", format=".4f", title="seemed as fast by"),
    alt.Tooltip("low:Q", format=".4f", title="95% low"),
    alt.Tooltip("high:Q", format=".4f", title="95% high"),
    alt.Tooltip("n_pairs:Q", title="pairs"),
    alt.Tooltip("verdict:N"),
]


def chart(connection: duckdb.DuckDBPyConnection, layout: Layout) -> alt.TopLevelMixin:
    """Draws ratios of equal things around 1."""
    rows = data.query(connection, QUERY)
    if not rows:
        return theme.no_rows(
            "nothing was timed twice with evidence",
            "snakemake --cores 1 equal    # on a GPU",
            layout,
        )
    for row in rows:
        step = row["kind"] == "step"
        row["line"] = f"training step at {row['shape']}" if step else f"{row['op']} {row['pass']}"
    labels = list(dict.fromkeys(row["line"] for row in rows))
    spreads = {
        (row["device"], row["kind"], row["part"]): row["of_equals"]
        for row in data.query(connection, NOISE)
    }
    bound = max(MARGIN, *(abs(row["ratio"] - 1) for row in rows))
    blocks = []
    for device, of_device in data.by_device(data.devices(connection, "equal_things"), rows):
        panel = _panel(of_device, spreads, bound, labels, layout)
        when = data.recorded(connection, "equal_things", device)
        said = data.joined([when, counted(of_device)])
        blocks.append(layout.block([panel], device["name"], said, 1))
    subtitle = [
        "Each mark compares two equal things: two copies of one implementation in a job, or two "
        "runs of one training step. The true ratio is 1. The 95% intervals (in the tooltips) "
        "should contain 1 in at least 93% of the comparisons. Grey band: within 1% of 1. "
        "Numbers: comparisons, and their root mean square distance from 1.",
        "A tall orange mark was wrongly called faster or slower, as at most 1% should be.",
    ]
    return theme.page(theme.stacked(blocks), finding(rows), subtitle, layout)


def finding(rows: list[Row]) -> str:
    """Gives the shares over all devices."""
    return f"Equal things compared: {counted(rows)}"


def counted(rows: list[Row]) -> str:
    """Counts comparisons, those called different, and the intervals that contain 1."""
    n, wrong = len(rows), sum(row["wrong"] for row in rows)
    contain = sum(bool(row["contains_1"]) for row in rows)
    noun = "comparison" if n == 1 else "comparisons"
    return (
        f"of {n:,} {noun} {_share(wrong, n)} called faster or slower, and {_share(contain, n)} "
        "of the 95% intervals contain 1"
    )


def _share(part: int, whole: int) -> str:
    return "none" if not part else f"{part / whole:.1%}".replace(".0%", "%")


def _panel(
    rows: list[Row],
    spreads: dict[tuple[str, str, str], float | None],
    bound: float,
    labels: list[str],
    layout: Layout,
) -> alt.TopLevelMixin:
    lines = {row["line"]: row for row in rows}
    scale = alt.Scale(domain=[1 - 1.05 * bound, 1 + 1.05 * bound], nice=False)
    axis = alt.Axis(labelExpr="format(datum.value, '.2f') + '×'", tickCount=5)
    x = alt.X("ratio:Q", scale=scale, axis=axis, title="seemed as fast by")
    y = layout.line("line:N", list(lines), labels, MARK_HEIGHT)
    width = layout.width(PANEL_WIDTH)
    numbers = [
        {
            "line": line,
            "text": _summary(
                sum(row["line"] == line for row in rows),
                spreads.get((row["device"], row["kind"], row["part"])),
            ),
        }
        for line, row in lines.items()
    ]
    if layout.narrow:  # beside the line's name
        at = {"dy": -(MARK_HEIGHT + LABEL_HEIGHT) / 2, "align": "right"}
    else:
        at = {"dx": 14}
    columns = {shown.shorthand.split(":")[0] for shown in TOOLTIP} | {"wrong"}
    shown = [{name: row[name] for name in columns} for row in rows]
    base = data.drawing(shown).encode(x=x, y=y, tooltip=TOOLTIP)
    band = data.drawing([{"from": 1 - MARGIN, "to": 1 + MARGIN}]).mark_rect(color=theme.RULE)
    layers = [
        band.encode(x=alt.X("from:Q", scale=scale, axis=axis), x2="to:Q"),
        data.drawing([{"ratio": 1.0}]).mark_rule(color=theme.INK).encode(x=x),
        base.transform_filter("!datum.wrong").mark_tick(
            height=MARK_HEIGHT - 6, thickness=1.5, opacity=0.5, color=RIGHT
        ),
        base.transform_filter("datum.wrong").mark_tick(
            height=MARK_HEIGHT + 2, thickness=3, color=WRONG
        ),
        *theme.text(
            data.drawing(numbers).encode(x=alt.value(width), y=y, text="text:N"),
            color=theme.MUTED,
            **at,
        ),
    ]
    return theme.panel(layers, y, list(lines), MARK_HEIGHT, PANEL_WIDTH, None, layout)


def _summary(comparisons: int, of_equals: float | None) -> str:
    """Returns the number of comparisons, and the distance of equal things if known."""
    return f"{comparisons:,}" if of_equals is None else f"{comparisons:,}; {of_equals:.2%} apart"
