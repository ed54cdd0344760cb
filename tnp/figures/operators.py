"""How each operator of ours compares with the fastest of everybody else's, size by size.

Reads the view `operator_speedup`. One panel per device and operator, one line per size, one mark
per pass: of our implementations the fastest at that size.
"""

import altair as alt
import duckdb

from tnp.figures import data, theme
from tnp.figures.data import Row

PANEL_WIDTH = 560  # px
LINE_HEIGHT = 19  # px
COLUMNS = 1
EDGES = 0.5, 4.0  # ratios beyond are drawn at the edge; the tooltip has their number
COLORS = {"faster": "#D55E00", "slower": "#0072B2"}  # by verdict; any other is grey

QUERY = """
    with fastest as (
        select * from operator_speedup
        where own and time_ms is not null
        qualify row_number() over (
            partition by device, op, shape, pass order by time_ms, implementation
        ) = 1
    )

    select * from fastest
    where speedup_best is not null
    order by device, op, shape, pass desc
"""

TOOLTIP = [
    alt.Tooltip("line:N", title="size"),
    alt.Tooltip("implementation:N"),
    alt.Tooltip("pass:N"),
    alt.Tooltip("speedup_best:Q", format=".3f", title="times as fast as the best peer"),
    alt.Tooltip("speedup_best_low:Q", format=".3f", title="95% low"),
    alt.Tooltip("speedup_best_high:Q", format=".3f", title="95% high"),
    alt.Tooltip("verdict:N"),
    alt.Tooltip("best_peer_implementation:N", title="best peer"),
    alt.Tooltip("time_ms:Q", format=".4~r", title="ms"),
    alt.Tooltip("share_of_roofline:Q", format=".0%", title="share of the ceiling"),
]


def chart(connection: duckdb.DuckDBPyConnection) -> alt.TopLevelMixin:
    """Ratios of times with their intervals, 1× marked."""
    rows = data.query(connection, QUERY)
    if not rows:
        return theme.no_rows("no operator was timed beside others", "snakemake --cores 1 all")
    for row in rows:
        row["verdict"] = row["verdict_best"] or "none"
        row["color"] = COLORS.get(row["verdict"], theme.MUTED)
        row["line"] = row["shape"].replace("/", ", ").replace("_", " ")
        for name, value in (("shown", ""), ("low", "_low"), ("high", "_high")):
            found = row[f"speedup_best{value}"]
            row[name] = None if found is None else min(max(found, EDGES[0]), EDGES[1])
    labels = list(dict.fromkeys(row["line"] for row in rows))
    blocks = []
    for slug, device in data.devices(connection, "operator_speedup").items():
        of_device = [row for row in rows if row["device"] == slug]
        panels = [
            _panel([row for row in of_device if row["op"] == op], labels)
            for op in dict.fromkeys(row["op"] for row in of_device)
        ]
        if panels:
            said = data.recorded(connection, "roofline", device)
            blocks.append(theme.block(panels, device["name"], said, COLUMNS))
    subtitle = [
        "Time of the fastest implementation that is not ours ÷ time of our fastest, on the same "
        "numbers, in turn in one process: right of the line ours is faster. Circles: forward. "
        "Squares: backward. Bars: 95% interval.",
        "Orange: called faster, blue: called slower, by more than 1% and allowing for how many are "
        "compared. Grey: neither, or no evidence. Beyond 4× a mark stands at the edge. At the "
        "right, the fastest of the others forward.",
    ]
    return theme.page(theme.stacked(blocks), finding(rows), subtitle)


def finding(rows: list[Row]) -> str:
    """How many were called faster and slower, of those with a verdict."""
    verdicts = [row["verdict"] for row in rows if row["verdict"] != "none"]
    if not verdicts:
        return "Operators of ours beside the fastest of everybody else's"
    faster, slower = verdicts.count("faster"), verdicts.count("slower")
    return (
        f"Of {len(verdicts):,} timings of ours beside the fastest of everybody else's, {faster:,} "
        f"are faster and {slower:,} slower"
    )


def _panel(rows: list[Row], labels: list[str]) -> alt.TopLevelMixin:
    lines = list(dict.fromkeys(row["line"] for row in rows))
    scale = alt.Scale(type="log", base=2, domain=EDGES, nice=False)
    x = alt.X("shown:Q", scale=scale, title="× as fast", axis=alt.Axis(values=[0.5, 1, 2, 4]))
    y = alt.Y("line:N", scale=alt.Scale(domain=lines), axis=theme.line_axis(labels), title=None)
    base = data.drawing(rows).encode(y=y)
    color = alt.Color("color:N", scale=None)
    bars = base.mark_rule(strokeWidth=1.5).encode(
        x=alt.X("low:Q", scale=scale), x2="high:Q", color=color
    )
    marks = base.mark_point(filled=True, size=45, opacity=0.9).encode(
        x=x,
        color=color,
        shape=alt.Shape(
            "pass:N",
            scale=alt.Scale(domain=["forward", "backward"], range=["circle", "square"]),
            legend=None,
        ),
        tooltip=TOOLTIP,
    )
    one = alt.Chart().mark_rule(color=theme.INK).encode(x=alt.datum(1, scale=scale))
    first = [row for row in rows if row["pass"] == "forward"]
    peers = (
        data.drawing(first or rows)
        .mark_text(align="left", fontSize=11, color=theme.MUTED)
        .encode(y=y, x=alt.value(PANEL_WIDTH + 14), text="best_peer_implementation:N")
    )
    return alt.layer(one, bars, marks, peers).properties(
        width=PANEL_WIDTH,
        height=LINE_HEIGHT * len(lines),
        title=alt.Title(rows[0]["op"], fontSize=14),
    )
