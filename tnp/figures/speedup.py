"""Shows how much faster each configuration trains than plain PyTorch, and than PyTorch at its best.

Reads the view `speedup`. A panel for each device and shape has a line for each variant, with a mark
for each combination of checkpointing and CUDA graph. The fastest mark of each line has a label.
Sizes at which PyTorch was not run are left out: figure `memory` has them.
"""

import math

import altair as alt
import duckdb

from tnp.figures import data, switches, theme
from tnp.figures.data import Row
from tnp.figures.layout import Layout
from tnp.figures.words import words

PANEL_WIDTH = 310  # px
COLUMNS = 2  # panels abreast
LABEL_ROOM = 0.6  # the label's room, as a power of the span from the lowest to the highest end

PLAIN = words("sdpa_flash")

DASHED = {"strokeDash": [4, 3]}  # the line of PyTorch's fastest

TOOLTIP = [
    alt.Tooltip("variant:N"),
    alt.Tooltip("evidence:N"),
    alt.Tooltip("switch:N"),
    alt.Tooltip("step_ms:Q", format=".4~r", title="median step, ms"),
    alt.Tooltip("tokens_per_s:Q", format=".4~s", title="tokens per second"),
    alt.Tooltip("label:N", title="speedup, and its 95% interval if it has one"),
    alt.Tooltip("speedup_best:Q", format=".3f", title="against PyTorch's fastest"),
]

QUERY = """
    select
        *,
        speedup = max(speedup) over of_variant as best_of_variant,
        speedup_best = max(speedup_best) over of_variant as best_of_variant_over_best
    from speedup
    window of_variant as (partition by device, shape, variant)
    qualify bool_or(role != 'own') over (partition by device, shape)
    order by varies, n_context, n_target, batch desc, shape, variant, checkpoint, cuda_graph
"""


def chart(connection: duckdb.DuckDBPyConnection, layout: Layout) -> alt.TopLevelMixin:
    """Draws speedups on a log₂ axis with intervals. The label of each shape's winner is bold."""
    rows = data.query(connection, QUERY)
    if not rows:
        return theme.no_rows("no training step has been timed", "snakemake --cores 1 all", layout)
    devices = data.devices(connection, "speedup")
    variants = data.variants(connection)
    colors = data.variant_colors(connection)
    blocks = []
    for device, of_device in data.by_device(devices, rows):
        measured = data.steps_measured(connection, "speedup", device)
        panels = _panels(of_device, variants, colors, layout)
        blocks.append(layout.block(panels, device["name"], measured, COLUMNS))
    subtitle = [
        f"Speedup: time of a training step of {PLAIN} (no checkpointing, no CUDA graph) ÷ "
        "that of the configuration, on the same device, shape and dtype. Numbers: each line's "
        "fastest, with the 95% interval if both were timed in one session; bold is the fastest "
        "with evidence in its number format. If several lie within 1% of it, bold is the one with "
        "the surest lead. Dashed line: PyTorch's fastest configuration at that shape.",
        f"Hollow: {theme.WITHOUT_EVIDENCE}, so without an interval and a verdict. Faster or "
        "slower: the interval clears 1× by more than 1%, corrected for the number of comparisons.",
        *theme.in_8_bits(rows),
    ]
    return theme.page(theme.stacked(blocks), finding(rows, devices), subtitle, layout)


def finding(rows: list[Row], devices: dict[str, Row]) -> str:
    """Returns one sentence about the first device with a timed row, without steps in 8 bits."""
    apart = theme.apart_from_8_bits(rows)
    wide = [row for row in rows if row["speedup"] is not None and not row["precision"]]
    timed, device = data.of_first(devices, wide)
    if not timed:
        return "No configuration could be timed yet"
    own = [row for row in timed if row["role"] == "own"]
    leading = [max(of_shape, key=_surest) for of_shape in data.grouped(own, "shape")]
    if len(leading) > 1 and all(row["verdict_best"] == "faster" for row in leading):
        over_best = theme.span([row["speedup_best"] for row in leading])
        over_plain = theme.span([row["speedup"] for row in leading])
        decided = all(row["verdict"] == "faster" for row in leading)
        return (
            f"At all {len(leading)} sizes on {device} our fastest step{apart} trains {over_best} "
            f"as fast as PyTorch's fastest, and {over_plain} as fast as {PLAIN}"
            f"{'' if decided else ' (partly by medians alone)'}"
        )
    if leading:
        best = max(leading, key=_surest)
        sentence = (
            f"{theme.sentence(switches.configuration(best))} trains "
            f"{theme.verdict(best['speedup'], best['verdict'])} {PLAIN} "
            f"at {best['shape']} on {device}"
        )
        if best["speedup_best"] is None:
            return sentence
        against_best = theme.verdict(best["speedup_best"], best["verdict_best"])
        return f"{sentence}; it is {against_best} PyTorch's fastest configuration there"
    best = max(timed, key=lambda row: (bool(row["valid"]), row["speedup"]))
    if best["verdict"] == "faster":
        return (
            f"{theme.sentence(switches.configuration(best))} trains "
            f"{theme.times(best['speedup'])} as fast as {PLAIN} at "
            f"{best['shape']} on {device}; this project's kernels are not timed there"
        )
    return f"No configuration timed on {device} is measurably faster than {PLAIN}"


def _surest(row: Row) -> tuple[bool, bool, float, float]:
    """Returns a sort key: our surest step at a shape has the largest key."""
    return (
        bool(row["valid"]),
        row["leads"],
        row["speedup_best_low"] or 0,
        row["speedup_best"] or row["speedup"],
    )


