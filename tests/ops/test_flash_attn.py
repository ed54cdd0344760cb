"""Tests the function with the arguments of flash-attn against formulas of its documentation."""

import pytest
import torch

from tnp.dispatch import devices
from tnp.ops.attention import attention
from tnp.ops.attention.flash_attn import flash_attn_func

N_Q, N_K = 7, 11


@pytest.fixture
def inputs() -> tuple[torch.Tensor, ...]:
    """Returns q, k and v as flash-attn takes them, with heads that share keys."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, N_Q, 4, 16), (2, N_K, 2, 16), (2, N_K, 2, 16)
    return tuple(torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes)


def expected(q, k, v, scale, left, right):
    """Computes flash-attn's window: keys from i + n_k − n_q − left to i + n_k − n_q + right."""
    k, v = (x.repeat_interleave(2, 2) for x in (k, v))
    scores = scale * torch.einsum("bqhd,bkhd->bhqk", q, k)
    distance = torch.arange(N_K)[None] - torch.arange(N_Q)[:, None] - (N_K - N_Q)
    seen = (distance >= -left) & (distance <= right)
    scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1)


@pytest.mark.parametrize(
    ("arguments", "left", "right"),
    [
        ({}, 99, 99),
        ({"causal": True}, 99, 0),
        ({"causal": True, "window_size": (3, 5)}, 3, 0),
        ({"window_size": (-1, 0)}, 99, 0),
        ({"window_size": (3, 0)}, 3, 0),
        ({"window_size": [2, 2]}, 2, 2),
        ({"softmax_scale": 0.5, "deterministic": True}, 99, 99),
    ],
)
def test_it_computes_what_flash_attn_documents(inputs, arguments, left, right):
    scale = arguments.get("softmax_scale", 0.25)
    o, lse, none = flash_attn_func(*inputs, **arguments, return_attn_probs=True,
                                   implementation="separate")  # fmt: skip
    exact, exact_lse = expected(*inputs, scale, left, right)
    torch.testing.assert_close(o, exact)
    torch.testing.assert_close(lse, exact_lse)
    assert none is None and o.shape == inputs[0].shape
    gradients = torch.autograd.grad(o.square().sum(), inputs)
    for given, right_one in zip(
        gradients, torch.autograd.grad(exact.square().sum(), inputs), strict=True
    ):
        torch.testing.assert_close(given, right_one, atol=1e-4, rtol=1e-4)


def test_by_default_it_is_what_auto_chooses(inputs):
    q, k, v = (x.transpose(1, 2) for x in inputs)
    own = attention(q, k, v, implementation="auto").transpose(1, 2)
    torch.testing.assert_close(flash_attn_func(*inputs), own, atol=0, rtol=0)


@pytest.mark.parametrize(
    "asked",
    [{"return_attn_probs": True}, {"deterministic": True, "causal": True}],
    ids=["logarithms", "deterministic"],
)
def test_the_cpu_takes_the_reference_where_auto_finds_nothing(inputs, asked, monkeypatch):
    monkeypatch.setitem(devices._seen, torch.device("cpu"), devices.CPU)
    inputs = [x[:, :5] for x in inputs]  # a size without a plan for the interpreter
    given = flash_attn_func(*inputs, **asked)
    named = flash_attn_func(*inputs, **asked, implementation="reference")
    torch.testing.assert_close(given, named, atol=0, rtol=0)
    with pytest.raises(ValueError, match="only 'reference' promises equal gradients here"):
        flash_attn_func(*inputs, deterministic=True, implementation="separate")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"dropout_p": 0.1}, "dropout_p is 0.1: it must be 0"),
        ({"softcap": 30.0}, "softcap is 30.0: it must be 0"),
        ({"alibi_slopes": torch.ones(4)}, "alibi_slopes are given: they must be None"),
        ({"window_size": (3, 5)}, r"window_size is \(3, 5\): without causal both sides"),
        ({"window_size": 3}, "window_size is 3: it must be two whole numbers"),
        ({"window_size": (-2, 0)}, "it must be two whole numbers, each at least -1"),
        ({"causal": 1}, "causal is 1: it must be True or False"),
        ({"deterministic": True, "implementation": "fused"}, "only 'separate' promises"),
    ],
)
def test_what_it_does_not_take_is_one_sentence(inputs, arguments, said):
    with pytest.raises(ValueError, match=said):
        flash_attn_func(*inputs, **arguments)
    with pytest.raises(ValueError, match=r"must be \[B, T, H, D\]"):
        flash_attn_func(inputs[0][0], *inputs[1:])
