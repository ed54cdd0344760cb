"""Shows how much memory a training step needs at its peak, in each configuration.

Reads the view `memory`. A panel for each device and shape has a line for each variant, with a mark
for each combination of checkpointing and CUDA graph.
"""

import altair as alt
import duckdb

from tnp.figures import data, switches, theme
from tnp.figures.data import Row
from tnp.figures.layout import Layout

PANEL_WIDTH = 322  # px
COLUMNS = 2  # panels abreast
LABEL_ROOM = 1.25  # axis length over the longest bar, for the number right of it

TOOLTIP = [
    alt.Tooltip("variant:N"),
    alt.Tooltip("switch:N"),
    alt.Tooltip("peak_memory_gib:Q", format=".4~r", title="peak, GiB"),
]

# A step without its optimizer is another configuration, on another line.
NO_OPTIMIZER = " (no optimizer)"
QUERY = """
    select *, bool_and(role = 'own') over (partition by device, shape) as ours_alone
    from memory
    order by
        ours_alone, varies, n_context, n_target, batch desc, shape, variant, checkpoint, cuda_graph
"""


def chart(connection: duckdb.DuckDBPyConnection, layout: Layout) -> alt.TopLevelMixin:
    """Draws bars of peak GiB from zero, with numbers. Failed configurations say why."""
    rows = [
        row
        | {"color": row["variant"]}
        | ({} if row["optimizer"] else {"variant": row["variant"] + NO_OPTIMIZER})
        for row in data.query(connection, QUERY)
    ]
    if not rows:
        return theme.no_rows(
            "no training step has been measured", "snakemake --cores 1 all", layout
        )
    devices = data.devices(connection, "memory")
    named = data.variants(connection)
    found = {row["variant"] for row in rows}
    variants = [line for name in named for line in (name, name + NO_OPTIMIZER) if line in found]
    colors = data.variant_colors(connection)
    blocks = []
    for device, of_device in data.by_device(devices, rows):
        measured = data.steps_measured(connection, "memory", device)
        of_shapes = data.grouped(of_device, "shape")
        panels = [_panel(of_shape, variants, colors, layout) for of_shape in of_shapes]
        blocks.append(layout.block(panels, device["name"], measured, COLUMNS))
    subtitle = [
        "Peak memory of a training step in GiB (2³⁰ bytes), weights and optimizer state included: "
        "bytes in PyTorch's allocator on a GPU, resident bytes of the process on a CPU.",
        "Left numbers: with checkpointing. Right numbers: without. A CUDA graph changes at most a "
        "tenth, and its mark may hide the mark of the step without it. At large, our MLP "
        "recomputes its hidden layer also without checkpointing. Runs allocate equally, so there "
        f"are no error bars. Each shape has its own scale. Hollow: {theme.WITHOUT_EVIDENCE}.",
        *theme.in_8_bits(rows),
    ]
    return theme.page(theme.stacked(blocks), finding(rows, devices), subtitle, layout)


def finding(rows: list[Row], devices: dict[str, Row]) -> str:
    """Compares our smallest step without checkpointing with plain PyTorch's, at its largest shape.

    Steps in 8 bits are left out. Without these two, it says how much checkpointing saves.
    """
    measured, device = data.of_first(devices, [row for row in rows if row["peak_memory_gib"]])
    if not measured:
        return "No configuration ran to its end yet"
    alike = [row for row in measured
             if row["optimizer"] and not row["checkpoint"] and not row["precision"]]  # fmt: skip
    baseline = [row for row in alike if row["role"] == "baseline" and not row["cuda_graph"]]
    most = max(baseline, key=lambda row: row["peak_memory_gib"], default=None)
    own = [row for row in alike if most and row["role"] == "own" and row["shape"] == most["shape"]]
    if own:
        least = min(own, key=lambda row: row["peak_memory_gib"])
        needs = [theme.number(row["peak_memory_gib"]) for row in (least, most)]
        return (
            f"A training step at {most['shape']} on {device} needs {needs[0]} GiB with "
            f"{switches.configuration(least)}, and {needs[1]} GiB with {most['variant']}"
        )
    return _checkpointing_finding(measured, device)


def _checkpointing_finding(measured: list[Row], device: str) -> str:
    plain = {
        (row["shape"], row["variant"]): row["peak_memory_gib"]
        for row in measured
        if switches.name(row) == "neither"
    }
    savings = [
        (plain[row["shape"], row["variant"]], row)
        for row in measured
        if switches.name(row) == "checkpointing" and (row["shape"], row["variant"]) in plain
    ]
    if not savings:
        most = max(measured, key=lambda row: row["peak_memory_gib"])
        return (
            f"A step takes up to {theme.number(most['peak_memory_gib'])} GiB on {device}: "
            f"{switches.configuration(most)} at {most['shape']}"
        )
    before, after = max(savings, key=lambda pair: (pair[0], pair[1]["role"] == "baseline"))
    ratio = before / after["peak_memory_gib"]
    where = f"for {after['variant']} at {after['shape']} on {device}"
    sizes = f"{theme.number(before)} to {theme.number(after['peak_memory_gib'])} GiB"
    if ratio < 1.02:
        return f"Checkpointing saves no memory {where}"
    return f"Checkpointing cuts peak memory {theme.times(ratio)} {where}: {sizes}"


def _panel(
    rows: list[Row], variants: list[str], colors: alt.Scale, layout: Layout
) -> alt.TopLevelMixin:
    measured = [
        row
        | {
            "switch": switches.name(row),
            "label": theme.number(row["peak_memory_gib"]),
            # Memory is valid even if the row's time is not.
            "valid": row["valid"] is not None,
        }
        for row in rows
        if row["peak_memory_gib"]
    ]
    present = {row["variant"] for row in rows}
    lines = [name for name in variants if name in present]
    y = layout.line("variant:N", lines, variants, switches.MARK_HEIGHT)
    in_place, notes = switches.failures(rows, {row["variant"] for row in measured}, y)
    longest = max((row["peak_memory_gib"] for row in measured), default=1.0)
    scale = alt.Scale(domain=[0, longest * LABEL_ROOM], nice=False)
    x = alt.X("peak_memory_gib:Q", scale=scale, title="peak memory, GiB").axis(tickCount=4)
    color = alt.Color("color:N", scale=colors, legend=None)
    # The longest of overlapping bars is visible, and the last of equal marks.
    bars = data.drawing(_most(measured, "variant")).encode(x=x, color=color, y=y)
    marks = data.drawing(measured).encode(x=x, color=color, y=y)
    numbers = data.drawing(_most(measured, "variant", "checkpoint")).encode(
        x=x, text="label:N", y=y
    )
    layers = [
        bars.mark_bar(height=6, opacity=0.35),
        *theme.filled_or_hollow(
            marks.encode(shape=switches.shape_encoding(), tooltip=TOOLTIP),
            "point",
            size=75,
            opacity=1,
        ),
        *theme.text(numbers.transform_filter("!datum.checkpoint"), dx=8),
        *theme.text(numbers.transform_filter("datum.checkpoint"), dx=-8, align="right"),
        *in_place,
    ]
    title = switches.panel_title(rows[0], layout, notes)
    return theme.panel(layers, y, lines, switches.MARK_HEIGHT, PANEL_WIDTH, title, layout)


def _most(rows: list[Row], *columns: str) -> list[Row]:
    """Returns the row with most memory among rows that are equal in `columns`."""
    most: dict[tuple, Row] = {}
    for row in sorted(rows, key=lambda row: row["peak_memory_gib"]):
        most[tuple(row[column] for column in columns)] = row
    return list(most.values())
