"""Tests the public function: autograd, plans, PyTorch's forms. The gate compares our kernels."""

import math
import threading

import pytest
import torch

from tests.ops.problems import DEVICE, setting
from tnp.dispatch import plans
from tnp.gates.checks import max_abs_error
from tnp.ops.attention import OPERATOR, attention


def leaves(n_k: int) -> list[torch.Tensor]:
    """Returns q, k and v in bfloat16, that ask for gradients."""
    sizes = {"batch": 1, "n_heads": 2, "n_q": 70, "n_k": n_k, "head_dim": 16}
    inputs = setting(OPERATOR, "fused", "bfloat16", **sizes).inputs
    return [inputs[name].detach().requires_grad_() for name in "qkv"]


def run(inputs, do, implementation: str) -> tuple[torch.Tensor, ...]:
    """Returns o, dq, dk, dv through the public function and autograd."""
    o = attention(*inputs, implementation=implementation)
    return (o.detach(), *torch.autograd.grad(o, inputs, do))


def test_the_backward_runs_from_another_thread():
    inputs = leaves(20)
    o = attention(*inputs, implementation="fused")
    do = torch.randn_like(o)
    gradients = []
    thread = threading.Thread(target=lambda: gradients.extend(torch.autograd.grad(o, inputs, do)))
    thread.start()
    thread.join()
    here = run(inputs, do, "fused")[1:]
    assert len(gradients) == 3
    for gradient, expected in zip(gradients, here, strict=True):
        assert max_abs_error(gradient, expected) <= 1e-2 * expected.abs().max()


def test_a_plan_says_what_it_runs():
    inputs = *leaves(15), None, None, None
    plan = plans.build(OPERATOR, "fused", inputs, (), ("q", "k", "v"))
    plan.run(inputs, (0.125,)).sum().backward()
    assert set(plan.choices) == {"attention.forward", "attention.fused"}
    assert {chosen["choice"] for chosen in plan.choices.values()} == {"few_keys"}


@pytest.mark.parametrize("scale", [None, 1e-3])
def test_pytorchs_flash_gives_padding_no_weight_and_no_gradient(scale):
    """It takes no mask: a dimension of the head stands in for it."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 2, n, 16, generator=generator) for n in (11, 9, 9))
    n_keys, found = torch.tensor([9, 4, 1], dtype=torch.int32), []
    for implementation in ("sdpa_flash", "reference"):
        inputs = [x.clone().requires_grad_() for x in (q, k, v)]
        o = attention(*inputs, n_keys=n_keys, scale=scale, implementation=implementation)
        found.append([o, *torch.autograd.grad(o.square().sum(), inputs)])
    for flash, reference in zip(*found, strict=True):
        torch.testing.assert_close(flash, reference)
    for gradient in found[0][2:]:
        assert (gradient[1, :, 4:] == 0).all() and (gradient[2, :, 1:] == 0).all()


@pytest.mark.parametrize("implementation", ["sdpa_flash", "reference"])
def test_queries_that_carry_the_scale(implementation):
    """Compares with scaled products, and gradients by the chain rule. The gate compares ours."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, do = (
        torch.randn(2, 2, n, 16, generator=generator).to(DEVICE) for n in (33, 40, 40, 33)
    )
    factor = math.log2(math.e) / 4
    expected = run([x.requires_grad_() for x in (q, k, v)], do, implementation)
    carrying = (q.detach() * factor).requires_grad_()
    o = attention(carrying, k, v, base2=True, implementation=implementation)
    dq, dk, dv = torch.autograd.grad(o, (carrying, k, v), do)
    for found, right in zip((o, dq * factor, dk, dv), expected, strict=True):
        assert max_abs_error(found, right) <= 1e-5 * right.abs().max()


@pytest.mark.skipif(DEVICE.type == "cuda", reason="has a CUDA device")
def test_an_implementation_that_cannot_run_says_why():
    x = torch.zeros(1, 2, 8, 64)
    with pytest.raises(RuntimeError, match="'sdpa_cudnn' cannot run here: cuDNN needs a CUDA"):
        attention(x, x, x, implementation="sdpa_cudnn")
