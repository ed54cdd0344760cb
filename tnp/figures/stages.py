"""Shows where the device time of a training step goes, stage by stage, ours beside PyTorch's best.

Reads the view `stage_share`. A panel for each device and shape has a line for each stage and pass.
Its bars are our fastest step and the fastest other step. Sizes that only ours ran come last.
"""

import altair as alt
import duckdb

from tnp.figures import data, switches, theme
from tnp.figures.data import Row
from tnp.figures.layout import Layout

PANEL_WIDTH = 620  # px
COLUMNS = 1  # panels abreast
BAR_HEIGHT = 13  # px; a line has two bars
PALE = alt.value(0.4)
SIZES = ("shape", "batch", "n_context", "n_target", "dtype")  # of steps that are compared

STAGES = ["embedding", "attention", "MLP", "heads", "loss"]  # in the order of the forward pass
PLACES = [
    *((stage, "forward") for stage in STAGES),
    *((stage, "backward") for stage in reversed(STAGES)),
    ("optimizer", "optimizer"),
    ("other", "forward"),
    ("other", "backward"),
]

QUERY = """
    select *, bool_and(role = 'own') over (partition by device, shape) as ours_alone
    from stage_share
    where fastest
    order by ours_alone, n_context, n_target, batch desc, shape, dtype, role = 'own'
"""


def chart(connection: duckdb.DuckDBPyConnection, layout: Layout) -> alt.TopLevelMixin:
    """Draws bars in ms of device time, two on each line."""
    rows = data.query(connection, QUERY)
    if not rows:
        return theme.no_rows(
            "no stage was timed on a GPU by the profiler", "snakemake --cores 1 all", layout
        )
    for row in rows:
        row["line"] = line(row)
        row["side"] = "ours" if row["role"] == "own" else "others"
        row["label"] = f"{row['variant']} {theme.duration(row['time_ms'])}"
    labels = [line({"stage": stage, "pass": pass_}) for stage, pass_ in PLACES]
    colors = data.variant_colors(connection)
    devices = data.devices(connection, "stage_share")
    blocks = []
    for device, of_device in data.by_device(devices, rows):
        measured = data.steps_measured(connection, "stage_share", device)
        of_all_sizes = data.grouped(of_device, *SIZES)
        panels = [_panel(of_sizes, labels, colors, layout) for of_sizes in of_all_sizes]
        blocks.append(layout.block(panels, device["name"], measured, COLUMNS))
    subtitle = [
        "Device time of a step's kernels and copies, in ms: the median over separate steps under "
        "the profiler. Bars show our fastest step and the fastest other step at each size. Stages "
        "are summed over layers; backward includes recomputation by checkpointing.",
        "“Other” belongs to no stage: casts of weights ahead of the forward pass, copies, sums of "
        "gradients, and kernels that the compiler made of two stages. "
        f"Pale: {theme.WITHOUT_EVIDENCE}.",
    ]
    return theme.page(theme.stacked(blocks), finding(rows, devices), subtitle, layout)


def line(row: Row) -> str:
    """Returns the name of the row's line."""
    return row["stage"] if row["stage"] == row["pass"] else f"{row['stage']} {row['pass']}"


def finding(rows: list[Row], devices: dict[str, Row]) -> str:
    """Names the stage where ours gains most, as a share of PyTorch's step, on the first device.

    Without both kinds of steps, it names the largest stage of any step.
    """
    gains = []
    for device, of_device in data.by_device(devices, rows):
        for of_sizes in data.grouped(of_device, *SIZES):
            theirs = {r["line"]: r for r in of_sizes if r["side"] == "others"}
            total = sum(row["time_ms"] for row in theirs.values())
            gains += [
                ((theirs[own["line"]]["time_ms"] - own["time_ms"]) / total, own, theirs, device)
                for own in of_sizes
                if own["side"] == "ours" and own["line"] in theirs
            ]
        if gains:
            break
    if not gains:
        row = max(rows, key=lambda row: row["share"])
        return (
            f"{theme.sentence(row['line'])} takes {row['share']:.0%} of the device time of a "
            f"training step of {switches.configuration(row)} at {row['shape']} on "
            f"{devices[row['device']]['name']}"
        )
    gain, own, theirs, device = max(gains, key=lambda found: found[0])
    other = theirs[own["line"]]
    if gain <= 0:
        return f"No stage of ours takes less device time than PyTorch's on {device['name']}"
    return (
        f"Beside {other['variant']} ours gains most in {own['line']}, at {own['shape']} on "
        f"{device['name']}: {theme.duration(own['time_ms'])} of device time in place of "
        f"{theme.duration(other['time_ms'])}, {gain:.0%} of that step less"
    )


def _panel(
    rows: list[Row], labels: list[str], colors: alt.Scale, layout: Layout
) -> alt.TopLevelMixin:
    found = {row["line"] for row in rows}
    lines = [label for label in labels if label in found]
    # Room right of the longest bar for its label.
    room = (2.1 if layout.narrow else 1.5) * max(row["time_ms"] for row in rows)
    y = layout.line("line:N", lines, labels, 2 * BAR_HEIGHT)
    base = data.drawing(rows).encode(
        x=alt.X("time_ms:Q", title="ms on the device", axis=alt.Axis(tickCount=5)).scale(
            domain=[0, room]
        ),
        y=y,
        yOffset=alt.YOffset("side:N", scale=alt.Scale(domain=["ours", "others"])),
    )
    bars = base.mark_bar(height=BAR_HEIGHT - 2).encode(
        color=alt.Color("variant:N", scale=colors, legend=None),
        opacity=alt.condition("datum.valid", alt.value(1), PALE),
        tooltip=[
            alt.Tooltip("variant:N"),
            alt.Tooltip("line:N", title="stage"),
            alt.Tooltip("time_ms:Q", format=".4~r", title="ms"),
            alt.Tooltip("share:Q", format=".1%", title="of all stages"),
            alt.Tooltip("n_kernels:Q", title="kernels and copies"),
        ],
    )
    numbers = base.mark_text(align="left", dx=4, fontSize=11, color=theme.INK).encode(
        text="label:N"
    )
    title = switches.panel_title(rows[0], layout, _notes(rows))
    return theme.panel([bars, numbers], y, lines, 2 * BAR_HEIGHT, PANEL_WIDTH, title, layout)


def _notes(rows: list[Row]) -> list[str]:
    """Says for each step of a panel how much of its time kernels take. The rest is gaps."""
    return [
        f"{theme.sentence(switches.configuration(step[0]))}: "
        f"{theme.duration(sum(row['time_ms'] for row in step))} of kernels "
        f"in a step of {theme.duration(step[0]['step_ms'])}."
        for step in data.grouped(rows, "variant", "checkpoint", "cuda_graph")
    ]
