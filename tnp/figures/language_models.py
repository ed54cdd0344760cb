"""Shows how many tokens a second language models write, beside the limit of the device's memory.

Reads the view `language_models` and the table `literature`. A panel for each device, model, format
of weights, batch and prompt has a line for each form, and one for each figure that others published
of that model, format and batch.
"""

import altair as alt
import duckdb

from tnp.figures import data, theme
from tnp.figures.data import COLORS, Row
from tnp.figures.layout import Layout
from tnp.store.schemas import ROLES

PANEL_WIDTH = 280  # px
COLUMNS = 2  # panels abreast
LINE_HEIGHT = 18  # px
TEXT_ROOM = 1.3  # room for numbers right of the marks, as a share of the axis
PUBLISHED = "published"
KEY = ("model", "weights", "batch", "n_prompt")

QUERY = """
    select * from language_models
    order by
        device, model, weights != 'bf16', weights desc, batch, n_prompt, role = 'own',
        tokens_per_s, form
"""
LITERATURE = "select * from literature order by model, weights, batch, tokens_per_s, system"

TOOLTIP = [
    alt.Tooltip("line:N", title="form"),
    alt.Tooltip("tokens_per_s:Q", format=",.0f", title="tokens/s"),
    alt.Tooltip("about:N", title="about"),
]


def chart(connection: duckdb.DuckDBPyConnection, layout: Layout) -> alt.TopLevelMixin:
    """Draws tokens a second from zero, a line for each form. Failed forms say why."""
    rows = data.query(connection, QUERY)
    if not rows:
        command = "snakemake --cores 1 language_models"
        return theme.no_rows("no language model has been timed", command, layout)
    published = data.query(connection, LITERATURE)
    panels: dict[str, list[tuple[list[Row], list[Row]]]] = {}
    for of_panel in data.grouped(rows, "device", *KEY):
        alike = [row for row in published if _is_alike(row, of_panel[0])]
        panels.setdefault(of_panel[0]["device"], []).append((of_panel, alike))
    labels = [
        _line(row) for of_device in panels.values() for two in of_device for row in sum(two, [])
    ]
    devices = data.devices(connection, "language_models")
    blocks = []
    for slug, device in devices.items():
        drawn = [_panel(own, alike, labels, layout) for own, alike in panels[slug]]
        when = data.recorded(connection, "language_models", device)
        blocks.append(layout.block(drawn, device["name"], when, COLUMNS))
    subtitle = [
        "New tokens a second of all sequences, as medians: calls with many new tokens less calls "
        "with one, so that the prompt's time is left out. Greedy choice, random weights and "
        "prompts. The forms of a panel took turns in one process.",
        "Limit: the rate at which the device could read the weights and the cache of each step. "
        "Percentages are shares of it. Diamonds: figures that others published, often of other "
        f"GPUs and prompts. Hollow circles: {theme.WITHOUT_EVIDENCE}.",
    ]
    return theme.page(theme.stacked(blocks), finding(rows, devices), subtitle, layout)


def finding(rows: list[Row], devices: dict[str, Row]) -> str:
    """Compares ours with the fastest other form, in the first panel that has both."""
    timed, device = data.of_first(devices, [row for row in rows if _is_timed(row)])
    if not timed:
        return "No form of a language model could be timed"
    for of_panel in data.grouped(timed, *KEY):
        own = [row for row in of_panel if row["role"] == "own"]
        others = [row for row in of_panel if row["own_speedup"] is not None]
        if own and others:
            best = max(others, key=lambda row: row["tokens_per_s"])
            how = theme.verdict(best["own_speedup"], best["own_verdict"])
            return (
                f"{_where(own[0])}, ours writes {_rate(own[0]['tokens_per_s'])} on {device} "
                f"and is {how} {best['form']}"
            )
    best = max(timed, key=lambda row: row["tokens_per_s"])
    return (
        f"{_where(best)}, {best['form']} writes {_rate(best['tokens_per_s'])} on {device}; "
        "ours was not timed beside it"
    )


def _is_timed(row: Row) -> bool:
    return row["tokens_per_s"] is not None and row["valid"] is not False


