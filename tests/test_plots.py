"""Pictures of predictions hold what was predicted, and say what they cannot draw."""

import pytest
import torch

from tests.model.test_transformer_np import build, make_task
from tnp.model.config import TNPConfig
from tnp.plots import plot_curve, plot_image


def test_a_curve_shows_band_mean_samples_and_the_samples_own_context():
    model, task = build(), make_task()
    prediction = model.predict(task.context, task.x_target)
    lengths = torch.tensor([7, 3], dtype=torch.int32)
    context = task.context._replace(lengths=lengths)
    drawn = model.sample_jointly(task.context, task.x_target, n_samples=2)
    chart = plot_curve(context, task.x_target, prediction, drawn, sample=1).to_dict()
    band, *lines, mean, dots = (layer["data"]["values"] for layer in chart["layer"])
    assert len(dots) == 3 and len(lines) == 2 and len(mean) == 5
    for row, low, value in zip(
        band, prediction.quantile(0.025)[1, :, 0], prediction.mean[1, :, 0], strict=True
    ):
        assert row["low"] == pytest.approx(low.item()) and row["low"] < row["high"]
        assert row["mean"] == pytest.approx(value.item())


def test_an_image_shows_context_mean_and_deviation():
    config = TNPConfig(d_x=2, d_model=32, n_layers=1, n_heads=2, d_ff=21, n_components=2)
    model, task = build(config), make_task(config)
    prediction = model.predict(task.context, task.x_target)
    chart = plot_image(task.context, task.x_target, prediction).to_dict()
    context, mean, deviation = (panel["data"]["values"] for panel in chart["hconcat"])
    assert (len(context), len(mean), len(deviation)) == (7, 5, 5)
    assert deviation[2]["value"] == pytest.approx(prediction.variance[0, 2, 0].sqrt().item())
    with pytest.raises(ValueError, match="this plot is for d_x 1; plot_image is for 2"):
        plot_curve(task.context, task.x_target, prediction)
