"""Draws a figure, and writes it to disk as a page and an image, beside the index of all pages."""

import importlib
from pathlib import Path

import altair as alt
import duckdb
import vl_convert

from tnp.figures import pages
from tnp.figures.layout import PHONE, SCREEN, Layout
from tnp.figures.story import FIGURES
from tnp.util.atomic_files import replacing

PNG_SCALE = 2  # pixels per CSS pixel


def draw(name: str, database: Path, layout: Layout = SCREEN) -> alt.TopLevelMixin:
    """Returns the chart `name` over `database`; ValueError for a name not in `FIGURES`."""
    if name not in FIGURES:
        raise ValueError(f"unknown figure {name!r}: it must be one of {', '.join(FIGURES)}")
    module = importlib.import_module(f"tnp.figures.{name}")
    with duckdb.connect(str(database), read_only=True) as connection:
        return module.chart(connection, layout)


def about(name: str) -> str:
    """Returns one sentence about figure `name`: the first line of its module."""
    documentation = importlib.import_module(f"tnp.figures.{name}").__doc__ or ""
    return documentation.split("\n", 1)[0]


def finding(name: str, database: Path) -> str:
    """Returns the title of figure `name` for `database`, without rendering the figure."""
    return " ".join(draw(name, database).title.text)


def render_index(path: Path, findings: dict[str, str]) -> None:
    """Writes the page that leads to all figures. It lies beside their pages."""
    path = Path(path)
    drawn = [name for name in FIGURES if path.with_name(f"{name}.html").exists()]
    content = pages.index({name: about(name) for name in FIGURES}, findings, drawn)
    with replacing(path) as temporary:
        temporary.write_text(content)


def render(name: str, database: Path, html_path: Path, image_path: Path | None = None) -> str:
    """Writes figure `name` as a page without outside references, and as .svg or .png beside it.

    Returns the figure's title. Vega-Lite compiles the chart before anything is written: an invalid
    chart raises ValueError, instead of leaving a blank page.
    """
    screen, phone = (draw(name, database, layout).to_dict() for layout in (SCREEN, PHONE))
    svg = vl_convert.vegalite_to_svg(screen)
    outputs = [(Path(html_path), pages.page(name, screen, phone).encode())]
    if image_path is not None:
        png = Path(image_path).suffix == ".png"
        image = vl_convert.svg_to_png(svg, scale=PNG_SCALE) if png else svg.encode()
        outputs.append((Path(image_path), image))
    for path, content in outputs:
        with replacing(path) as temporary:
            temporary.write_bytes(content)
    return " ".join(screen["title"]["text"])
