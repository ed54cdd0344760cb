"""Describes the room of a chart: a screen or a phone.

On a screen, panels stand side by side, with labels left of their lines. On a phone, panels stand
one below another, with labels above their lines.
"""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import altair as alt

PHONE_PANEL_WIDTH = 318  # px; about 340 with the ends of its axis
LABEL_CHARACTER_WIDTH = 6.8  # px, of an axis label
LABEL_HEIGHT = 18  # px, of a label above its line
NUMBERS_WIDTH = 50  # px, of the numbers of a y axis and its name
CHARACTER_WIDTH = 0.49  # mean share of the font size

# Panels have different lines. It is an argument of `concat`: Altair's methods copy all panels.
OWN_LINES = alt.Resolve(scale=alt.ScaleResolveMap(yOffset="independent"))


@dataclass(frozen=True)
class Layout:
    """Holds the difference between a chart for a screen and one for a phone."""

    narrow: bool

    def width(self, wide: int) -> int:
        """Returns the px of a panel that has `wide` px on a screen."""
        return PHONE_PANEL_WIDTH if self.narrow else wide

    def plot_width(self, wide: int) -> int:
        """Returns the px of a panel that also has numbers on its y axis."""
        return self.width(wide) - (NUMBERS_WIDTH if self.narrow else 0)

    @property
    def side(self) -> str:
        """Returns the side of a y axis's numbers. On a phone all plots start at its left edge."""
        return "right" if self.narrow else "left"

    def columns(self, wide: int) -> int:
        """Returns the number of panels side by side, `wide` on a screen."""
        return 1 if self.narrow else wide

    def height(self, lines: int, marks: int) -> int:
        """Returns the px of a panel of `lines` with marks as high as `marks`."""
        return lines * self._step(marks)

    def line(self, field: str, names: Sequence[str], labels: Sequence[str], marks: int) -> alt.Y:
        """Returns a line for each of `names`, with marks as high as `marks`.

        All panels of a figure that name the same `labels` leave equal room for them.
        """
        gap = 1 - marks / self._step(marks)
        # A phone has its gaps above the marks, for the names.
        align = 1.0 if self.narrow else 0.5
        scale = alt.Scale(domain=names, paddingInner=gap, paddingOuter=gap / 2, align=align)
        room = LABEL_CHARACTER_WIDTH * max(map(len, labels)) + 8
        axis = alt.Axis(grid=False, minExtent=room, maxExtent=room, labelLimit=room)
        if self.narrow:
            axis = None  # `theme.names` stand above the lines
        return alt.Y(field, scale=scale, axis=axis, title=None)

    def title(self, title: str, notes: Sequence[str] = (), wide: int = 80) -> alt.Title:
        """Returns a panel's title over its notes, on a screen in lines of `wide` characters."""
        return alt.Title(
            title,
            subtitle=self.wrapped(notes, 11, wide) or alt.Undefined,
            fontSize=14,
            subtitleFontSize=11,
            subtitlePadding=3,
            subtitleLineHeight=15,
            offset=8,
        )

    def block(
        self, panels: Sequence[alt.TopLevelMixin], title: str, note: str, columns: int
    ) -> alt.ConcatChart:
        """Returns a device's panels, `columns` side by side, under its name and a note."""
        heading = alt.Title(
            self.wrapped([title], 16, 140),
            subtitle=self.wrapped([note], 12, 180),
            fontSize=16,
            lineHeight=20,
            subtitleFontSize=12,
            subtitlePadding=4,
            offset=14,
        )
        return alt.concat(
            *panels,
            columns=self.columns(columns),
            title=heading,
            spacing={"column": 28, "row": 30},
            align="none" if self.narrow else "each",
            resolve=OWN_LINES,
        )

    def wrapped(self, texts: Sequence[str], font_size: int, wide: int) -> list[str]:
        """Returns `texts` in lines that fit the room. Each text starts a line."""
        most = int(PHONE_PANEL_WIDTH / (CHARACTER_WIDTH * font_size)) if self.narrow else wide
        return [line for text in texts for line in textwrap.wrap(text, most)]

    def _step(self, marks: int) -> int:
        """Returns the px from line to line."""
        return marks + (LABEL_HEIGHT if self.narrow else 4)


SCREEN, PHONE = Layout(narrow=False), Layout(narrow=True)
