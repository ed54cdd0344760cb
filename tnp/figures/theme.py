"""Defines how every figure looks: colours, numbers as text, the page around the chart.

Colours follow Okabe and Ito's and Paul Tol's, which any colour vision can distinguish. The light
ones are darker here, so that they are seen on light and on dark pages. Grey and cool hues are
PyTorch's variants, warm hues are ours. No figure relies on hue alone.
"""

import re
import textwrap
from collections.abc import Sequence

import altair as alt

from tnp.figures.data import Row, drawing
from tnp.figures.layout import LABEL_HEIGHT, OWN_LINES, Layout

Encodings = dict[str, alt.Y | alt.YOffset]  # the line of a panel on which a row stands

INK, MUTED, RULE = "#1f2328", "#59636e", "#e4e7eb"
FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
# Longest lines on a page 1,200 px wide.
TITLE_CHARACTERS, SUBTITLE_CHARACTERS = 106, 185

PAGE_STYLE = {
    "font": FONT,
    "view": {"stroke": None},
    "title": {
        "anchor": "start",
        "fontSize": 21,
        "fontWeight": 600,
        "color": INK,
        "lineHeight": 27,
        "subtitleFontSize": 13,
        "subtitleColor": MUTED,
        "subtitleLineHeight": 18,
        "subtitlePadding": 8,
        "offset": 22,
    },
    "axis": {
        "labelFontSize": 12,
        "labelColor": INK,
        "labelPadding": 6,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titleColor": MUTED,
        "gridColor": RULE,
        "domain": False,
        "ticks": False,
    },
    "legend": {
        "orient": "top",
        "direction": "horizontal",
        "labelFontSize": 12,
        "labelColor": INK,
        "labelLimit": 300,
        "titleFontSize": 12,
        "titleFontWeight": "normal",
        "titleColor": MUTED,
        "symbolSize": 90,
    },
}

STATUS_TEXT = {
    "oom": "out of memory",
    "unsupported": "cannot run here",
    "gate_failed": "gate failed",
    "timeout": "timed out",
    "not_counted": "timed, but not valid",
}

WITHOUT_EVIDENCE = "without complete evidence"


def status_text(status: str) -> str:
    """Returns a status in a reader's words; "killed" and "error" already are."""
    return STATUS_TEXT.get(status, status)


def one_line(reason: str | None) -> str:
    """Returns a reason without a terminal's control characters, which no SVG may hold."""
    printable = re.sub(r"\x1b\[[0-9;]*m", "", reason or "")
    return textwrap.shorten("".join(c if c.isprintable() else " " for c in printable), 200)


def number(value: float) -> str:
    """Formats three significant digits with their zeros: 2 is "2.00", 1234 is "1,234"."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:,.0f}"


def times(ratio: float) -> str:
    """Formats 1.934 as "1.93×"."""
    return f"{number(ratio)}×"


def span(ratios: Sequence[float]) -> str:
    """Formats (1.24, 1.34, 1.3) as "1.24× to 1.34×"."""
    return " to ".join(dict.fromkeys([times(min(ratios)), times(max(ratios))]))


def duration(milliseconds: float) -> str:
    """Formats a time in ms below a second, and in s from there."""
    if milliseconds < 999.5:
        return f"{number(milliseconds)} ms"
    return f"{number(milliseconds / 1000)} s"


def tokens(per_second: float) -> str:
    """Formats 2169786 as "2.17M tokens/s" and 37471 as "37.5k tokens/s"."""
    millions = per_second >= 999_500
    rate, unit = (per_second / 1e6, "M") if millions else (per_second / 1e3, "k")
    return f"{number(rate)}{unit} tokens/s"


def evidence(counts: bool | None) -> str:
    """Returns the tooltip of a drawn row: valid rows are filled, others hollow."""
    return "complete, and the row is valid" if counts else WITHOUT_EVIDENCE


def apart_from_8_bits(rows: Sequence[Row]) -> str:
    """Returns " in 16 bits" for a sentence about the other steps if some are in 8 bits, else ""."""
    return " in 16 bits" if any(row["precision"] for row in rows) else ""


def in_8_bits(rows: Sequence[Row]) -> list[str]:
    """Returns lines below figures with steps in 8 bits, or [] without any.

    The rows' `products_in` says how they train. Where it differs, each line names its variants, and
    the line of most variants is that of all others.
    """
    narrow = [row for row in rows if row["precision"]]
    several = len({row["device"] for row in narrow}) > 1
    said: dict[str, set[str]] = {}
    for row in narrow:
        name = f"{row['variant']} on {row['device']}" if several else row["variant"]
        said.setdefault(f"in {row['products_in']}", set()).add(name)
    if not said:
        return []
    *lines, most = sorted(said, key=lambda text: (len(said[text]), text))
    if lines:
        lines = [f"{text} ({listed(sorted(said[text]))})" for text in lines]
        most += " (all others)"
    return [f"{sentence(line)}." for line in (*lines, most)]


def verdict(ratio: float, decided: str | None) -> str:
    """Returns words for a ratio of speeds. `decided` is the verdict of view `contrasts`."""
    match decided:
        case "faster" | "slower":
            return f"{times(ratio)} as fast as"
        case "same":
            return "as fast, within 1%, as"
        case "ambiguous":
            return "neither measurably faster nor slower than"
    return f"{times(ratio)} as fast (medians alone, no verdict) as"


def sentence(text: str) -> str:
    """Returns `text` with a capital at its start."""
    return text[:1].upper() + text[1:]


def listed(names: Sequence[str]) -> str:
    """Formats ("a", "b", "c") as "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def page(
    chart: alt.TopLevelMixin, title: str, subtitle: Sequence[str], layout: Layout
) -> alt.TopLevelMixin:
    """Puts `chart` under its finding and a description of the measurement, in the house style.

    Changes `chart` itself: each of Altair's methods copies all of it.
    """
    chart.title = alt.Title(
        _balanced(title, TITLE_CHARACTERS),
        subtitle=[line for text in subtitle for line in textwrap.wrap(text, SUBTITLE_CHARACTERS)],
    )
    style = PAGE_STYLE
    if layout.narrow:
        style = style | {"legend": style["legend"] | {"columns": 2, "labelLimit": 150}}
    chart.background, chart.padding, chart.config = "white", 24, alt.Config(**style)
    return chart


