"""The loss in float32 against float64, to the extremes training can reach."""

import math

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, Normal

from tnp.ops.mixture_nll import mixture_nll


def draw(n=50, n_components=10, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    p = torch.randn(n, n_components, 3, generator=generator, dtype=dtype)
    return p, torch.randn(n, 1, generator=generator, dtype=dtype)


def test_is_the_mixtures_log_probability():
    p, y = draw()
    mixture = MixtureSameFamily(Categorical(logits=p[..., 0]), Normal(p[..., 1], p[..., 2].exp()))
    torch.testing.assert_close(mixture_nll(p, y), -mixture.log_prob(y[:, 0]).mean())


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e4])
@pytest.mark.parametrize("sigma", [1e-6, 1.0, 1e6])
def test_float32_is_stable(scale, sigma):
    p, y = draw()
    p[..., 0] *= scale
    p[..., 2] += math.log(sigma)
    exact_parameters = p.float().double().requires_grad_()
    exact = mixture_nll(exact_parameters, y.float().double())
    exact.backward()
    parameters = p.float().requires_grad_()
    loss = mixture_nll(parameters, y.float())
    loss.backward()
    assert parameters.grad.isfinite().all()
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        parameters.grad.double(), exact_parameters.grad, rtol=1e-3, atol=1e-4
    )


def test_floor_under_sigma_bounds_the_density():
    p, y = draw()
    p[..., 2] = -50.0
    p[..., 1] = y
    assert mixture_nll(p, y) < -40
    floor = -math.log(0.01) - 0.5 * math.log(2 * math.pi)
    torch.testing.assert_close(-mixture_nll(p, y, sigma_min=0.01).item(), floor)


def test_gradient_is_right():
    p, y = draw(n=4, n_components=3)
    assert torch.autograd.gradcheck(lambda p: mixture_nll(p, y, 0.1), p.requires_grad_())
