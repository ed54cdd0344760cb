"""How far two equal things differ, and how often they would wrongly be called different.

Reads the views `equal_things` and `noise`. One panel per device and operator or step, one mark per
comparison of two copies of one implementation, or of two runs of one training step.
"""

import altair as alt
import duckdb

from tnp.figures import data, theme
from tnp.figures.data import Row

PANEL_WIDTH = 310  # px
COLUMNS = 2  # panels abreast
SLOT_HEIGHT = 10  # px, per comparison, where there are few …
LINE_HEIGHT = 56  # … and of a line with many
FEW = 8  # comparisons: sizes with fewer share a line
MARGIN = 0.01  # what is within 1 % counts as the same
RIGHT, WRONG = "#0072B2", "#D55E00"  # not told apart, as is right; called faster or slower

QUERY = f"""
    with placed as (
        select
            *,
            kind = 'operator' and count(*) over size < {FEW} as shared,
            if(shared, 'several sizes', shape) as place
        from equal_things
        window size as (partition by device, kind, part, shape)
    )

    select
        * replace (if(min(shape) over line = max(shape) over line, shape, place) as place),
        name as variant,
        split_part(part, ' ', 1) as op,
        split_part(part, ' ', 2) as pass,
        row_number() over (line order by ratio) as nth,
        count(*) over (line) as n_of_line,
        coalesce(verdict in ('faster', 'slower'), false) as wrong
    from placed
    window line as (partition by device, kind, part, place, name)
    order by kind desc, part, shared, place, name, ratio
"""

NOISE = "select * from noise"

TOOLTIP = [
    alt.Tooltip("line:N", title="compared with itself"),
    alt.Tooltip("shape:N", title="size"),
    alt.Tooltip("ratio:Q", format=".4f", title="seemed as fast by"),
    alt.Tooltip("low:Q", format=".4f", title="95% low"),
    alt.Tooltip("high:Q", format=".4f", title="95% high"),
    alt.Tooltip("n_pairs:Q", title="pairs"),
    alt.Tooltip("verdict:N"),
]


def chart(connection: duckdb.DuckDBPyConnection) -> alt.TopLevelMixin:
    """Ratios of equal things with their intervals around 1."""
    rows = data.query(connection, QUERY)
    if not rows:
        return theme.no_rows(
            "nothing was timed twice with evidence", "snakemake --cores 1 equal    # on a GPU host"
        )
    for row in rows:
        step = row["kind"] == "step"
        row["line"] = row["variant"] if step else f"{row['variant']}, {row['place']}"
    labels = list(dict.fromkeys(row["line"] for row in rows))
    spreads = {
        (row["device"], row["kind"], row["part"]): row for row in data.query(connection, NOISE)
    }
    bound = max(abs(row[end] - 1) for row in rows for end in ("low", "high"))
    scale = alt.Scale(domain=[1 - 1.05 * bound, 1 + 1.05 * bound], nice=False)
    blocks = []
    for slug, device in data.devices(connection, "equal_things").items():
        of_device = [row for row in rows if row["device"] == slug]
        parts = dict.fromkeys((row["kind"], row["part"]) for row in of_device)
        panels = [
            _panel(
                [row for row in of_device if (row["kind"], row["part"]) == part],
                spreads.get((slug, *part)),
                scale,
                labels,
            )
            for part in parts
        ]
        when = data.recorded(connection, "equal_things", device)
        said = data.joined([when, counted(of_device)])
        blocks.append(theme.block(panels, device["name"], said, COLUMNS))
    subtitle = [
        "Each mark compares two equal things: two copies of one implementation in a job, or two "
        "runs of one training step. The true ratio is 1. Bars: 95% interval, which should contain "
        "1 in at least 93% of the comparisons.",
        "Grey band: within 1% of 1. An orange mark was called faster or slower, which is wrong, "
        "and should be so for at most 1% of them.",
    ]
    return theme.page(theme.stacked(blocks), finding(rows), subtitle)


def finding(rows: list[Row]) -> str:
    """Shares over all devices."""
    return f"Equal things compared: {counted(rows)}"


def counted(rows: list[Row]) -> str:
    """How many comparisons there are, were called different, and have 1 in their interval."""
    n, wrong = len(rows), sum(row["wrong"] for row in rows)
    contain = sum(bool(row["contains_1"]) for row in rows)
    noun = "comparison" if n == 1 else "comparisons"
    return (
        f"{n:,} {noun}, {_share(wrong, n)} called faster or slower, "
        f"{_share(contain, n)} of the intervals contain 1"
    )


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}".replace(".0%", "%")


def _panel(
    rows: list[Row], spread: Row | None, scale: alt.Scale, labels: list[str]
) -> alt.TopLevelMixin:
    first = rows[0]
    if first["kind"] == "step":
        name = f"training step at {first['shape']}"
    else:
        name = f"{first['op']} {first['pass']}"
    of_equals = spread and spread["of_equals"]
    said = [counted(rows).replace(", ", "; ", 1)]
    if of_equals:
        said.append(f"equal things differ by {of_equals:.2%} (root mean square)")
    lines = list(dict.fromkeys(row["line"] for row in rows))
    slots = max(row["n_of_line"] for row in rows)
    # A line with fewer comparisons than others has them at its middle, beside its label.
    rows = [row | {"slot": row["nth"] + (slots - row["n_of_line"]) // 2} for row in rows]
    slot_height = min(SLOT_HEIGHT, LINE_HEIGHT / slots)
    many = f"datum.n_of_line * {SLOT_HEIGHT} > {LINE_HEIGHT}"
    axis = alt.Axis(format=".0%", labelExpr="format(datum.value, '.2f') + '×'", tickCount=5)
    x = alt.X("ratio:Q", scale=scale, axis=axis, title="seemed as fast by")
    base = data.drawing(rows).encode(
        y=theme.line("line:N", lines, labels, padding=0.1),
        yOffset=alt.YOffset("slot:O", scale=alt.Scale(domain=list(range(1, slots + 1)))),
        color=alt.condition("datum.wrong", alt.value(WRONG), alt.value(RIGHT)),
    )
    band = data.drawing([{"from": 1 - MARGIN, "to": 1 + MARGIN}]).mark_rect(color=theme.RULE)
    return alt.layer(
        band.encode(x=alt.X("from:Q", scale=scale, axis=axis), x2="to:Q"),
        data.drawing([{"ratio": 1.0}]).mark_rule(color=theme.INK).encode(x=x),
        base.mark_rule().encode(
            x=alt.X("low:Q", scale=scale, axis=axis),
            x2="high:Q",
            strokeWidth=alt.condition(many, alt.value(slot_height / 6), alt.value(1.5)),
        ),
        base.mark_point(filled=True, opacity=1).encode(
            x=x,
            size=alt.condition(many, alt.value(4.5 * slot_height), alt.value(45)),
            tooltip=TOOLTIP,
        ),
    ).properties(
        width=PANEL_WIDTH,
        height=len(lines) * max(24, slots * slot_height),
        title=alt.Title(name, subtitle=said, fontSize=14, subtitleFontSize=12, offset=8),
    )