def _balanced(text: str, width: int) -> list[str]:
    """Breaks text into as few and as even lines as `width` allows."""
    n_lines = len(textwrap.wrap(text, width))
    narrower = (textwrap.wrap(text, w) for w in range(len(text) // n_lines, width + 1))
    return next(lines for lines in narrower if len(lines) == n_lines)


def stacked(blocks: Sequence[alt.ConcatChart]) -> alt.ConcatChart:
    """Stacks devices one below another, each starting at the left edge."""
    return alt.concat(*blocks, columns=1, spacing=40, align="none", resolve=OWN_LINES)


def filled_or_hollow(base: alt.Chart, mark: str, **style: object) -> list[alt.Chart]:
    """Returns two layers: valid rows are filled, rows without evidence are hollow."""
    return [
        getattr(base.transform_filter(f"{negation}datum.valid"), f"mark_{mark}")(
            filled=filled, **style
        )
        for negation, filled in (("", True), ("!", False))
    ]


def in_place(rows: list[Row], lines: Encodings) -> list[alt.Chart]:
    """Says why `lines` have no mark: texts, each with its reason as a tooltip."""
    base = drawing(rows).encode(x=alt.value(4), text="text:N", tooltip="reason:N", **lines)
    return text(base, fontStyle="italic", color=MUTED)


def names(names: Sequence[str], y: alt.Y, marks: int, layout: Layout) -> list[alt.Chart]:
    """Returns the names of a panel's lines above their marks, if they are not left of them."""
    if not layout.narrow:
        return []
    above, field = -(marks + LABEL_HEIGHT) / 2, y.shorthand
    rows = drawing([{field.split(":")[0]: name} for name in names])
    return text(rows.encode(y=y, x=alt.value(0), text=field), dy=above, fontSize=12)


def panel(
    layers: Sequence[alt.Chart],
    y: alt.Y,
    lines: Sequence[str],
    marks: int,
    wide: int,
    title: alt.Title | None,
    layout: Layout,
) -> alt.LayerChart:
    """Returns a panel of `lines`, which `y` encodes, with marks as high as `marks`.

    `wide` is its width on a screen, in px.
    """
    return alt.layer(
        *layers,
        *names(lines, y, marks, layout),
        width=layout.width(wide),
        height=layout.height(len(lines), marks),
        title=alt.Undefined if title is None else title,
    )


def text(base: alt.Chart, **style: object) -> list[alt.Chart]:
    """Returns two layers, a text and a white halo under it: readable across a line."""
    style = {"align": "left", "fontSize": 11, "color": INK} | style
    halo = style | {"color": "white", "stroke": "white", "strokeWidth": 3, "strokeJoin": "round"}
    return [base.mark_text(**halo), base.mark_text(**style)]


def nothing(why: str, width: int, title: alt.Title) -> alt.TopLevelMixin:
    """Returns a text in place of a panel that would have no mark."""
    line = drawing([{"text": why}]).mark_text(align="left", fontStyle="italic", color=MUTED)
    line = line.encode(text="text:N", x=alt.value(0), y=alt.value(8))
    return line.properties(width=width, height=16, title=title)


def no_rows(what: str, command: str, layout: Layout) -> alt.TopLevelMixin:
    """Returns a card that says how to get the rows of this figure."""
    line = drawing([{"text": f"Run:  {command}"}]).mark_text(
        align="left",
        baseline="top",
        fontSize=12 if layout.narrow else 15,
        color=INK,
        font="monospace",
    )
    card = line.encode(text="text:N", x=alt.value(0), y=alt.value(0))
    return page(
        card.properties(width=layout.width(700), height=40), f"No rows yet: {what}", [], layout
    )