def _panels(
    rows: list[Row], variants: list[str], colors: alt.Scale, layout: Layout
) -> list[alt.TopLevelMixin]:
    compared = {row["shape"] for row in rows if row["speedup"] is not None}
    rows = [row if row["shape"] in compared else _over_best(row) for row in rows]
    bounds = [row[end] for row in rows for end in ("speedup_low", "speedup_high") if row[end]]
    low, high = min([0.8, *bounds]), max([1.25, *bounds])
    span = high / low
    domain = [low / span**0.06, high * span**LABEL_ROOM]
    return [
        _panel(of_shape, variants, domain, colors, of_shape[0]["shape"] in compared, layout)
        for of_shape in data.grouped(rows, "shape")
    ]


def _panel(
    rows: list[Row],
    variants: list[str],
    domain: list[float],
    colors: alt.Scale,
    over_plain: bool,
    layout: Layout,
) -> alt.TopLevelMixin:
    timed = [
        row
        | {
            "switch": switches.name(row),
            "label": _label(row),
            "evidence": theme.evidence(row["valid"]),
            "speedup_low": row["speedup_low"] or row["speedup"],
            "speedup_high": row["speedup_high"] or row["speedup"],
        }
        for row in rows
        if row["speedup"] is not None
    ]
    without_speedup = [
        row | {"status": _why_not_drawn(row)}
        if row["status"] == "ok" and row["speedup"] is None
        else row
        for row in rows
    ]
    present = {row["variant"] for row in rows}
    lines = [name for name in variants if name in present]
    y = layout.line("variant:N", lines, variants, switches.MARK_HEIGHT)
    in_place, notes = switches.failures(without_speedup, {row["variant"] for row in timed}, y)
    if not over_plain:
        notes.insert(0, _why_over_best(rows))
    scale = alt.Scale(type="log", base=2, domain=domain, nice=False)
    axis = alt.Axis(values=_ticks(*domain), labelExpr="datum.value + '×'")
    over = "" if over_plain else " over PyTorch's fastest"
    x = alt.X("speedup:Q", scale=scale, axis=axis, title=f"speedup{over}, faster →")
    low, high = (alt.X(f"speedup_{end}:Q", scale=scale, axis=axis) for end in ("low", "high"))
    color = alt.Color("variant:N", scale=colors, legend=None)
    base = data.drawing(timed).encode(color=color, y=y)
    marks = base.encode(x=x, shape=switches.shape_encoding(), tooltip=TOOLTIP)
    label = data.drawing(timed).encode(x=high, text="label:N", y=y)
    fastest_pytorch = [
        {"speedup": row["baseline_step_ms"] / row["best_pytorch_step_ms"]}
        for row in timed[:1]
        if over_plain and row["best_pytorch_step_ms"] not in (None, row["baseline_step_ms"])
    ]
    one = {"strokeWidth": 1.5} if over_plain else DASHED
    layers = [
        _vertical([{"speedup": 1.0}], x, **one),
        _vertical(fastest_pytorch, x, **DASHED),
        base.mark_rule(strokeWidth=2).encode(x=low, x2="speedup_high:Q"),
        *theme.filled_or_hollow(
            marks.transform_filter("!datum.best_of_variant"), "point", size=30, opacity=0.6
        ),
        *theme.filled_or_hollow(
            marks.transform_filter("datum.best_of_variant"), "point", size=75, opacity=1
        ),
        *theme.text(label.transform_filter("datum.best_of_variant && !datum.winner"), dx=8),
        *theme.text(label.transform_filter("datum.winner"), dx=8, fontSize=13, fontWeight="bold"),
        *in_place,
    ]
    title = switches.panel_title(rows[0], layout, notes)
    return theme.panel(layers, y, lines, switches.MARK_HEIGHT, PANEL_WIDTH, title, layout)


def _label(row: Row) -> str:
    """Returns the speedup, and its interval if it has one."""
    if row["speedup_low"] is None or row["speedup_low"] == row["speedup_high"]:
        return theme.times(row["speedup"])
    low, high = theme.number(row["speedup_low"]), theme.number(row["speedup_high"])
    return f"{theme.times(row['speedup'])} ({low}–{high})"


def _why_not_drawn(row: Row) -> str:
    """Returns the text that replaces the mark of a timed step without a speedup."""
    if row["valid"] is False:
        return "not_counted"
    return f"{theme.duration(row['step_ms'])}; {row['why_no_speedup']}"


def _over_best(row: Row) -> Row:
    """Returns the row with its speedup over PyTorch's fastest, not over plain PyTorch."""
    ends = {f"speedup{end}": row[f"speedup_best{end}"] for end in ("", "_low", "_high")}
    return row | ends | {"best_of_variant": row["best_of_variant_over_best"]}


def _why_over_best(rows: list[Row]) -> str:
    """Says why a shape is not compared with plain PyTorch, and what replaces the comparison."""
    reasons = dict.fromkeys(row["why_no_speedup"] for row in rows if row["valid"] is not False)
    why = theme.sentence("; ".join(filter(None, reasons)) or f"{PLAIN} was not timed")
    shown = any(row["speedup"] is not None for row in rows)
    return f"{why}: compared with PyTorch's fastest" if shown else why


def _ticks(low: float, high: float) -> list[float]:
    """Returns powers of two. A range below 11× also gets their multiples of 1.5.

    A range below 2× gets tenths instead.
    """
    if high / low < 2:
        return [n / 10 for n in range(math.ceil(10 * low), math.floor(10 * high) + 1)]
    powers = [2.0**n for n in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    steps = [1.0, 1.5] if high / low < 2**3.5 else [1.0]
    return [power * step for power in powers for step in steps if low < power * step < high]


def _vertical(values: list[Row], x: alt.X, **style: object) -> alt.Chart:
    return data.drawing(values).mark_rule(color=theme.INK, **style).encode(x=x)
