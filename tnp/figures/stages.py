"""Where a training step's time goes.

Reads the view `stage_share`. One panel per device and shape, one stacked bar per configuration.
"""

import altair as alt
import duckdb

from tnp.figures import data, switches, theme
from tnp.figures.data import Row
from tnp.figures.layout import Layout

PANEL_WIDTH = 620  # px
COLUMNS = 1  # panels abreast
BAR_HEIGHT = 20  # px
CHARACTER_WIDTH = 6  # px: a segment that is narrower than its label has none
PALE = alt.value(0.4)
SAME = ("shape", "stage")  # of steps that are compared

# In the order of the step: forward stages in hues, then what follows them.
STAGES = {
    "embedding": "#CC79A7",
    "attention": "#D55E00",
    "MLP": "#E69F00",
    "heads": "#009E73",
    "loss": "#F0E442",
    "backward": "#56B4E9",
    "optimizer": "#B8BFC6",
}

QUERY = """
    select *
    from stage_share
    order by n_context, n_target, batch desc, shape, variant, checkpoint, cuda_graph, stage
"""


def chart(connection: duckdb.DuckDBPyConnection, layout: Layout) -> alt.TopLevelMixin:
    """Stacked bars in ms, each segment with its share of the step."""
    rows = data.query(connection, QUERY)
    if not rows:
        return theme.no_rows("no stage has been timed", "snakemake --cores 1 all", layout)
    devices = data.devices(connection, "stage_share")
    variants = data.variants(connection)
    by_variant = sorted(rows, key=lambda row: variants.index(row["variant"]))  # stable
    lines = list(dict.fromkeys(switches.configuration(row) for row in by_variant))
    blocks = []
    for slug, device in devices.items():
        measured = data.steps_measured(connection, "stage_share", device)
        of_device = [row for row in rows if row["device"] == slug]
        panels = [_panel(of_shape, lines, layout) for of_shape in switches.panels(of_device)]
        blocks.append(layout.block(panels, device["name"], measured, COLUMNS))
    subtitle = [
        "Short steps launched without a CUDA graph, as all steps here were, wait for the host: "
        "where a step takes a few tens of ms, read these as the host's times and not the device's, "
        "and the figure speedup for how long the step takes with a graph.",
        "Median time per stage, in ms: embedding to loss are forward, summed over layers; backward "
        "includes what checkpointing recomputes. Numbers: share of the stages' sum. No error bars: "
        "timed in passes of their own, stages are for proportions. "
        f"Pale: {theme.WITHOUT_EVIDENCE}.",
    ]
    return theme.page(theme.stacked(blocks), finding(rows, devices), subtitle, layout)


def finding(rows: list[Row], devices: dict[str, Row]) -> str:
    """The largest stage in the longest plain baseline step, which waits least for the host, and how
    the same stage of ours compares; or else the largest of the forward pass.
    """
    slug, device = next(iter(devices.items()))
    of_device = [row for row in rows if row["device"] == slug]
    unswitched = [row for row in of_device if not row["checkpoint"] and not row["cuda_graph"]]
    baseline = [row for row in unswitched if row["role"] == "baseline"] or of_device
    longest = max(baseline, key=lambda row: row["time_ms"] / row["share"])["config_id"]
    step = sorted(
        (row for row in baseline if row["config_id"] == longest), key=lambda row: -row["time_ms"]
    )
    first = step[0]
    sentence = (
        f"{theme.sentence(first['stage'])} takes {first['share']:.0%} of a training step of "
        f"{switches.configuration(first)} at {first['shape']} on {device['name']}"
    )
    ours = [
        row
        for row in unswitched
        if row["role"] == "own" and [row[k] for k in SAME] == [first[k] for k in SAME]
    ]
    if ours:
        best = min(ours, key=lambda row: (not row["counts"], row["time_ms"]))
        return (
            f"{sentence}, {theme.duration(first['time_ms'])}; "
            f"of {best['variant']} {best['share']:.0%}, {theme.duration(best['time_ms'])}"
        )
    forward = [row for row in step if row["stage"] not in ("backward", "optimizer")]
    if not forward or forward[0] is first:
        return sentence
    share = forward[0]["time_ms"] / sum(row["time_ms"] for row in forward)
    return f"{sentence}; {forward[0]['stage']} takes {share:.0%} of the forward pass"


def _panel(rows: list[Row], labels: list[str], layout: Layout) -> alt.TopLevelMixin:
    found = {switches.configuration(row) for row in rows}
    lines = [label for label in labels if label in found]
    stages = list(STAGES)
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["config_id"]] = totals.get(row["config_id"], 0.0) + row["time_ms"]
    longest, width = max(totals.values()), layout.width(PANEL_WIDTH)
    segments = [
        row
        | {
            "line": switches.configuration(row),
            "order": stages.index(row["stage"]),
            "label": _label(row, row["time_ms"] / longest * width),
        }
        for row in rows
    ]
    y = layout.line("line:N", lines, labels, BAR_HEIGHT)
    x = alt.X("time_ms:Q", title="ms", stack="zero", scale=alt.Scale(domain=[0, longest]))
    base = data.drawing(segments).encode(
        x=x.axis(tickCount=5),
        y=y,
        order="order:Q",
    )
    color = alt.Color(
        "stage:N", scale=alt.Scale(domain=stages, range=list(STAGES.values())), title=None
    )
    tooltip = [
        alt.Tooltip("line:N", title="configuration"),
        alt.Tooltip("stage:N"),
        alt.Tooltip("time_ms:Q", format=".4~r", title="ms"),
        alt.Tooltip("share:Q", format=".1%"),
    ]
    bars = base.mark_bar(stroke="white", strokeWidth=1).encode(
        color=color, tooltip=tooltip, opacity=alt.condition("datum.counts", alt.value(1), PALE)
    )
    numbers = base.mark_text(fontSize=11, color=theme.INK).encode(
        x=x.bandPosition(0.5), text="label:N", detail="stage:N"
    )
    names = theme.names("line:N", lines, y, BAR_HEIGHT, layout)
    return alt.layer(bars, numbers, *names).properties(
        width=width,
        height=layout.height(len(lines), BAR_HEIGHT),
        title=switches.panel_title(rows[0], layout),
    )


def _label(row: Row, width: float) -> str:
    """The stage and its share, the share alone, or nothing: what `width` has room for."""
    share = f"{row['share']:.0%}"
    texts = (f"{row['stage']} {share}", share)
    return next((text for text in texts if CHARACTER_WIDTH * len(text) + 6 <= width), "")
