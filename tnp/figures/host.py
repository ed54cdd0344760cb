"""Shows the host's time of whole training steps and of eager calls, beside PyTorch's.

Reads the views `step_host` and `host`. A panel for each device, processor and shape has a line for
each form of a step: a bar of the host's time, and a tick of the time in a loop. A panel for each
device, operator and problem has a bar for each implementation and kind of call. It is in µs of the
host's time while the device waits.
"""

import json

import altair as alt
import duckdb

from tnp.dispatch.spec import OWN
from tnp.figures import data, switches, theme
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

STEPS_EXPLAINED = [
    "Training steps: the bar is the host's time, from the call until it returns on an idle device. "
    "In brackets: that time over the host's time of PyTorch's fastest form without a graph. The "
    "tick is the time of a step in a loop: the device's or the host's, whichever is longer.",
]
CALLS_EXPLAINED = [
    "Calls: the host's time for one call, at sizes where the device waits for the host, without a "
    "CUDA graph. “One of many” is the slope between a chain of calls and a single call: a chain "
    "goes to autograd's thread and back only once.",
]
STEP_TOOLTIP = [
    alt.Tooltip("line:N", title="step"),
    alt.Tooltip("host_ms:Q", format=".4~r", title="host, ms"),
    alt.Tooltip("step_ms:Q", format=".4~r", title="in a loop, ms"),
    alt.Tooltip("over_pytorch:Q", format=".2f", title="host, over PyTorch's"),
    alt.Tooltip("pytorch_variant:N", title="which is"),
    alt.Tooltip("over_graph:Q", format=".2f", title="in a loop, over its graph"),
    alt.Tooltip("n_runs:Q", title="processes"),
]

QUERY = """
    select host.*, coalesce(implementations.provider = 'own', false) as own
    from host
    left join implementations using (op, implementation)
    where with_launches
    order by device, op, problem, implementation
"""


STEPS = """
    select *, false as checkpoint from step_host
    order by device, processor, batch desc, n_context, cuda_graph, role = 'own', role, variant
"""
DEVICES = "(select device from step_host union select device from host where with_launches)"


def chart(connection: duckdb.DuckDBPyConnection, layout: Layout) -> alt.TopLevelMixin:
    """Draws ms of a step, µs of a call, and both as multiples of PyTorch's."""
    steps, calls = data.query(connection, STEPS), data.query(connection, QUERY)
    if not steps and not calls:
        return theme.no_rows(
            "no step and no call was timed on a GPU's host", "snakemake --cores 1 host", layout
        )
    for row in steps:
        row["line"] = switches.configuration(row)
    for row in calls:
        row["line"] = f"{row['implementation']}: {PASSES[row['pass']]}"
    labels = list(dict.fromkeys(row["line"] for row in steps + calls))
    colors = data.variant_colors(connection)
    blocks = []
    for slug, device in data.devices(connection, DEVICES).items():
        for rows, view, panel, place, what in (
            (steps, "step_host", _step_panel, ("processor", "shape"), "training steps"),
            (calls, "host", _call_panel, ("op", "problem"), "single calls of operators"),
        ):
            of_device = [row for row in rows if row["device"] == slug]
            if of_device:
                of_panels = data.grouped(of_device, *place)
                panels = [panel(of_panel, labels, colors, layout) for of_panel in of_panels]
                runs = max(row["n_runs"] for row in of_device)
                noun = "process" if runs == 1 else "processes"
                said = [data.recorded(connection, view, device), f"{runs} {noun} a panel"]
                title = f"{device['name']}: {what}"
                blocks.append(layout.block(panels, title, data.joined(said), COLUMNS))
    subtitle = [
        *(STEPS_EXPLAINED if steps else []),
        *(CALLS_EXPLAINED if calls else []),
        "All steps or calls of a panel took turns in one process.",
    ]
    return theme.page(theme.stacked(blocks), finding(steps, calls), subtitle, layout)


