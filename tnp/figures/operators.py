"""Shows how each of our operators compares with the fastest other implementation, size by size.

Reads the view `operator_speedup`. A panel for each device, operator and study has a line for each
size. A mark for each pass shows our fastest implementation at that size. A study of many sizes is
drawn as a distribution.
"""

import altair as alt
import duckdb

from tnp.figures import data, theme
from tnp.figures.data import Row
from tnp.figures.layout import LABEL_HEIGHT, Layout

PANEL_WIDTH = 220  # px
PEER_ROOM = 140  # px right of a panel, for the peers' names
MARK_HEIGHT = 16  # px
DISTRIBUTION_HEIGHT = 150  # px
COLUMNS = 2  # panels abreast
MOST_SHAPES = 32  # a study of more shapes is drawn as a distribution
EDGES = 0.25, 4.0  # ratios beyond are drawn at the edge; the tooltip has the number
COLORS = {"faster": "#D55E00", "slower": "#0072B2"}  # by verdict; any other is grey

QUERY = """
    with named as (
        select
            *,
            -- The study of a problem, or the first of them.
            min(split_part(config_id, '--', 1)) over (
                partition by device, op, shape, dtype, batch, problem
            ) as study
        from operator_speedup
        where own and time_ms is not null
    ),

    fastest as (
        select * from named
        qualify row_number() over (
            partition by device, op, study, shape, pass order by time_ms, implementation
        ) = 1
    )

    select
        *,
        len(list_distinct(list(shape) over (partition by device, op, study))) > $most
            as distributed,
        cume_dist() over (
            partition by device, op, study, pass order by speedup_best
        ) as share_of_sizes
    from fastest
    where speedup_best is not null
    order by
        device, count(batch) over (partition by op) = 0, count(*) over (partition by op) desc, op,
        study != op, study, shape, pass desc
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
    alt.Tooltip("share_of_roofline:Q", format=".0%", title="share of the measured rate"),
]


def chart(connection: duckdb.DuckDBPyConnection, layout: Layout) -> alt.TopLevelMixin:
    """Draws ratios of times with their intervals, with a line at 1×."""
    rows = data.query(connection, QUERY, most=MOST_SHAPES)
    if not rows:
        return theme.no_rows(
            "no operator was timed beside others", "snakemake --cores 1 all", layout
        )
    for row in rows:
        row["verdict"] = row["verdict_best"] or "none"
        row["color"] = COLORS.get(row["verdict"], theme.MUTED)
        row["line"] = row["shape"].replace("/", ", ")
        for name, value in (("shown", ""), ("low", "_low"), ("high", "_high")):
            found = row[f"speedup_best{value}"]
            row[name] = None if found is None else min(max(found, EDGES[0]), EDGES[1])
    labels = list(dict.fromkeys(row["line"] for row in rows if not row["distributed"]))
    blocks = []
    for device, of_device in data.by_device(data.devices(connection, "operator_speedup"), rows):
        panels = [
            _distribution(of_study, layout)
            if of_study[0]["distributed"]
            else _panel(of_study, labels, layout)
            for of_study in data.grouped(of_device, "op", "study")
        ]
        said = data.recorded(connection, "roofline", device)
        blocks.append(layout.block(panels, device["name"], said, COLUMNS))
    subtitle = [
        "Time of the fastest other implementation ÷ time of our fastest, on the same numbers, in "
        "turn in one process: right of the line ours is faster. Bars: 95% interval. Marks below "
        "0.25× and beyond 4× stand at the edge. Beside each size: the fastest other "
        "implementation, forward.",
        "Orange: faster, blue: slower, by more than 1%, corrected for the number of comparisons. "
        "Grey: neither, or no evidence.",
    ]
    return theme.page(theme.stacked(blocks), finding(rows), subtitle, layout)


def finding(rows: list[Row]) -> str:
    """Counts verdicts of faster and slower."""
    verdicts = [row["verdict"] for row in rows if row["verdict"] != "none"]
    if not verdicts:
        return "Our operators beside the fastest other implementations"
    faster, slower = verdicts.count("faster"), verdicts.count("slower")
    return (
        f"In {len(verdicts):,} comparisons with the fastest other implementation, ours is faster "
        f"in {faster:,} and slower in {slower:,}"
    )


def _panel(rows: list[Row], labels: list[str], layout: Layout) -> alt.TopLevelMixin:
    lines = list(dict.fromkeys(row["line"] for row in rows))
    y = layout.line("line:N", lines, labels, MARK_HEIGHT)
    base = data.drawing(rows).encode(y=y)
    bars = base.mark_rule(strokeWidth=1.5).encode(
        x=alt.X("low:Q", scale=_scale()), x2="high:Q", color=alt.Color("color:N", scale=None)
    )
    first = [row for row in rows if row["pass"] == "forward"]
    peers = data.drawing(first or rows).encode(y=y, text="best_peer_implementation:N")
    peers = peers.encode(x=alt.value(layout.width(PANEL_WIDTH)))
    at = {"dx": 14, "limit": PEER_ROOM - 14}
    if layout.narrow:  # beside the line's name
        at = {"dy": -(MARK_HEIGHT + LABEL_HEIGHT) / 2, "align": "right"}
    layers = [*_marks(base), bars, *theme.text(peers, color=theme.MUTED, **at)]
    title = layout.title(theme.sentence(rows[0]["op"]), [f"study {rows[0]['study']}"])
    return theme.panel(layers, y, lines, MARK_HEIGHT, PANEL_WIDTH, title, layout)


def _distribution(rows: list[Row], layout: Layout) -> alt.TopLevelMixin:
    sizes = len({row["shape"] for row in rows})
    y = alt.Y("share_of_sizes:Q", title="share of sizes").scale(domain=[0, 1])
    base = data.drawing(rows).encode(y=y.axis(format="%", tickCount=5, orient=layout.side))
    return alt.layer(
        *_marks(base),
        width=layout.plot_width(PANEL_WIDTH),
        height=DISTRIBUTION_HEIGHT,
        title=layout.title(
            f"{theme.sentence(rows[0]['op'])}, {sizes} sizes",
            [
                f"study {rows[0]['study']}",
                "Height of a mark: the share of sizes whose ratio is at most that of the mark.",
            ],
        ),
    )


def _marks(base: alt.Chart) -> list[alt.Chart]:
    """Returns the line of equal speed, and on it a mark for each row."""
    axis = alt.Axis(values=[0.25, 0.5, 1, 2, 4], labelExpr="datum.value + '×'", labelFlush=False)
    x = alt.X("shown:Q", scale=_scale(), title="times as fast", axis=axis)
    passes = alt.Scale(domain=["forward", "backward"], range=["circle", "square"])
    return [
        alt.Chart().mark_rule(color=theme.INK).encode(x=alt.datum(1, scale=_scale())),
        base.mark_point(filled=True, size=45, opacity=0.9).encode(
            x=x,
            color=alt.Color("color:N", scale=None),
            shape=alt.Shape("pass:N", scale=passes, title=None),
            tooltip=TOOLTIP,
        ),
    ]


def _scale() -> alt.Scale:
    return alt.Scale(type="log", base=2, domain=EDGES, nice=False)
