"""HTML around the charts: read on a phone, in the dark and without a network."""

import html
from typing import Any

import vl_convert

# Charts are drawn for light pages. In the dark they are inverted and their hues turned back.
STYLE = """
body { margin: 0; padding: 16px; background: white; color: #1f2328; max-width: 1248px;
       font-family: Helvetica, Arial, "Liberation Sans", sans-serif; line-height: 1.4 }
h1 { font-size: 21px; margin: 8px 0 } p { font-size: 14px; margin: 4px 0; color: #59636e }
nav, a { font-size: 14px; color: #0969da } li { margin: 8px 0 }
.chart { overflow-x: auto; margin-top: 12px }
@media (prefers-color-scheme: dark) {
  body { background: #191919; color: #e6e6e6 } p { color: #a9b1ba } nav, a { color: #6cb0ff }
  .chart { filter: invert(0.9) hue-rotate(180deg) }
}
"""
PADDING = {"left": 0, "top": 4, "right": 40, "bottom": 12}  # px; right for the chart's menu
HEAD = """<meta charset="UTF-8">
    <meta name="viewport" content="width=device-width, initial-scale=1">
    <meta name="color-scheme" content="light dark">
    <title>tnp: {title}</title>
    <style>{style}</style>"""


def page(name: str, specification: dict[str, Any]) -> str:
    """The page of figure `name`: its title and subtitle as text that wraps, under them the chart.

    On a narrow screen the chart keeps its size and scrolls beside the text.
    """
    heading = specification["title"]
    rest = {key: value for key, value in specification.items() if key != "title"} | {
        "padding": PADDING
    }
    written = vl_convert.vegalite_to_html(rest, bundle=True, renderer="svg")
    drawn = '<div id="vega-chart"></div>'
    before, after = written.rsplit(drawn, 1)
    heading_text = (
        '<nav><a href="index.html">All figures</a></nav>\n'
        f"<h1>{html.escape(' '.join(heading['text']))}</h1>\n"
        f"<p>{html.escape(' '.join(heading.get('subtitle', [])))}</p>\n"
    )
    written = f'{before}{heading_text}<div class="chart">{drawn}</div>{after}'
    head = HEAD.format(title=name, style=STYLE)
    return written.replace('<meta charset="UTF-8">', head, 1).replace("<title>Chart</title>", "", 1)


def index(sentences: dict[str, str]) -> str:
    """A page of links from {figure: what it shows}."""
    items = "".join(
        f'<li><a href="{name}.html">{name}</a>: {html.escape(sentence)}</li>\n'
        for name, sentence in sentences.items()
    )
    head = HEAD.format(title="figures", style=STYLE)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n    {head}\n</head>\n<body>\n'
        f"<h1>Figures of tnp</h1>\n<ul>\n{items}</ul>\n</body>\n</html>\n"
    )
