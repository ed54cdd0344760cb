"""Plots predictions in Altair: a curve with its band for d_x = 1, pictures for d_x = 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tnp.model.prediction import Prediction
from tnp.tasks.task import Context
from tnp.util.extras import require

if TYPE_CHECKING:
    import altair as alt

LEVELS = 0.025, 0.975  # quantiles of the band
LINE, BAND, KNOWN = "#0072b2", "#56b4e9", "#d55e00"  # blues and vermilion of Okabe and Ito
WIDTH, HEIGHT = 560, 320  # px
SIDE = 220  # px of a picture
UNKNOWN = "#f6e7cf"  # the colour between known points, which are grey


def plot_curve(
    context: Context,
    x_target: torch.Tensor,
    prediction: Prediction,
    samples: torch.Tensor | None = None,
    sample: int = 0,
    output: int = 0,
) -> alt.LayerChart:
    """Returns a chart of mean, 95 % band and context points over x. chart.save("curve.html") saves
    it.

    Args:
        context: the context of the prediction, with d_x = 1.
        x_target: [B, N, 1], in any order.
        prediction: the prediction at x_target.
        samples: [S, B, N, d_y], from `TransformerNP.sample_jointly`. Each is a thin line.
        sample: which sample of the batch to plot.
        output: which of the d_y values to plot.

    Raises:
        ImportError: altair is not installed.
        ValueError: d_x is not 1.
    """
    alt = require("altair", "plots", "plot")
    _require_dimensions(x_target, 1, "plot_image")
    low, high = (prediction.quantile(level)[sample, :, output] for level in LEVELS)
    x, mean = x_target[sample, :, 0], prediction.mean[sample, :, output]
    rows = _rows(x=x, mean=mean, low=low, high=high)
    over_x = alt.X("x:Q", title="x", scale=alt.Scale(zero=False, nice=False))
    chart = alt.Chart(alt.Data(values=rows)).encode(x=over_x)
    y = alt.Y("low:Q", title="y", scale=alt.Scale(zero=False))
    layers = [chart.mark_area(color=BAND, opacity=0.35).encode(y=y, y2="high:Q")]
    for i, drawn in enumerate([] if samples is None else samples[:, sample, :, output]):
        line = alt.Chart(alt.Data(values=_rows(x=x, y=drawn))).encode(x=over_x, y="y:Q")
        layers.append(
            line.mark_line(color=LINE, opacity=0.45, strokeWidth=1, strokeDash=[4, i % 3])
        )
    layers.append(chart.mark_line(color=LINE, strokeWidth=2).encode(y="mean:Q"))
    n = context.x.shape[1] if context.lengths is None else int(context.lengths[sample])
    points = _rows(x=context.x[sample, :n, 0], y=context.y[sample, :n, output])
    seen = alt.Chart(alt.Data(values=points)).encode(x=over_x, y="y:Q", tooltip=["x:Q", "y:Q"])
    layers.append(seen.mark_point(color=KNOWN, filled=True, size=45, opacity=1))
    title = "Context (dots), mean and 95 % band" + (" with joint samples" * (samples is not None))
    return alt.layer(*layers).properties(width=WIDTH, height=HEIGHT, title=title)


def plot_image(
    context: Context,
    x_target: torch.Tensor,
    prediction: Prediction,
    sample: int = 0,
    output: int = 0,
) -> alt.HConcatChart:
    """Returns a chart of context, mean and deviation over the plane. x is (row, column), d_x = 2.

    Arguments and errors are those of `plot_curve`, with d_x = 2.
    """
    alt = require("altair", "plots", "plot")
    _require_dimensions(x_target, 2, "plot_curve")
    n = context.x.shape[1] if context.lengths is None else int(context.lengths[sample])
    known = context.x[sample, :n], context.y[sample, :n, output].double()
    at, mean = x_target[sample], prediction.mean[sample, :, output]
    deviation = prediction.stddev[sample, :, output]
    values = torch.cat([known[1], mean])
    grey = alt.Scale(
        scheme="greys", domain=[values.min().item(), values.max().item()], reverse=True
    )  # large values are light
    size = SIDE**2 / len(at)  # as if the targets filled the plane
    panels = [
        _picture(title, *points, scale, size)
        for title, points, scale in (
            ("context", known, grey),
            ("mean", (at, mean), grey),
            ("deviation", (at, deviation), alt.Scale(scheme="blues")),
        )
    ]
    return alt.hconcat(*panels).resolve_scale(color="independent")


def _picture(
    title: str, x: torch.Tensor, values: torch.Tensor, scale: alt.Scale, size: float
) -> alt.Chart:
    """Draws a square of `size` px² for each point x [n, 2]."""
    alt = require("altair", "plots", "plot")
    rows = _rows(row=x[:, 0], column=x[:, 1], value=values)
    across, down = (
        alt.Scale(zero=False, nice=False, reverse=reverse, padding=size**0.5 / 2)
        for reverse in (False, True)
    )
    chart = alt.Chart(alt.Data(values=rows), title=title).mark_square(size=size, opacity=1)
    return chart.encode(
        x=alt.X("column:Q", scale=across, axis=None),
        y=alt.Y("row:Q", scale=down, axis=None),
        color=alt.Color("value:Q", scale=scale, title=None),
    ).properties(width=SIDE, height=SIDE, view=alt.ViewBackground(fill=UNKNOWN))


def _require_dimensions(x: torch.Tensor, d_x: int, other: str) -> None:
    if x.shape[-1] != d_x:
        raise ValueError(
            f"x_target is {tuple(x.shape)}: this plot is for d_x {d_x}; {other} is for {3 - d_x}"
        )


def _rows(**columns: torch.Tensor) -> list[dict[str, float]]:
    values = [column.double().cpu().tolist() for column in columns.values()]
    return [dict(zip(columns, row, strict=True)) for row in zip(*values, strict=True)]
