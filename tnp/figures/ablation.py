"""Shows the gain of each of our components, added alone to PyTorch's step and removed from ours.

Reads the view `ablation`. A panel for each device and shape has a line for each component, with two
bars. PyTorch's step is uncompiled, not the fastest: components show their gain in a step that has
no other saving.
"""

import altair as alt
import duckdb

from tnp.figures import data, switches, theme
from tnp.figures.data import Row
from tnp.figures.layout import Layout
from tnp.figures.words import explained

PANEL_WIDTH = 300  # px
COLUMNS = 2  # panels side by side
SLOT_HEIGHT = 15  # px, per bar

# End in the names of the view's columns → name, colour, columns of the slower and the faster step.
ENDS = {
    "alone": ("added to PyTorch's", "#0072B2", ("base_ms", "only_ms")),
    "last": ("taken from ours", "#D55E00", ("without_ms", "full_ms")),
}

TOOLTIP = [
    alt.Tooltip("component:N"),
    alt.Tooltip("evidence:N"),
    alt.Tooltip("end:N", title="gain when"),
    alt.Tooltip("gain_ms:Q", format=".3~r", title="gain, ms"),
    alt.Tooltip("low_ms:Q", format=".3~r", title="95% low"),
    alt.Tooltip("high_ms:Q", format=".3~r", title="95% high"),
    alt.Tooltip("slower_ms:Q", format=".4~r", title="step without it, ms"),
    alt.Tooltip("faster_ms:Q", format=".4~r", title="step with it, ms"),
]

QUERY = "select * from ablation order by n_context, n_target, batch desc, shape, component"


def chart(connection: duckdb.DuckDBPyConnection, layout: Layout) -> alt.TopLevelMixin:
    """Draws two bars a component, in ms of a training step, with their intervals."""
    rows = data.query(connection, QUERY)
    if not rows:
        return theme.no_rows(
            "the ablation has not been timed", "snakemake --cores 1 all    # on a GPU", layout
        )
    devices = data.devices(connection, "ablation")
    labels = sorted({row["component"] for row in rows})
    blocks = []
    for device, of_device in data.by_device(devices, rows):
        of_shapes = data.grouped(of_device, "shape")
        panels = [_panel(of_shape, labels, _ends(rows), layout) for of_shape in of_shapes]
        when = data.recorded(connection, "ablation", device)
        measured = data.joined([when, ", ".join(_names(of_device, "dtype"))])
        blocks.append(layout.block(panels, device["name"], measured, COLUMNS))
    base, full = (
        theme.listed([explained(name) for name in _names(rows, f"{end}_variant")])
        for end in ("base", "full")
    )
    said = {
        "alone": "Upper bars, added to PyTorch's: how much shorter a training step becomes by this "
        f"component alone, in {base}.",
        "last": "Lower bars, taken from ours: how much longer it gets without this component, in "
        f"{full}.",
    }
    subtitle = [
        " ".join(said[end] for end in _ends(rows)),
        "Whiskers: 95% interval. Numbers: how many times as long the step without the component "
        "takes. The two bars of a component differ if components share a saving. Hollow: "
        f"{theme.WITHOUT_EVIDENCE}.",
    ]
    return theme.page(theme.stacked(blocks), finding(rows, devices), subtitle, layout)


def finding(rows: list[Row], devices: dict[str, Row]) -> str:
    """Names the component that gains most of our step, on the first device that timed one.

    It looks at the shape where that gain is the largest share of the step.
    """
    for device, of_device in data.by_device(devices, rows):
        timed = [row for row in of_device if row["speedup_last"] is not None]
        added = [row for row in of_device if row["speedup_alone"] is not None]
        if added and not timed:
            best = max(added, key=lambda row: row["speedup_alone"])
            hollow = "" if best["verdict_alone"] else f" ({theme.WITHOUT_EVIDENCE})"
            return (
                f"Added to PyTorch's step, {best['component']} gains most on "
                f"{device['name']}{hollow}: {theme.times(best['speedup_alone'])} at {best['shape']}"
            )
        if timed:
            best = max(timed, key=lambda row: row["speedup_last"])
            if best["verdict_last"] not in ("faster", None):
                return f"No component measurably shortens our step on {device['name']}"
            hollow = "" if best["verdict_last"] else f" ({theme.WITHOUT_EVIDENCE})"
            return (
                f"Among our components {best['component']} gains most on {device['name']}{hollow}: "
                f"without it a step at {best['shape']} takes {theme.times(best['speedup_last'])} "
                "the time"
            )
    return "No component could be timed yet"


