"""Rotary embedding: pairings, positions, heads, layouts, routes. The operators' gate compares
numbers with float64.
"""

import pytest
import torch

from tests.ops.launched import reads, recorded
from tnp.ops.rope import PAIRINGS, rope


def tables(n_positions, head_dim, theta=100.0):
    frequencies = theta ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles = torch.arange(n_positions)[:, None] * frequencies
    return angles.cos(), angles.sin()


def draw(batch=2, heads=4, kv_heads=2, n_tokens=5, head_dim=16):
    """q and k as views of one projection."""
    projection = torch.randn(batch, n_tokens, heads + 2 * kv_heads, head_dim)
    q, k, _v = projection.split((heads, kv_heads, kv_heads), dim=2)
    return q.transpose(1, 2).requires_grad_(), k.transpose(1, 2).requires_grad_()


def results(function, q, k, *rest, **named):
    """Both outputs, and gradients of a weighted sum of them."""
    outputs = function(q, k, *rest, **named)
    weights = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in outputs]
    loss = sum((x * weight).sum() for x, weight in zip(outputs, weights, strict=True))
    return *(x.detach() for x in outputs), *torch.autograd.grad(loss, (q, k))


def ours(*arguments, **named):
    return rope(*arguments, **named, implementation="triton")


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_a_pair_is_a_complex_number_times_a_rotation(pairing):
    """Not the reference's formula, but the paper's."""
    q, k = draw(1, 2, 1, 3, 6)
    cos, sin = tables(3, 6)
    turn = torch.complex(cos, sin)
    for implementation in ("torch", "triton"):
        found = rope(q, k, cos, sin, pairing=pairing, implementation=implementation)
        for x, y in zip((q, k), found, strict=True):
            pairs = [(i, i + 3) if pairing == "half" else (2 * i, 2 * i + 1) for i in range(3)]
            a, b = ([pair[at] for pair in pairs] for at in (0, 1))
            want = torch.complex(x[..., a], x[..., b]) * turn
            torch.testing.assert_close(torch.complex(y[..., a], y[..., b]), want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_positions(dtype):
    q, k = draw()
    cos, sin = tables(40, 16)
    positions = torch.randint(40, (2, 10), dtype=dtype)[:, ::2]
    found = results(ours, q, k, cos, sin, positions)
    torch.testing.assert_close(found, results(rope, q, k, cos, sin, positions))
    rising = torch.arange(5, dtype=dtype).expand(2, 5)
    found = results(ours, q, k, cos, sin, rising)
    torch.testing.assert_close(found, results(ours, q, k, cos, sin), rtol=0, atol=0)


def test_one_launch_a_pass_reads_views_where_they_lie():
    q, k = draw()
    cos, sin = (torch.cat((table, table), 1)[:, :8] for table in tables(9, 16))  # Hugging Face's
    with recorded() as launches:
        found = results(ours, q, k, cos, sin)
    forward, backward = launches
    assert reads(forward, q, k, cos, sin) and reads(backward, cos, sin)
    torch.testing.assert_close(found, results(rope, q, k, cos, sin))


def test_outputs_lie_as_the_inputs_do():
    cos, sin = tables(5, 16)
    q, k = draw()
    for y, x in zip(ours(q, k, cos, sin), (q, k), strict=True):
        assert y.transpose(1, 2).is_contiguous() and y.shape == x.shape
    q, k = q.contiguous(), k.contiguous()
    for y in ours(q, k, cos, sin):
        assert y.is_contiguous()


@pytest.mark.parametrize("route", ["eager", "compiled"])
@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_nobody_uses(route, used):
    q, k = draw()
    cos, sin = tables(5, 16)
    function = ours
    if route == "compiled":
        torch._dynamo.reset()
        function = torch.compile(ours, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(function(q, k, cos, sin)[used].sum(), (q, k), allow_unused=True)
    want = torch.autograd.grad(rope(q, k, cos, sin)[used].sum(), (q, k)[used])[0]
    torch.testing.assert_close(found[used], want)
    assert found[1 - used] is None or not found[1 - used].any()


def test_compiled_with_dynamic_sizes(pairing="interleaved"):
    torch._dynamo.reset()
    function = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    for n_tokens in (5, 7):
        arguments = *draw(n_tokens=n_tokens), *tables(n_tokens, 16)
        found = results(function, *arguments, pairing=pairing)
        torch.testing.assert_close(found, results(rope, *arguments, pairing=pairing))
