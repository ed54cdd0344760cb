"""How much faster each variant trains than the specification's baseline, and than PyTorch's best.

Reads the view `speedup`. One panel per device and shape, one line per variant, one mark per
combination of checkpointing and CUDA graph.
"""

import math

import altair as alt
import duckdb

from tnp.figures import data, switches, theme
from tnp.figures.data import Row
from tnp.figures.words import words

PANEL_WIDTH = 345  # px
COLUMNS = 2  # panels abreast

SPECIFIED = words("sdpa_flash")

TOOLTIP = [
    alt.Tooltip("variant:N"),
    alt.Tooltip("evidence:N"),
    alt.Tooltip("switch:N"),
    alt.Tooltip("step_ms:Q", format=".4~r", title="median step, ms"),
    alt.Tooltip("speedup:Q", format=".3f"),
    alt.Tooltip("speedup_low:Q", format=".3f", title="95% low"),
    alt.Tooltip("speedup_high:Q", format=".3f", title="95% high"),
    alt.Tooltip("speedup_best:Q", format=".3f", title="against PyTorch's fastest"),
]

QUERY = """
    select
        *,
        speedup = coalesce(
            max(speedup) filter (where counts) over (partition by device, shape),
            max(speedup) over (partition by device, shape)
        ) as best_of_shape,
        speedup = max(speedup) over (partition by device, shape, variant) as best_of_variant
    from speedup
    order by n_context, n_target, batch desc, shape, variant, checkpoint, cuda_graph
"""


def chart(connection: duckdb.DuckDBPyConnection) -> alt.TopLevelMixin:
    """Speedups on a log₂ axis with their intervals, 1× marked, the best of each shape in bold."""
    rows = data.query(connection, QUERY)
    if not rows:
        return theme.no_rows("no training step has been timed", "snakemake --cores 1 all")
    devices = data.devices(connection, "speedup")
    variants = data.variants(connection)
    colors = data.variant_colors(connection)
    blocks = []
    for slug, device in devices.items():
        measured = data.steps_measured(connection, device)
        panels = _panels([row for row in rows if row["device"] == slug], variants, colors)
        blocks.append(theme.block(panels, device["name"], measured, COLUMNS))
    subtitle = [
        f"Speedup: time of a training step of {SPECIFIED} (no checkpointing, no CUDA graph) ÷ "
        "that of the configuration, on the same device, shape and dtype.",
        "Bars: 95% interval of the ratio within sittings. Dashed line: PyTorch's fastest "
        "configuration at that shape. Bold: the fastest of those with evidence. Hollow: "
        f"{theme.WITHOUT_EVIDENCE}, and so without an interval and a verdict.",
        "Called faster or slower: where the bar clears 1× by more than 1%, allowing for how many "
        "are compared.",
    ]
    return theme.page(theme.stacked(blocks), finding(rows, devices), subtitle)


def finding(rows: list[Row], devices: dict[str, Row]) -> str:
    """What the rows of the first device that timed anything say, in one sentence."""
    for slug, device in devices.items():
        timed = [row for row in rows if row["device"] == slug and row["speedup"] is not None]
        if timed:
            return _device_finding(timed, device["name"])
    return "No configuration could be timed yet"


def _device_finding(timed: list[Row], device: str) -> str:
    own = [row for row in timed if row["role"] == "own"]
    if own:
        best = max(
            own, key=lambda row: (bool(row["counts"]), row["speedup_best"] or row["speedup"])
        )
        sentence = (
            f"{theme.sentence(switches.configuration(best))} trains "
            f"{theme.verdict(best['speedup'], best['verdict'])} {SPECIFIED} "
            f"at {best['shape']} on {device}"
        )
        if best["speedup_best"] is None:
            return sentence
        against_best = theme.verdict(best["speedup_best"], best["verdict_best"])
        return f"{sentence}; it is {against_best} PyTorch's fastest configuration there"
    best = max(timed, key=lambda row: (bool(row["counts"]), row["speedup"]))
    if best["verdict"] == "faster":
        return (
            f"{theme.sentence(switches.configuration(best))} trains "
            f"{theme.times(best['speedup'])} faster than {SPECIFIED} at "
            f"{best['shape']} on {device}; this project's kernels are not timed there"
        )
    return f"No configuration timed on {device} is measurably faster than {SPECIFIED}"


