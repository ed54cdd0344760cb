"""Writes HTML around the charts, for phones, dark pages and readers without a network."""

import functools
import html
import json
from collections.abc import Collection
from typing import Any

import vl_convert

from tnp.figures.story import FIGURES, STORY

# Charts are drawn for light pages. Dark pages invert them and turn their hues back.
STYLE = """
body { margin: 0 auto; padding: 16px; background: white; color: #1f2328; max-width: 1290px;
       font-family: Helvetica, Arial, "Liberation Sans", sans-serif; line-height: 1.4 }
h1 { font-size: 21px; margin: 12px 0 8px } h2 { font-size: 17px; margin: 24px 0 0 }
p, dd { font-size: 14px; margin: 4px 0; color: #59636e; max-width: 900px }
nav { display: flex; justify-content: space-between; gap: 16px; font-size: 14px }
a { color: #0969da } dt { margin-top: 12px; max-width: 900px } dl { margin: 0 }
.chart { overflow-x: auto; margin-top: 12px }
@media (max-width: 900px) {
  .chart { overflow-x: visible } .vega-embed { width: 100% } svg { max-width: 100%; height: auto }
}
@media (prefers-color-scheme: dark) {
  body { background: #191919; color: #e6e6e6 } p, dd { color: #a9b1ba } a { color: #6cb0ff }
  .chart { filter: invert(0.9) hue-rotate(180deg) }
}
"""
SCRIPT = """
const phone = matchMedia("(max-width: 900px)");
const dark = matchMedia("(prefers-color-scheme: dark)");
const hasValue = ([, value]) => !["", "null", "undefined", "NaN"].includes(String(value));
const line = (text) => ([key, value]) =>
  `<tr><td class="key">${text(key)}</td><td class="value">${text(value)}</td></tr>`;
const formatTooltip = (value, text) => typeof value !== "object" ? text(value)
  : `<table>${Object.entries(value).filter(hasValue).map(line(text)).join("")}</table>`;
function show() {
  const chart = {...(phone.matches ? charts.phone : charts.screen), datasets: charts.datasets};
  const menu = {export: true, source: false, compiled: false, editor: false};
  const actions = phone.matches ? false : menu;
  const tooltip = {theme: dark.matches ? "dark" : "light", formatTooltip};
  vegaEmbed("#chart", chart, {renderer: "svg", actions, tooltip});
}
phone.addEventListener("change", show);
dark.addEventListener("change", show);
show();
"""
PADDING = {"left": 0, "top": 4, "right": 40, "bottom": 12}  # px; right for the chart's menu
PHONE_PADDING = {"left": 0, "top": 4, "right": 0, "bottom": 12}
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
    <meta charset="UTF-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="color-scheme" content="light dark">
    <title>tnp: {title}</title>
    <style>{style}</style>
</head>
<body>
{body}
</body>
</html>
"""


def page(name: str, screen: dict[str, Any], phone: dict[str, Any]) -> str:
    """Returns the page of figure `name`: its title and subtitle as text that wraps, and the chart.

    The browser draws the specification that fits its window.
    """
    heading = screen["title"]
    charts = {
        "screen": _untitled(screen) | {"padding": PADDING},
        "phone": _untitled(phone) | {"padding": PHONE_PADDING},
        "datasets": screen.get("datasets", {}) | phone.get("datasets", {}),
    }
    data = json.dumps(charts, ensure_ascii=False, separators=(",", ":")).replace("</", "<\\/")
    return _page(
        name,
        f"{_navigation(name)}\n"
        f"<h1>{html.escape(' '.join(heading['text']))}</h1>\n"
        f"<p>{html.escape(' '.join(heading.get('subtitle', [])))}</p>\n"
        '<div class="chart"><div id="chart"></div></div>\n'
        f"<script>{_library()}</script>\n"
        f"<script>const charts = {data};{SCRIPT}</script>",
    )


def index(sentences: dict[str, str], findings: dict[str, str], drawn: Collection[str]) -> str:
    """Returns a page that leads through the figures, with a finding and a description of each.

    It links to figures that are `drawn`, and says how to draw the others.
    """
    parts = ["<h1>Training Transformer Neural Processes: what was measured</h1>"]
    parts.append(
        "<p>Figures answer each question; a figure's title gives its answer. “Plain PyTorch” is "
        "the model as one would first write it. “PyTorch's best” has every saving that PyTorch "
        "offers. “Ours” runs this project's kernels. All figures are drawn from the rows in this "
        "repository and the rows of this machine.</p>"
    )
    for question, figures in STORY.items():
        parts.append(f"<h2>{question}</h2>\n<dl>")
        for name in figures:
            finding = html.escape(findings.get(name, f"{name} could not be drawn"))
            about = html.escape(sentences[name])
            if name in drawn:
                finding = f'<a href="{name}.html">{finding}</a>'
            else:
                about += f" To draw it: <code>snakemake --cores 1 figures/{name}.html</code>"
            parts.append(f"<dt>{finding}</dt>\n<dd>{name}: {about}</dd>")
        parts.append("</dl>")
    return _page("figures", "\n".join(parts))


def _page(title: str, body: str) -> str:
    return PAGE.format(title=title, style=STYLE, body=body)


def _navigation(name: str) -> str:
    """Returns links to the index and to the next figure."""
    links = '<a href="index.html">All figures</a>'
    for following in FIGURES[FIGURES.index(name) + 1 :][:1]:
        links += f'<a href="{following}.html">Next: {following} →</a>'
    return f"<nav>{links}</nav>"


def _untitled(specification: dict[str, Any]) -> dict[str, Any]:
    """Removes the title, which the page shows, and the rows, which both specifications share."""
    return {key: value for key, value in specification.items() if key not in ("title", "datasets")}


@functools.cache
def _library() -> str:
    return vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
