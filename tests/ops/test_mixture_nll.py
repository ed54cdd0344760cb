"""Tests the loss in float32 against float64, to the extremes training can reach."""

import math

import pytest
import torch
from torch.distributions import Categorical, MixtureSameFamily, Normal

from tests.ops.problems import DEVICE
from tnp.dispatch import plans
from tnp.ops.mixture_nll import OPERATOR, mixture_nll


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
    assert torch.autograd.gradcheck(lambda p: mixture_nll(p, y, sigma_min=0.1), p.requires_grad_())


def test_a_component_out_of_range_has_gradient_zero():
    """z² overflows float32 in one component of two: the other alone counts."""
    p = torch.tensor([[[0.0, 0.0, 0.0], [0.0, 1.0, -50.0]]], device=DEVICE, requires_grad=True)
    y = torch.full((1, 1), 0.5, device=DEVICE, requires_grad=True)
    results = []
    for name in ("fused", "torch"):
        loss = mixture_nll(p, y, implementation=name)
        results.append((loss, *torch.autograd.grad(loss, (p, y))))
    for ours, own in zip(*results, strict=True):
        assert ours.isfinite().all()
        torch.testing.assert_close(ours, own)


@pytest.mark.parametrize("implementation", ["torch", "fused"])
def test_padding_may_hold_anything_and_has_no_gradient(implementation):
    generator = torch.Generator(DEVICE).manual_seed(0)
    p = torch.randn(3, 7, 2, 3, device=DEVICE, generator=generator)
    y = torch.randn(3, 7, 1, device=DEVICE, generator=generator)
    numbers = [7, 3, 0]
    alone = [mixture_nll(p[b, :n].double(), y[b, :n].double()) for b, n in enumerate(numbers) if n]
    expected = (7 * alone[0] + 3 * alone[1]) / 10
    for b, n in enumerate(numbers):
        p[b, n:], y[b, n:] = float("nan"), float("inf")
    n_targets = torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
    p, y = p.requires_grad_(), y.requires_grad_()
    loss = mixture_nll(p, y, n_targets=n_targets, implementation=implementation)
    torch.testing.assert_close(loss, expected.float())
    for gradient in torch.autograd.grad(loss, (p, y)):
        for b, n in enumerate(numbers):
            assert gradient[b, :n].isfinite().all() and (gradient[b, n:] == 0).all()


def test_a_nan_is_not_hidden():
    for at in range(3):
        p, y = (x.float().to(DEVICE) for x in draw(n=5, n_components=3))
        p[2, 1, at] = float("nan")
        assert mixture_nll(p, y, implementation="fused").isnan(), at


def test_only_requested_gradients_are_computed():
    p, y = (x.float().to(DEVICE) for x in draw(n=5))
    found = []
    for wanted in ((), ("y",), ("parameters",), ("parameters", "y")):
        plan = plans.build(OPERATOR, "fused", (p, y, None), wanted=wanted)
        (loss,), (dparameters, dy) = plan.forward((p, y, None), (0.0,))
        assert (dparameters.shape == p.shape, dy.shape == y.shape) == (
            "parameters" in wanted, "y" in wanted,
        )  # fmt: skip
        found.append(loss.item())
    assert len(set(found)) == 1


def test_a_floor_of_another_height_needs_no_other_plan():
    """sigma_min is a number of the call; whether there is a floor is a part of the problem."""
    p, y = (x.float().to(DEVICE) for x in draw(n=5))
    for sigma_min in (0.0, 0.5, 0.1, 0.0):
        ours, own = (
            mixture_nll(p, y, sigma_min=sigma_min, implementation=x) for x in ("fused", "torch")
        )
        torch.testing.assert_close(ours, own)
