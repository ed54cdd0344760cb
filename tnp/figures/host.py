"""What an eager call of each operator costs the host, beside PyTorch's own operator.

Reads the view `host`. One panel per device, operator and problem, one bar per implementation and
kind of call, in microseconds of the host's time while the device waits.
"""

import json

import altair as alt
import duckdb

from tnp.figures import data, theme
from tnp.figures.data import Row
from tnp.figures.layout import Layout
from tnp.figures.words import SIZES

PANEL_WIDTH = 620  # px
COLUMNS = 1
BAR_HEIGHT = 16  # px

PASSES = {
    "forward": "forward",
    "recorded": "forward, recorded by autograd",
    "training": "forward and backward, alone",
    "chain": "forward and backward, one of many",
}

QUERY = """
    select host.*, coalesce(implementations.provider = 'own', false) as own
    from host
    left join implementations using (op, implementation)
    where with_launches
    order by device, op, problem, implementation
"""


def chart(connection: duckdb.DuckDBPyConnection, layout: Layout) -> alt.TopLevelMixin:
    """Microseconds a call, and how many times PyTorch's."""
    rows = data.query(connection, QUERY)
    if not rows:
        return theme.no_rows(
            "no call was timed on a GPU's host", "snakemake --cores 1 host", layout
        )
    for row in rows:
        kind = PASSES[row["pass"]]
        row["line"] = f"{row['implementation']}: {kind}"
        ratio = "" if row["times_base"] is None else f" ({row['times_base']:.2f} of PyTorch's)"
        row["label"] = f"{theme.number(row['host_us'])} µs{ratio if row['own'] else ''}"
    labels = list(dict.fromkeys(row["line"] for row in rows))
    colors = data.variant_colors(connection)
    blocks = []
    for slug, device in data.devices(connection, "host").items():
        of_device = [row for row in rows if row["device"] == slug]
        problems = dict.fromkeys((row["op"], row["problem"]) for row in of_device)
        panels = [
            _panel(
                [r for r in of_device if (r["op"], r["problem"]) == problem], labels, colors, layout
            )
            for problem in problems
        ]
        runs = max(row["n_runs"] for row in of_device)
        said = [
            data.recorded(connection, "host", device),
            f"{runs} process{'es' if runs > 1 else ''} a problem",
        ]
        blocks.append(layout.block(panels, device["name"], data.joined(said), COLUMNS))
    subtitle = [
        "The host's time for one call, launched asynchronously at sizes where the device waits; "
        "no CUDA graph. Implementations took turns in one process.",
        "“One of many” is the slope between a chain of calls and a single one: the way to "
        "autograd's own thread and back is paid once a chain.",
    ]
    return theme.page(theme.stacked(blocks), finding(rows), subtitle, layout)


def finding(rows: list[Row]) -> str:
    """The range of what ours take, in units of PyTorch's."""
    ratios = [row["times_base"] for row in rows if row["own"] and row["times_base"] is not None]
    if not ratios:
        return "What an eager call costs the host"
    low, high = min(ratios), max(ratios)
    return (
        f"An eager call of ours takes the host {low:.2f} to {high:.2f} times what PyTorch's takes"
    )


def _panel(
    rows: list[Row], labels: list[str], colors: alt.Scale, layout: Layout
) -> alt.TopLevelMixin:
    order = list(PASSES)
    rows = sorted(rows, key=lambda row: (order.index(row["pass"]), row["own"]))
    lines = [row["line"] for row in rows]
    longest = max(row["host_us"] for row in rows)
    scale = alt.Scale(domain=[0, (2 if layout.narrow else 1.45) * longest])
    y = layout.line("line:N", lines, labels, BAR_HEIGHT)
    base = data.drawing(rows).encode(
        x=alt.X("host_us:Q", title="µs of the host", scale=scale, axis=alt.Axis(tickCount=5)),
        y=y,
    )
    bars = base.mark_bar(height=BAR_HEIGHT - 2).encode(
        color=alt.Color("implementation:N", scale=colors, legend=None),
        tooltip=[
            alt.Tooltip("line:N", title="call"),
            alt.Tooltip("host_us:Q", format=".4~r", title="µs"),
            alt.Tooltip("times_base:Q", format=".2f", title="of PyTorch's"),
            alt.Tooltip("n_runs:Q", title="processes"),
        ],
    )
    numbers = base.mark_text(align="left", dx=4, fontSize=11, color=theme.INK).encode(
        text="label:N"
    )
    names = theme.names("line:N", lines, y, BAR_HEIGHT, layout)
    return alt.layer(bars, numbers, *names).properties(
        width=layout.width(PANEL_WIDTH),
        height=layout.height(len(lines), BAR_HEIGHT),
        title=layout.title(theme.sentence(rows[0]["op"]), [sizes(rows[0]["problem"])]),
    )


def sizes(problem: str) -> str:
    """A problem's JSON in words."""
    content = json.loads(problem)
    named = {**content["sizes"], **content.get("options", {})}
    return ", ".join(
        [content["dtype"], *(f"{SIZES.get(name, name)} {value}" for name, value in named.items())]
    )
