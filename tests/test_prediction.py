"""The predictive distribution against closed forms and numerical integrals."""

import math

import pytest
import torch
from torch.distributions import Normal

from tnp.ops.mixture_nll import mixture_nll
from tnp.prediction import Prediction


def parameters(d_y=1, n_components=3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, n_components, 1 + 2 * d_y, generator=generator)


def test_one_component_is_a_gaussian():
    p = parameters(n_components=1)
    exact = Normal(p[..., 0, 1:2], p[..., 0, 2:3].exp())
    prediction = Prediction(p)
    torch.testing.assert_close(prediction.mean, exact.mean)
    torch.testing.assert_close(prediction.variance, exact.variance)
    for probability in (0.01, 0.5, 0.975):
        torch.testing.assert_close(
            prediction.quantile(probability),
            exact.icdf(torch.tensor(probability)),
            rtol=1e-4,
            atol=1e-4,
        )


@pytest.mark.parametrize("d_y", [1, 3])
def test_log_prob_is_the_loss(d_y):
    p, y = parameters(d_y), torch.randn(2, 4, d_y)
    prediction = Prediction(p, sigma_min=0.1)
    torch.testing.assert_close(-prediction.log_prob(y).mean(), mixture_nll(p, y, sigma_min=0.1))


def test_density_integrates_to_one_and_quantiles_invert_the_cdf():
    prediction = Prediction(parameters())
    grid = torch.linspace(-60, 60, 40_001)
    density = torch.stack([prediction.log_prob(y.expand(2, 4, 1)).exp() for y in grid[::20]])
    mass = torch.trapezoid(density, grid[::20], dim=0)
    torch.testing.assert_close(mass, torch.ones(2, 4), rtol=1e-2, atol=1e-2)
    for probability in (0.05, 0.5, 0.9):
        y = prediction.quantile(probability)
        torch.testing.assert_close(
            prediction.marginal_cdf(y), torch.full_like(y, probability), rtol=1e-4, atol=1e-4
        )


def test_samples_have_the_mean_and_variance():
    torch.manual_seed(0)
    prediction = Prediction(parameters(d_y=2))
    samples = prediction.sample((20_000,))
    assert samples.shape == (20_000, 2, 4, 2)
    standard_error = prediction.variance.sqrt() / math.sqrt(20_000)
    assert ((samples.mean(0) - prediction.mean).abs() < 5 * standard_error).all()
    torch.testing.assert_close(samples.var(0), prediction.variance, rtol=0.2, atol=0.02)


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.1, 2.0])
def test_probability_outside_the_unit_interval_raises(probability):
    with pytest.raises(ValueError, match="between 0 and 1"):
        Prediction(parameters()).quantile(probability)
