"""Draws README's chart: training speed of plain PyTorch, of PyTorch at its best, and of ours.

Reads the view `speedup`. Each shape has three bars, on the first device with evidence, and one more
for each of the last two that was timed in 8 bits. The chart has no background and grey text, so
that it suits light and dark pages.
"""

import altair as alt
import duckdb

from tnp.figures import data, theme
from tnp.figures.data import Row
from tnp.figures.layout import SCREEN
from tnp.figures.words import words

WIDTH = 545  # px of the bars; with labels and padding about 800, GitHub's width
BAR_HEIGHT = 18  # px
SHAPES = 5  # most shapes that are drawn
GREY = "#757b82"  # 4.2 : 1 on white and 4.5 : 1 on GitHub's dark page
LABEL_ROOM = 1.35  # axis length over the longest bar, for the text right of it

# Role, and whether products are in 8 bits → name and colour of its bar.
BARS = {
    ("baseline", False): (words("sdpa_flash"), "#8c959f"),
    ("peer", False): (words("pytorch_best"), "#2f81c7"),
    ("peer", True): (words("pytorch_best_fp8"), "#8ab8e0"),
    ("own", False): (words("fused"), "#d9661f"),
    ("own", True): (words("fp8"), "#f0a878"),
}
NEEDED = 3  # bars of a shape that are not in 8 bits

# Selects our step that `leads`, and the fastest of the other roles, with evidence if there is any.
# Steps in 8 bits are selected apart.
# The specification's step has no switches. Invalid steps are left out, and streams of tasks whose
# sizes vary, which have their own tables.
QUERY = """
    select *
    from speedup
    where
        device = $device
        and speedup is not null
        and valid is distinct from false
        and not coalesce(varies, false)
        and (role != 'baseline' or not (checkpoint or cuda_graph))
    qualify row_number() over (
        partition by shape, role, precision order by valid desc nulls last, leads desc, step_ms
    ) = 1
    order by n_context, n_target, batch desc, role, precision
"""

# A valid step of ours has no bar if the plain step beside it is not valid. Sizes at which PyTorch
# was not run are no steps to compare.
LEFT_OUT = """
    select distinct shape, why_no_speedup
    from speedup
    where
        device = $device
        and role = 'own'
        and valid
        and speedup is null
        and best_pytorch_step_ms is not null
        and not coalesce(varies, false)
    order by shape
"""

DEVICES_WITH_EVIDENCE = "select distinct device from speedup where valid and speedup is not null"


def draw(connection: duckdb.DuckDBPyConnection) -> alt.TopLevelMixin:
    """Draws horizontal bars from zero with 95 % intervals, 800 px wide, without a background."""
    devices = data.devices(connection, "speedup")
    proven = {row["device"] for row in data.query(connection, DEVICES_WITH_EVIDENCE)}
    for slug in sorted(devices, key=lambda slug: slug not in proven):  # stable
        shapes = _shapes(data.query(connection, QUERY, device=slug))
        if shapes:
            keys = [row["comparison_key"] for of_shape in shapes for row in of_shape]
            when = data.recorded(connection, "speedup", devices[slug], keys)
            left_out = data.query(connection, LEFT_OUT, device=slug)
            return _chart(shapes, devices[slug]["name"], when, left_out)
    return theme.no_rows("no training step has been timed", "snakemake --cores 1 all", SCREEN)


def _shapes(rows: list[Row]) -> list[list[Row]]:
    """Returns the rows of shapes that have all needed bars. Shapes with evidence are preferred."""

    def needed(of_shape: list[Row]) -> list[Row]:
        return [row for row in of_shape if not row["precision"]]

    whole = [one for one in data.grouped(rows, "shape") if len(needed(one)) == NEEDED]
    chosen = sorted(whole, key=lambda one: not all(row["valid"] for row in needed(one)))
    return [of_shape for of_shape in whole if of_shape in chosen[:SHAPES]]


def finding(shapes: list[list[Row]], device: str) -> str:
    """Says how much faster ours is than PyTorch's best, if it is so at all shapes, in 16 bits."""
    own = [row for of_shape in shapes for row in of_shape
           if row["role"] == "own" and not row["precision"]]  # fmt: skip
    if all(row["verdict_best"] == "faster" for row in own):
        ratios = [row["speedup_best"] for row in own]
        low, high = f"{min(ratios):.2f}", f"{max(ratios):.2f}"
        span = low if low == high else f"{low} to {high}"
        return f"Training is {span} times as fast as PyTorch's best on an {device}"
    return f"Training speed on an {device}"


