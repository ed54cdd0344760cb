"""Where a training step's time goes.

Reads the view `stage_share`. One panel per device and shape, one stacked bar per configuration.
"""

import altair as alt
import duckdb

from tnp.figures import data, switches, theme
from tnp.figures.data import Row

PANEL_WIDTH = 480  # px
COLUMNS = 1  # panels abreast
BAR_HEIGHT = 26  # px
LABEL_WIDTH = 30  # px: a narrower segment has no room for its percentage
PALE = alt.value(0.4)

# In the order of the step: forward stages in hues, then what follows them.
STAGES = {
    "embed": "#CC79A7",
    "attention": "#D55E00",
    "mlp": "#E69F00",
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


def chart(connection: duckdb.DuckDBPyConnection) -> alt.TopLevelMixin:
    """Stacked bars in ms, each segment with its share of the step."""
    rows = data.query(connection, QUERY)
    if not rows:
        return theme.no_rows("no stage has been timed", "snakemake --cores 1 all")
    devices = data.devices(connection, "stage_share")
    variants = data.variants(connection)
    by_variant = sorted(rows, key=lambda row: variants.index(row["variant"]))  # stable
    lines = list(dict.fromkeys(switches.configuration(row) for row in by_variant))
    blocks = []
    for slug, device in devices.items():
        measured = data.steps_measured(connection, "stage_share", device)
        of_device = [row for row in rows if row["device"] == slug]
        panels = [_panel(of_shape, lines) for of_shape in switches.panels(of_device)]
        blocks.append(theme.block(panels, device["name"], measured, COLUMNS))
    subtitle = [
        "Median time per stage of an eager training step, in ms: embed to loss are forward, summed "
        "over layers; backward includes what checkpointing recomputes.",
        "Numbers: share of the stages' sum. No error bars: timed in passes of their own, stages "
        "are for proportions; the figure speedup has the intervals of whole steps. A short eager "
        "step may wait for the host, which a CUDA graph spares it. "
        f"Pale: {theme.WITHOUT_EVIDENCE}.",
    ]
    return theme.page(theme.stacked(blocks), finding(rows, devices), subtitle)


def finding(rows: list[Row], devices: dict[str, Row]) -> str:
    """The largest stage, and that of the forward pass, in the longest plain baseline step."""
    slug, device = next(iter(devices.items()))
    of_device = [row for row in rows if row["device"] == slug]
    plain = [
        row
        for row in of_device
        if row["role"] == "baseline" and not row["checkpoint"] and not row["cuda_graph"]
    ]
    baseline = plain or of_device
    longest = max(baseline, key=lambda row: row["time_ms"] / row["share"])["config_id"]
    step = sorted(
        (row for row in baseline if row["config_id"] == longest), key=lambda row: -row["time_ms"]
    )
    forward = [row for row in step if row["stage"] not in ("backward", "optimizer")]
    sentence = (
        f"{step[0]['stage'].capitalize()} takes {step[0]['share']:.0%} of a training step of "
        f"{switches.configuration(step[0])} at {step[0]['shape']} on {device['name']}"
    )
    if not forward or forward[0] is step[0]:
        return sentence
    share = forward[0]["time_ms"] / sum(row["time_ms"] for row in forward)
    return f"{sentence}; {forward[0]['stage']} takes {share:.0%} of the forward pass"


def _panel(rows: list[Row], labels: list[str]) -> alt.TopLevelMixin:
    found = {switches.configuration(row) for row in rows}
    lines = [label for label in labels if label in found]
    stages = list(STAGES)
    totals: dict[str, float] = {}
    for row in rows:
        totals[row["config_id"]] = totals.get(row["config_id"], 0.0) + row["time_ms"]
    longest = max(totals.values())
    segments = [
        row
        | {
            "line": switches.configuration(row),
            "order": stages.index(row["stage"]),
            "label": f"{row['share']:.0%}"
            if row["time_ms"] / longest * PANEL_WIDTH >= LABEL_WIDTH
            else "",
        }
        for row in rows
    ]
    x = alt.X("time_ms:Q", title="ms", stack="zero", scale=alt.Scale(domain=[0, longest]))
    base = data.drawing(segments).encode(
        x=x.axis(tickCount=5),
        y=theme.line("line:N", lines, labels),
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
    return alt.layer(bars, numbers).properties(
        width=PANEL_WIDTH, height=BAR_HEIGHT * len(lines), title=switches.panel_title(rows[0])
    )
