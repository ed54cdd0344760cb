"""How every figure looks and speaks: colours, numbers as text, the page around the chart.

Colours are Okabe and Ito's and Paul Tol's, distinguishable with any colour vision: grey and cool
hues are PyTorch's own variants, warm hues are this project's. No figure relies on hue alone.
"""

import textwrap
from collections.abc import Sequence

import altair as alt

from tnp.figures.data import Row, drawing

Encodings = dict[str, alt.Y | alt.YOffset]  # which line of a panel a row stands on

INK, MUTED, RULE = "#1f2328", "#59636e", "#e4e7eb"
FONT = "Helvetica, Arial, 'Liberation Sans', sans-serif"
# Longest lines on a page 1,200 px wide.
TITLE_CHARACTERS, SUBTITLE_CHARACTERS = 106, 185
LABEL_CHARACTER_WIDTH = 6.4  # px, of an axis label

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
    "no_baseline": "timed, with no plain step to compare with",
    "not_counted": "timed, but does not count",
}

WITHOUT_EVIDENCE = "recorded before evidence was kept"


def status_text(status: str) -> str:
    """A status in a reader's words; "killed" and "error" already are."""
    return STATUS_TEXT.get(status, status)


def number(value: float) -> str:
    """Three significant digits, with the zeros that are measured: 2 is "2.00", 1234 is "1,234"."""
    return f"{value:#.3g}".rstrip(".") if abs(value) < 999.5 else f"{value:,.0f}"


def times(ratio: float) -> str:
    """1.934 as "1.93×"."""
    return f"{number(ratio)}×"


def duration(milliseconds: float) -> str:
    """In ms below a second and in s from there."""
    if milliseconds < 999.5:
        return f"{number(milliseconds)} ms"
    return f"{number(milliseconds / 1000)} s"


def evidence(counts: bool | None) -> str:
    """What a tooltip says of a row that is drawn: filled where it counts, else hollow."""
    return "kept, and the row counts" if counts else WITHOUT_EVIDENCE


def verdict(ratio: float, decided: str | None) -> str:
    """What may be said of a ratio of speeds: view `contrasts` has decided, or None could be."""
    match decided:
        case "faster" | "slower":
            return f"{times(ratio)} as fast as"
        case "same":
            return "as fast, within 1%, as"
        case "ambiguous":
            return "neither measurably faster nor slower than"
    return f"{times(ratio)} as fast (medians alone, no verdict) as"


def sentence(text: str) -> str:
    """`text` with a capital at its start, and nothing else changed."""
    return text[:1].upper() + text[1:]


def listed(names: Sequence[str]) -> str:
    """("a", "b", "c") as "a, b and c"."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def page(chart: alt.TopLevelMixin, title: str, subtitle: Sequence[str]) -> alt.TopLevelMixin:
    """`chart` under its finding and under how that was measured, in the house style."""
    heading = alt.Title(
        _balanced(title, TITLE_CHARACTERS),
        subtitle=[line for text in subtitle for line in textwrap.wrap(text, SUBTITLE_CHARACTERS)],
    )
    return chart.properties(title=heading, background="white", padding=24).configure(**PAGE_STYLE)


def _balanced(text: str, width: int) -> list[str]:
    """As few lines as `width` allows, as even as these allow: no last line of a single word."""
    n_lines = len(textwrap.wrap(text, width))
    narrower = (textwrap.wrap(text, w) for w in range(len(text) // n_lines, width + 1))
    return next(lines for lines in narrower if len(lines) == n_lines)


def block(
    panels: Sequence[alt.TopLevelMixin], title: str, subtitle: str, columns: int
) -> alt.ConcatChart:
    """The panels of one device, `columns` abreast, under its name and how it was measured."""
    heading = alt.Title(
        title, subtitle=subtitle, fontSize=16, subtitleFontSize=12, subtitlePadding=4, offset=14
    )
    panels = alt.concat(*panels, columns=columns, title=heading, spacing={"column": 28, "row": 30})
    return panels.resolve_scale(yOffset="independent")  # each panel has lines of its own


def stacked(blocks: Sequence[alt.ConcatChart]) -> alt.ConcatChart:
    """Device above device, each starting at the left edge."""
    stack = alt.concat(*blocks, columns=1, spacing=40, align="none")
    return stack.resolve_scale(yOffset="independent")


def filled_or_hollow(base: alt.Chart, mark: str, **style: object) -> list[alt.Chart]:
    """Two layers: rows that count are filled, those recorded without evidence hollow."""
    return [
        getattr(base.transform_filter(f"{negation}datum.counts"), f"mark_{mark}")(
            filled=filled, **style
        )
        for negation, filled in (("", True), ("!", False))
    ]


def in_place(rows: list[Row], lines: Encodings) -> list[alt.Chart]:
    """Why what would stand on `lines` has no mark: texts, each with its reason as a tooltip."""
    base = drawing(rows).encode(x=alt.value(4), text="text:N", tooltip="reason:N", **lines)
    return text(base, fontStyle="italic", color=MUTED)


def line(field: str, names: Sequence[str], labels: Sequence[str], **scale: float) -> alt.Y:
    """A line for each of `names`, beside labels with room for all `labels` of the figure."""
    domain = alt.Scale(domain=names, **scale)
    return alt.Y(field, scale=domain, axis=line_axis(labels), title=None)


def line_axis(labels: Sequence[str]) -> alt.Axis:
    """An axis of named lines. All panels of a figure that name `labels` leave them equal room."""
    room = LABEL_CHARACTER_WIDTH * max(map(len, labels)) + 8
    return alt.Axis(grid=False, minExtent=room, maxExtent=room, labelLimit=room)


def text(base: alt.Chart, **style: object) -> list[alt.Chart]:
    """Two layers, a text and a white halo under it: readable where it crosses a line."""
    style = {"align": "left", "fontSize": 11, "color": INK} | style
    halo = style | {"color": "white", "stroke": "white", "strokeWidth": 3, "strokeJoin": "round"}
    return [base.mark_text(**halo), base.mark_text(**style)]


def no_rows(what: str, command: str) -> alt.TopLevelMixin:
    """A card that says how to get the rows this figure is drawn from."""
    line = drawing([{"text": f"Run:  {command}"}]).mark_text(
        align="left", baseline="top", fontSize=15, color=INK, font="monospace"
    )
    card = line.encode(text="text:N", x=alt.value(0), y=alt.value(0))
    return page(card.properties(width=700, height=40), f"No rows yet: {what}", [])