def finding(steps: list[Row], calls: list[Row]) -> str:
    """Compares the host's time of our fastest launched step with PyTorch's, at the first shape.

    Without such a step, it gives the range of the ratios of single calls.
    """
    launched = [row for row in steps if row["role"] == OWN and row["over_pytorch"] is not None]
    launched = [row for row in launched if not row["cuda_graph"]]
    if launched:
        alike = [row for row in launched if row["shape"] == launched[0]["shape"]]
        with_graph = [row for row in alike if row["over_graph"] is not None]
        row = min(with_graph or alike, key=lambda row: row["step_ms"])
        said = (
            f"At {row['shape']} a launched step with {row['variant']} costs the host "
            f"{theme.times(row['over_pytorch'])} the time of {row['pytorch_variant']}"
        )
        if row["over_graph"] is not None:
            said += f", and takes {theme.times(row['over_graph'])} its own time as a CUDA graph"
        return said
    ratios = [row["times_base"] for row in calls if row["own"] and row["times_base"] is not None]
    if not ratios:
        return "Host time of steps and eager calls"
    return (
        f"An eager call of ours takes {min(ratios):.2f} to {max(ratios):.2f} times as much host "
        "time as PyTorch's"
    )


def _step_panel(
    rows: list[Row], labels: list[str], colors: alt.Scale, layout: Layout
) -> alt.TopLevelMixin:
    """Returns a bar for the host's time of each form, and a tick for its time in a loop."""
    lines, first = [row["line"] for row in rows], rows[0]
    y = layout.line("line:N", lines, labels, BAR_HEIGHT)
    timed = [
        row | {"longest": max(row["host_ms"], row["step_ms"]), "label": _step_label(row)}
        for row in rows
        if row["status"] == "ok"
    ]
    failed = [
        {"line": row["line"], "text": theme.status_text(row["status"])}
        | {"reason": theme.one_line(row["reason"])}
        for row in rows
        if row["status"] != "ok"
    ]
    most = max((row["longest"] for row in timed), default=1.0)
    scale = alt.Scale(domain=[0, (2.3 if layout.narrow else 1.6) * most])
    x = {"scale": scale, "title": "ms", "axis": alt.Axis(tickCount=5)}
    layers = theme.in_place(failed, {"y": y}) if failed else []
    if timed:
        base = data.drawing(timed).encode(y=y, tooltip=STEP_TOOLTIP)
        color = alt.Color("variant:N", scale=colors, legend=None)
        bars = base.mark_bar(height=BAR_HEIGHT - 2).encode(x=alt.X("host_ms:Q", **x), color=color)
        ticks = base.mark_tick(height=BAR_HEIGHT + 2, thickness=3, color=theme.INK)
        numbers = base.encode(x=alt.X("longest:Q", **x), text="label:N")
        layers += [bars, ticks.encode(x=alt.X("step_ms:Q", **x)), *theme.text(numbers, dx=6)]
    notes = [", ".join(filter(None, [first["dtype"], _processor(first)]))]
    title = switches.panel_title(first, layout, notes)
    return theme.panel(layers, y, lines, BAR_HEIGHT, PANEL_WIDTH, title, layout)


def _step_label(row: Row) -> str:
    """Returns "host 28.1 ms (2.20×), loop 28.3 ms": the factor is over PyTorch's host time."""
    times = f" ({theme.times(row['over_pytorch'])})" if row["over_pytorch"] is not None else ""
    own = times if row["role"] == OWN and not row["cuda_graph"] else ""
    host, step = theme.duration(row["host_ms"]), theme.duration(row["step_ms"])
    return f"host {host}{own}, loop {step}"


def _processor(row: Row) -> str:
    """Returns the host's processor, and how many cores the process could use."""
    used = row["cpu_count"] if row["cpu_limit"] is None else min(row["cpu_count"], row["cpu_limit"])
    return "" if row["processor"] is None else f"host: {used:g} cores of {row['processor']}"


def _call_panel(
    rows: list[Row], labels: list[str], colors: alt.Scale, layout: Layout
) -> alt.TopLevelMixin:
    """Returns a bar for each implementation and kind of call of one problem."""
    for row in rows:
        ratio = "" if row["times_base"] is None else f" ({row['times_base']:.2f} of PyTorch's)"
        row["label"] = f"{theme.number(row['host_us'])} µs{ratio if row['own'] else ''}"
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
    title = layout.title(theme.sentence(rows[0]["op"]), [sizes(rows[0]["problem"])])
    return theme.panel([bars, numbers], y, lines, BAR_HEIGHT, PANEL_WIDTH, title, layout)


def sizes(problem: str) -> str:
    """Describes a problem's JSON in words."""
    content = json.loads(problem)
    named = {**content["sizes"], **content.get("options", {})}
    return ", ".join(
        [content["dtype"], *(f"{SIZES.get(name, name)} {value}" for name, value in named.items())]
    )