def _panels(rows: list[Row], variants: list[str], colors: alt.Scale) -> list[alt.TopLevelMixin]:
    bounds = [row[end] for row in rows for end in ("speedup_low", "speedup_high") if row[end]]
    low, high = min([0.8, *bounds]), max([1.25, *bounds])
    span = high / low
    domain = [low / span**0.06, high * span**0.3]  # room for the label right of the fastest mark
    return [
        _panel(of_shape, switches.Lines.of(of_shape, variants), domain, colors)
        for of_shape in switches.panels(rows)
    ]


def _panel(
    rows: list[Row],
    lines: switches.Lines,
    domain: list[float],
    colors: alt.Scale,
) -> alt.TopLevelMixin:
    timed = [
        row
        | {
            "switch": switches.name(row),
            "label": theme.times(row["speedup"]),
            "evidence": theme.evidence(row["counts"]),
            "speedup_low": row["speedup_low"] or row["speedup"],
            "speedup_high": row["speedup_high"] or row["speedup"],
        }
        for row in rows
        if row["speedup"] is not None
    ]
    without_speedup = [
        row | {"status": "not_counted" if row["counts"] is False else "no_baseline"}
        if row["status"] == "ok" and row["speedup"] is None
        else row
        for row in rows
    ]
    y = lines.encodings()
    scale = alt.Scale(type="log", base=2, domain=domain, nice=False)
    axis = alt.Axis(values=_ticks(*domain), labelExpr="datum.value + '×'")
    x = alt.X("speedup:Q", scale=scale, axis=axis, title="speedup, faster →")
    low, high = (alt.X(f"speedup_{end}:Q", scale=scale, axis=axis) for end in ("low", "high"))
    color = alt.Color("variant:N", scale=colors, legend=None)
    base = data.drawing(timed).encode(color=color, **y)
    label = data.drawing(timed).encode(x=high, text="label:N", **y)
    fastest_pytorch = [
        {"speedup": row["baseline_step_ms"] / row["best_pytorch_step_ms"]}
        for row in timed[:1]
        if row["best_pytorch_step_ms"] not in (None, row["baseline_step_ms"])
    ]
    layers = [
        _vertical([{"speedup": 1.0}], x, strokeWidth=1.5),
        _vertical(fastest_pytorch, x, strokeDash=[4, 3]),
        base.mark_rule(strokeWidth=2).encode(x=low, x2="speedup_high:Q"),
        *(
            base.transform_filter(f"{negation}datum.counts")
            .mark_point(filled=filled, size=75, opacity=1)
            .encode(x=x, shape=switches.shape_encoding(), tooltip=TOOLTIP)
            for negation, filled in (("", True), ("!", False))
        ),
        *theme.text(label.transform_filter("datum.best_of_variant && !datum.best_of_shape"), dx=8),
        *theme.text(
            label.transform_filter("datum.best_of_shape"), dx=8, fontSize=13, fontWeight="bold"
        ),
        *switches.failures(without_speedup, y),
    ]
    return alt.layer(*layers).properties(
        width=PANEL_WIDTH,
        height=lines.height,
        title=switches.panel_title(rows[0]),
    )


def _ticks(low: float, high: float) -> list[float]:
    """Powers of two, and half as much again where that leaves room."""
    powers = [2.0**n for n in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    steps = [1.0, 1.5] if high / low < 2**3.5 else [1.0]
    return [power * step for power in powers for step in steps if low < power * step < high]


def _vertical(values: list[Row], x: alt.X, **style: object) -> alt.Chart:
    return data.drawing(values).mark_rule(color=theme.INK, **style).encode(x=x)