def _ends(rows: list[Row]) -> list[str]:
    """Returns the ends for which some row has a gain; both if there is none."""
    return [end for end in ENDS if any(row[f"gain_{end}_ms"] is not None for row in rows)] or list(
        ENDS
    )


def _by_gain(rows: list[Row]) -> list[str]:
    """Orders components: the largest gain of a step comes first."""
    gains: dict[str, float] = {}
    for row in rows:
        largest = max(row["speedup_alone"] or 0.0, row["speedup_last"] or 0.0)
        gains[row["component"]] = max(gains.get(row["component"], 0.0), largest)
    return sorted(gains, key=lambda component: (-gains[component], component))


def _names(rows: list[Row], column: str) -> list[str]:
    return sorted({row[column] for row in rows if row[column]}) or ["?"]


def _bars(rows: list[Row]) -> list[Row]:
    """Returns a row for each bar, from the view's wide rows."""
    bars = []
    for row in rows:
        for end, (_, _, (slower, faster)) in ENDS.items():
            if row[f"gain_{end}_ms"] is not None:
                bars.append(
                    {
                        "component": row["component"],
                        "end": ENDS[end][0],
                        "gain_ms": row[f"gain_{end}_ms"],
                        "low_ms": row[f"gain_{end}_low_ms"],
                        "high_ms": row[f"gain_{end}_high_ms"],
                        "slower_ms": row[slower],
                        "faster_ms": row[faster],
                        "label": theme.times(row[f"speedup_{end}"]),
                        "valid": row["valid"] is True,
                        "evidence": theme.evidence(row["valid"]),
                    }
                )
    return bars


def _panel(
    rows: list[Row], labels: list[str], ends_shown: list[str], layout: Layout
) -> alt.TopLevelMixin:
    bars = _bars(rows)
    components, height = _by_gain(rows), SLOT_HEIGHT * len(ends_shown)
    y = layout.line("component:N", components, labels, height)
    ends = [bar[name] for bar in bars for name in ("gain_ms", "low_ms", "high_ms") if bar[name]]
    low, high = min([0.0, *ends]), max([0.0, *ends])
    span = high - low or 1.0
    names, colors, _ = zip(*ENDS.values(), strict=True)
    # Room for the labels right of the longest bar.
    scale = alt.Scale(domain=[low - 0.05 * span, high + 0.3 * span], nice=False)
    x = alt.X("gain_ms:Q", scale=scale, title="gain, ms of a step").axis(tickCount=5)
    lines = {
        "y": y,
        "yOffset": alt.YOffset(
            "end:N", scale=alt.Scale(domain=[ENDS[end][0] for end in ends_shown])
        ),
    }
    color = alt.Color("end:N", scale=alt.Scale(domain=names, range=colors), title=None)
    base = data.drawing(bars).encode(**lines)
    whiskers = data.drawing([bar for bar in bars if bar["low_ms"] is not None]).encode(**lines)
    label_x = alt.X("high_ms:Q", scale=scale)
    edges = [bar | {"high_ms": max(0.0, bar["gain_ms"], bar["high_ms"] or 0.0)} for bar in bars]
    layers = [
        data.drawing([{"gain_ms": 0.0}]).mark_rule(color=theme.INK, strokeWidth=1.5).encode(x=x),
        *theme.filled_or_hollow(
            base.encode(x=x, color=color, tooltip=TOOLTIP),
            "bar",
            height=SLOT_HEIGHT - 5,
            opacity=0.85,
        ),
        whiskers.mark_rule(strokeWidth=1.5, color=theme.INK).encode(
            x=alt.X("low_ms:Q", scale=scale), x2="high_ms:Q"
        ),
        *theme.text(data.drawing(edges).encode(x=label_x, text="label:N", **lines), dx=6),
        *theme.in_place(_failures(rows, ends_shown), lines),
    ]
    title = switches.panel_title(rows[0], layout)
    return theme.panel(layers, y, components, height, PANEL_WIDTH, title, layout)


def _outcome(row: Row, end: str) -> str:
    if row["status"] != "ok":
        return row["status"]
    if row["valid"] is False:
        return "not_counted"
    _, _, steps = ENDS[end]
    timed = all(row[step] is not None for step in steps)
    return "not timed together" if timed else "not run"


def _failures(rows: list[Row], ends_shown: list[str]) -> list[Row]:
    """Returns why a component has no bar."""
    return [
        {
            "component": row["component"],
            "end": ENDS[end][0],
            "text": theme.status_text(_outcome(row, end)),
            "reason": theme.one_line(row["reason"] or row["why_not"]),
        }
        for row in rows
        for end in ends_shown
        if row[f"gain_{end}_ms"] is None
    ]