def _chart(
    shapes: list[list[Row]], device: str, when: str, left_out: list[Row]
) -> alt.TopLevelMixin:
    bars = [_bar(row) for of_shape in shapes for row in of_shape]
    longest = max(bar["speedup_high"] for bar in bars)
    drawn = {bar["bar"] for bar in bars}
    names, colors = zip(*(bar for bar in BARS.values() if bar[0] in drawn), strict=True)
    scale = alt.Scale(domain=[0, longest * LABEL_ROOM], nice=False)
    x = alt.X("speedup:Q", scale=scale, axis=None)
    labels = list(dict.fromkeys(bar["label"] for bar in bars))
    lines = {
        "y": alt.Y("label:N", scale=alt.Scale(domain=labels, padding=0.14), title=None).axis(
            labelExpr="split(datum.label, '|')", labelLimit=400, labelLineHeight=19, labelPadding=10
        ),
        "yOffset": alt.YOffset("bar:N", scale=alt.Scale(domain=names)),
    }
    color = alt.Color("bar:N", scale=alt.Scale(domain=names, range=colors), title=None)
    base = data.drawing(bars).encode(**lines)
    measured = base.transform_filter("isValid(datum.low)").encode(
        x=alt.X("low:Q", scale=scale, axis=None), x2="speedup_high:Q"
    )
    text = base.encode(x=alt.X("speedup_high:Q", scale=scale, axis=None), text="text:N")
    hollow = any(not bar["valid"] for bar in bars)
    apart = any(
        bar["valid"] and bar["low"] is None and bar["bar"] != words("sdpa_flash") for bar in bars
    )
    heading = alt.Title(
        finding(shapes, device),
        subtitle=[
            f"Speed of a training step as a multiple of plain PyTorch's; "
            f"{', '.join(filter(None, [_dtypes(bars), when]))}.",
            "PyTorch's best: compiled, with every saving that PyTorch offers. Ours: our kernels.",
            *theme.in_8_bits([row for of_shape in shapes for row in of_shape]),
            "Whiskers: 95% interval; for ours, that against PyTorch's best."
            + (" Bars without: not timed beside plain PyTorch." if apart else "")
            + (f" Hollow: {theme.WITHOUT_EVIDENCE}." if hollow else ""),
            *(f"Not drawn: {row['shape']}, since {row['why_no_speedup']}." for row in left_out),
        ],
    )
    chart = alt.layer(
        *theme.filled_or_hollow(base.encode(x=x, color=color), "bar", height=BAR_HEIGHT),
        # A dark line on a light one: any page shows one of the two.
        measured.mark_rule(color="white", strokeWidth=9),
        measured.mark_rule(color=theme.INK, strokeWidth=5),
        text.mark_text(align="left", dx=8, fontSize=14, fontWeight=600, color=GREY),
    )
    return chart.properties(
        width=WIDTH,
        height=len(shapes) * (len(names) * (BAR_HEIGHT + 3) + 18),
        title=heading,
        background="transparent",
        padding={"left": 4, "right": 4, "top": 8, "bottom": 4},
    ).configure(**_style())


def _bar(row: Row) -> Row:
    low, high = row["speedup_low"], row["speedup_high"]
    if row["role"] == "own" and row["speedup_best_low"]:  # its pairs with plain PyTorch are few
        best = row["speedup"] / row["speedup_best"]
        low, high = row["speedup_best_low"] * best, row["speedup_best_high"] * best
    tasks = "1 task" if row["batch"] == 1 else f"{row['batch']} tasks"
    sizes = f"{tasks} of {row['n_context']:,} + {row['n_target']:,} points"
    return {
        "label": f"{row['shape']}|{sizes}",
        "bar": BARS[row["role"], bool(row["precision"])][0],
        "speedup": row["speedup"],
        "low": low,
        "speedup_high": high or row["speedup"],
        "valid": row["valid"] is True,
        "dtype": row["dtype"],
        "text": f"{theme.times(row['speedup'])}  ({theme.duration(row['step_ms'])})",
    }


def _dtypes(bars: list[Row]) -> str:
    return theme.listed(sorted({bar["dtype"] for bar in bars}))


def _style() -> Row:
    """Returns the house style without its inks."""
    title = theme.PAGE_STYLE["title"] | {"color": GREY, "subtitleColor": GREY}
    title |= {"fontSize": 19, "subtitleFontSize": 14, "subtitleLineHeight": 19, "offset": 12}
    axis = theme.PAGE_STYLE["axis"] | {"labelColor": GREY, "labelFontSize": 14, "grid": False}
    legend = theme.PAGE_STYLE["legend"] | {"labelColor": GREY, "labelFontSize": 14}
    legend |= {"labelLimit": 480, "offset": 8}
    return theme.PAGE_STYLE | {"title": title, "axis": axis, "legend": legend}
