"""Panels of one line per variant and one slot per combination of checkpointing and CUDA graph."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import altair as alt

from tnp.figures import theme
from tnp.figures.data import Row

# A step's two switches as one mark: order, name and shape.
NAMES = ["neither", "checkpointing", "CUDA graph", "both"]
SHAPES = ["circle", "square", "triangle-right", "diamond"]

SLOT_HEIGHT = 13  # px


def name(row: Row) -> str:
    """The name of a row's `checkpoint` and `cuda_graph`."""
    return NAMES[bool(row["checkpoint"]) + 2 * bool(row["cuda_graph"])]


def configuration(row: Row) -> str:
    """ "separate with checkpointing", or "separate" where no switch is on."""
    switches = [label for label in NAMES[1:3] if name(row) in (label, "both")]
    return " with ".join([row["variant"], *([" + ".join(switches)] if switches else [])])


def panels(rows: Sequence[Row]) -> Iterator[list[Row]]:
    """The rows of each shape."""
    for shape in dict.fromkeys(row["shape"] for row in rows):
        yield [row for row in rows if row["shape"] == shape]


def panel_title(row: Row) -> alt.Title:
    """The shape's name over its sizes."""
    sizes = f"{row['batch']} × ({row['n_context']:,} context + {row['n_target']:,} target)"
    return alt.Title(
        row["shape"], subtitle=sizes, fontSize=14, subtitleFontSize=11, subtitlePadding=3, offset=8
    )


def shape_encoding() -> alt.Shape:
    """Mark shape by switches, with the legend that all panels share."""
    return alt.Shape("switch:N", scale=alt.Scale(domain=NAMES, range=SHAPES), title=None)


@dataclass(frozen=True)
class Lines:
    """The lines of a panel: one per variant that it has, a slot in it per switch combination.

    `labels` are the lines of all panels, which leave equal room for them.
    """

    variants: list[str]
    slots: list[str]
    labels: list[str]

    @classmethod
    def of(cls, rows: Sequence[Row], labels: list[str]) -> "Lines":
        """The lines that `rows` of one panel need, in the order of `labels`."""
        variants, combinations = {row["variant"] for row in rows}, {name(row) for row in rows}
        return cls(
            [label for label in labels if label in variants],
            [switch for switch in NAMES if switch in combinations],
            labels,
        )

    @property
    def height(self) -> int:
        """Pixels; a line is never lower than its label."""
        return len(self.variants) * max(SLOT_HEIGHT * len(self.slots), 24)

    def encodings(self) -> theme.Encodings:
        return {
            "y": theme.line("variant:N", self.variants, self.labels, padding=0.12),
            "yOffset": alt.YOffset("switch:N", scale=alt.Scale(domain=self.slots)),
        }


def failures(rows: Sequence[Row], encodings: theme.Encodings) -> list[alt.Chart]:
    """Why configurations have no mark, as text in their place: one line per variant and status."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["status"] != "ok":
            groups.setdefault((row["variant"], row["status"]), []).append(row)
    texts = []
    for (variant, status), failed in groups.items():
        failed = sorted(failed, key=lambda row: NAMES.index(name(row)))
        every = len(failed) == sum(row["variant"] == variant for row in rows)
        which = "" if every else f" ({', '.join(name(row) for row in failed)})"
        texts.append(
            {
                "variant": variant,
                "switch": name(failed[len(failed) // 2 if every else 0]),
                "text": f"{theme.status_text(status)}{which}",
                "reason": failed[0]["reason"] or failed[0]["why_not"],
            }
        )
    return theme.in_place(texts, encodings)
