"""Compares predictions far from zero with float64, and refuses y of another shape."""

import math

import pytest
import torch
from torch.distributions import Normal

from tests.model.test_prediction import parameters
from tnp.model.prediction import Prediction
from tnp.tasks.normalization import Normalization


@pytest.mark.parametrize("offset", [0.0, 300.0, 5.3e6, 1e9])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e6])
def test_a_prediction_is_exact_at_any_offset_and_scale(offset, scale):
    """All but y itself, of which float64 resolves `grain` deviations, within 1e-12."""
    p = parameters(d_y=2)
    prediction = Prediction(p, 0.0, Normalization([0.0], [1.0], [offset] * 2, [scale] * 2))
    weights = p[..., 0].double().softmax(-1)[..., None]
    mu, log_sigma = p[..., 1:].double().chunk(2, -1)
    mu, sigma = scale * mu, scale * log_sigma.exp()  # without the offset, which float64 rounds
    grain = 4e-16 * (offset / scale + 10)
    mean = (weights * mu).sum(-2)
    variance = (weights * (sigma**2 + (mu - mean[..., None, :]) ** 2)).sum(-2)
    assert ((prediction.mean - offset - mean) / scale).abs().max() < grain
    torch.testing.assert_close(prediction.variance, variance, rtol=1e-12, atol=0)
    torch.testing.assert_close(prediction.stddev, variance.sqrt(), rtol=1e-12, atol=0)
    generator = torch.Generator().manual_seed(1)
    y = offset + scale * torch.randn(2, 4, 2, generator=generator, dtype=torch.float64)
    z = ((y - offset)[..., None, :] - mu) / sigma
    log_density = (-0.5 * z**2 - sigma.log() - 0.5 * math.log(2 * math.pi)).sum(-1)
    expected = (weights[..., 0].log() + log_density).logsumexp(-1)
    torch.testing.assert_close(prediction.log_prob(y), expected, rtol=1e-12, atol=1e-12)
    cdf = (weights * Normal(0.0, 1.0).cdf(z)).sum(-2)
    torch.testing.assert_close(prediction.marginal_cdf(y), cdf, rtol=1e-12, atol=1e-12)
    found = prediction.marginal_cdf(prediction.quantile(0.025))
    # The steepest density is 1 / (smallest deviation · √2π): what a grain of y changes of the CDF.
    budget = 1e-12 + grain * scale / sigma.min()
    torch.testing.assert_close(found, torch.full_like(found, 0.025), rtol=0, atol=float(budget))
    torch.manual_seed(0)
    drawn = prediction.sample((5000,)) - offset
    assert drawn.shape == (5000, 2, 4, 2)
    assert ((drawn.mean(0) - mean).abs() < 5 * variance.sqrt() / math.sqrt(5000)).all()
    torch.testing.assert_close(drawn.var(0), variance, rtol=0.3, atol=0.02 * scale**2)


def test_y_of_another_shape_or_kind_is_one_sentence():
    for n in (1, 4):  # as many samples as targets, where a y of [B, N] would be spread
        p = torch.randn(n, 4, 3, 3)
        prediction, y = Prediction(p), torch.randn(n, 4, 1)
        for function in (prediction.log_prob, prediction.marginal_cdf):
            for other in (y[..., 0], y[0, :, 0], y.expand(n, 4, 2), y[:, :3]):
                with pytest.raises(ValueError, match=r"^y is \[.*\]: it must be \[., 4, 1\], B, N"):
                    function(other)
            for other in (y.tolist(), y.to(torch.complex64), y.numpy().astype("datetime64[s]")):
                with pytest.raises(
                    TypeError, match="^y .*: it must be a tensor or an array of real"
                ):
                    function(other)
            assert torch.equal(function(y.double().numpy()), function(y))
            assert torch.equal(function(y.expand(5, n, 4, 1))[3], function(y))


def test_a_prediction_outlives_a_move_of_its_model():
    units = Normalization([0.0], [1.0], [300.0], [5.0])
    prediction = Prediction(parameters(), 0.0, units)
    units.to("meta")
    assert 250 < prediction.mean.mean() < 350 and prediction.sample().isfinite().all()


def test_nan_stays_where_it_is():
    p, y = parameters(), torch.zeros(2, 4, 1)
    p[0, 1] = y[1, 2] = float("nan")
    prediction = Prediction(p)
    for found in (prediction.mean, prediction.variance, prediction.quantile(0.5)):
        assert found.isnan().nonzero().tolist() == [[0, 1, 0]]
    for found in (prediction.log_prob(y), prediction.marginal_cdf(y)[..., 0]):
        assert found.isnan().nonzero().tolist() == [[0, 1], [1, 2]]