def _is_alike(published: Row, row: Row) -> bool:
    """Returns whether a published figure belongs to the panel of `row`."""
    same = all(published[name] == row[name] for name in ("model", "weights", "batch"))
    return same and published["n_prompt"] in (None, row["n_prompt"])


def _where(row: Row) -> str:
    sequences = "one sequence" if row["batch"] == 1 else f"{row['batch']} sequences"
    return f"With {row['model']} in {row['weights']} and {sequences} of {row['n_prompt']:,} tokens"


def _rate(tokens_per_s: float) -> str:
    return f"{theme.number(tokens_per_s)} tokens/s"


def _line(row: Row) -> str:
    """Returns the name of a line: a form, or a published system with its GPU."""
    return row["form"] if "form" in row else f"{row['system']}: {row['hardware']}"


def _panel(
    rows: list[Row], published: list[Row], labels: list[str], layout: Layout
) -> alt.TopLevelMixin:
    first = rows[0]
    limit = max((row["limit_tokens_per_s"] or 0 for row in rows), default=0)
    marks = [_mark(row) for row in rows if _is_timed(row)] + [_published(row) for row in published]
    lines = list(dict.fromkeys(map(_line, [*rows, *published])))
    y = layout.line("line:N", lines, labels, LINE_HEIGHT)
    longest = max([limit, 1.0, *(mark["tokens_per_s"] for mark in marks)])
    scale = alt.Scale(domain=[0, longest * TEXT_ROOM], nice=False)
    x = alt.X("tokens_per_s:Q", scale=scale, title="new tokens a second").axis(tickCount=4)
    layers = []
    if limit:
        rule = data.drawing([{"tokens_per_s": limit, "about": f"limit: {_rate(limit)}"}])
        layers.append(
            rule.mark_rule(color=theme.MUTED, strokeDash=[4, 3]).encode(x=x, tooltip="about:N")
        )
    if marks:
        layers += _points(marks, x, y)
    failed = [
        {"line": _line(row), "text": _why(row), "reason": row["reason"] or row["why_not"] or ""}
        for row in rows
        if not _is_timed(row)
    ]
    layers += theme.in_place(failed, {"y": y}) if failed else []
    notes = [f"limit {_rate(limit)}"] if limit else []
    prompt = f"batch {first['batch']}, prompt {first['n_prompt']:,}"
    title = layout.title(f"{first['model']}, {first['weights']}, {prompt}", notes)
    return theme.panel(layers, y, lines, LINE_HEIGHT, PANEL_WIDTH, title, layout)


def _why(row: Row) -> str:
    status = row["status"] if row["status"] != "ok" else "not_counted"
    return theme.status_text(status)


def _mark(row: Row) -> Row:
    share = row["share_of_limit"]
    text = theme.number(row["tokens_per_s"]) + ("" if share is None else f", {share:.0%}")
    about = theme.evidence(row["valid"])
    mark = {"line": _line(row), "tokens_per_s": row["tokens_per_s"], "kind": row["role"]}
    return mark | {"valid": bool(row["valid"]), "text": text, "about": about}


def _published(row: Row) -> Row:
    about = ", ".join(filter(None, (row["source"], row["published"], row["basis"])))
    mark = {"line": _line(row), "tokens_per_s": row["tokens_per_s"], "kind": PUBLISHED}
    return mark | {"valid": False, "text": theme.number(row["tokens_per_s"]), "about": about}


def _points(marks: list[Row], x: alt.X, y: alt.Y) -> list[alt.Chart]:
    """Returns marks by role, hollow without evidence, with numbers right of them."""
    kinds = [*ROLES, PUBLISHED]
    colors = [*(COLORS[role][0] for role in ROLES), theme.MUTED]
    shapes = [*("circle" for _ in ROLES), "diamond"]
    base = data.drawing(marks).encode(
        x=x,
        y=y,
        color=alt.Color("kind:N", title=None).scale(domain=kinds, range=colors),
        shape=alt.Shape("kind:N", title=None).scale(domain=kinds, range=shapes),
        tooltip=TOOLTIP,
    )
    numbers = data.drawing(marks).encode(x=x, y=y, text="text:N")
    return [*theme.filled_or_hollow(base, "point", size=75, opacity=1), *theme.text(numbers, dx=9)]
