"""Operators of ours behind something that passes no gradient on."""

import pytest
import torch

from tnp.ops.attention import attention
from tnp.ops.mixture_heads import mixture_heads
from tnp.ops.mixture_nll import mixture_nll
from tnp.ops.mlp import mlp
from tnp.ops.projection import linear, project_qkv
from tnp.ops.rms_norm import add_rms_norm, rms_norm


class Silent(torch.autograd.Function):
    """The identity, with no gradient at all."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return None


def operators():
    x, weight = torch.randn(2, 5, 32), torch.randn(32, 32)
    q = torch.randn(2, 2, 5, 16)
    heads = torch.randn(3, 16, 32), torch.randn(3, 3, 16)
    return {
        "attention": lambda x_: attention(q * x_, q, q, implementation="fused"),
        "rms_norm": lambda x_: rms_norm(x * x_, weight[0], implementation="fused"),
        "add_rms_norm": lambda x_: add_rms_norm(x * x_, x, weight[0], implementation="fused")[1],
        "linear": lambda x_: linear(x * x_, weight, implementation="fused"),
        "project_qkv": lambda x_: project_qkv(
            x * x_, torch.randn(96, 32), 2, implementation="fused"
        )[0],
        "mlp": lambda x_: mlp(x * x_, weight, weight, implementation="fused"),
        "mixture_heads": lambda x_: mixture_heads(x * x_, *heads, implementation="fused"),
        "mixture_nll": lambda x_: mixture_nll(
            torch.randn(2, 5, 3, 3) * x_, torch.randn(2, 5, 1), implementation="fused"
        ),
    }


@pytest.mark.parametrize("name", operators())
def test_no_gradient_comes_of_none(name):
    scale = torch.ones((), requires_grad=True)
    (Silent.apply(operators()[name](scale)).sum() + scale).backward()
    # Nothing, or zeros: what autograd puts in place of a gradient that is not there.
    assert scale.grad == 1.0
