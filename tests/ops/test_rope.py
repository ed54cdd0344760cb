"""Tests rotary embedding, alone and behind QK-norm: formulas, layouts, launches.

The gate compares numbers with float64.
"""

import math
from functools import partial

import pytest
import torch

from tests.ops.launched import reads, recorded
from tnp.ops.rope import PAIRINGS, qk_norm_rope, rope, rotary_tables

tables = partial(rotary_tables, base=100.0)  # every pair turns within few positions


def draw(batch=2, heads=4, kv_heads=2, n_tokens=5, head_dim=16):
    """Returns q and k as views of one projection."""
    projection = torch.randn(batch, n_tokens, heads + 2 * kv_heads, head_dim)
    q, k, _v = projection.split((heads, kv_heads, kv_heads), dim=2)
    return q.transpose(1, 2).requires_grad_(), k.transpose(1, 2).requires_grad_()


def weights(head_dim):
    return [(1 + 0.3 * torch.randn(head_dim)).requires_grad_() for _ in range(2)]


def results(function, q, k, *rest, **named):
    """Returns both outputs, and gradients of a weighted sum of them."""
    outputs = function(q, k, *rest, **named)
    by = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in outputs]
    loss = sum((x * weight).sum() for x, weight in zip(outputs, by, strict=True))
    return *(x.detach() for x in outputs), *torch.autograd.grad(loss, (q, k))


def ours(*arguments, **named):
    return rope(*arguments, **named, implementation="triton")


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_a_pair_is_a_complex_number_times_a_rotation(pairing, implementation):
    """Compares with the papers' formula, not with the reference's."""
    (q, k), (cos, sin), gains = draw(1, 2, 1, 3, 6), tables(3, 6), weights(6)
    turn = torch.complex(cos, sin)
    pairs = [(i, i + 3) if pairing == "half" else (2 * i, 2 * i + 1) for i in range(3)]
    a, b = ([pair[at] for pair in pairs] for at in (0, 1))
    asked = {"pairing": pairing, "implementation": implementation}

    def assert_turned(found, given):
        for x, y in zip(given, found, strict=True):
            want = torch.complex(x[..., a], x[..., b]) * turn
            torch.testing.assert_close(torch.complex(y[..., a], y[..., b]), want)

    assert_turned(rope(q, k, cos, sin, **asked), (q, k))
    normalized = [
        x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * gain
        for x, gain in zip((q, k), gains, strict=True)
    ]
    assert_turned(qk_norm_rope(q, k, *gains, cos, sin, eps=0.1, **asked), normalized)


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
    for y in ours(q.contiguous(), k.contiguous(), cos, sin):
        assert y.is_contiguous()


def test_compiled_with_dynamic_sizes():
    torch._dynamo.reset()
    function = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    for n_tokens in (5, 7):
        arguments = *draw(n_tokens=n_tokens), *tables(n_tokens, 16)
        found = results(function, *arguments, pairing="interleaved")
        torch.testing.assert_close(found, results(rope, *arguments, pairing="interleaved"))


def test_behind_a_norm_in_16_bits_it_rounds_once():
    inputs = *(x.detach().bfloat16() for x in draw(n_tokens=50, head_dim=64)), *weights(64)
    inputs += tables(50, 64)
    exact = qk_norm_rope(*(x.detach().double() for x in inputs))
    for x, y in zip(qk_norm_rope(*inputs, implementation="triton"), exact, strict=True):
        assert (x == y.bfloat16()).float().mean() > 0.999


@pytest.mark.parametrize("frozen, launched", [((), 3), ((0,), 3), ((0, 1), 2)])
def test_a_third_launch_adds_up_the_gradients_of_weights_that_ask(frozen, launched):
    inputs = *draw(), *weights(16), *tables(5, 16)
    for at in frozen:
        inputs[2 + at].requires_grad_(False)
    with recorded() as launches:
        outputs = qk_norm_rope(*inputs, implementation="triton")
        sum(x.sum() for x in outputs).backward()
    forward, backward, *_ = launches
    assert reads(forward, *inputs) and reads(backward, *inputs) and len(launches) == launched


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tables_are_right_to_one_rounding_at_the_last_of_131072_positions(base, dtype):
    """Angles in float32 would be wrong by 0.004 here."""
    found = rotary_tables(131_072, 32, base, dtype=dtype)
    half_a_unit = torch.finfo(dtype).eps / 4 + 1e-9  # of numbers below 1; float64's angle
    for function, table in zip((math.cos, math.sin), found, strict=True):
        assert table.shape == (131_072, 16) and table.dtype == dtype
        for position in (0, 1, 777, 65_537, 131_071):
            angles = (position / base ** (2 * i / 32) for i in range(16))
            want = torch.tensor([function(angle) for angle in angles], dtype=torch.float64)
            assert (table[position].double() - want).abs().max() <= half_a_unit


def test_equal_arguments_give_the_same_tables():
    first = rotary_tables(9, 16)
    again = rotary_tables(9, 16, 10_000, device="cpu", dtype=torch.float32)
    assert all(x is y for x, y in zip(first, again, strict=True))
    others = (
        rotary_tables(9, 16, 500_000.0),
        rotary_tables(9, 16, dtype=torch.float64),
        rotary_tables(9, 16, device="meta"),
    )
    assert all(cos is not first[0] for cos, _sin in others)


def test_tables_that_were_written_to_are_refused():
    tables(11, 16)[1].mul_(2)
    with pytest.raises(RuntimeError, match="tables of 11 positions .* were written to"):
        tables(11, 16)


def test_tables_made_in_inference_mode_serve_training():
    with torch.inference_mode():
        tables(12, 16)
    q, k = draw(n_tokens=12)
    results(rope, q, k, *tables(12, 16))


@pytest.mark.parametrize(
    "arguments, said",
    [
        ({"n_positions": 0}, "n_positions is 0: .* at least 1"),
        ({"n_positions": 2.5}, "n_positions is 2.5: .* whole number"),
        ({"head_dim": 5}, "head_dim is 5: it must be even"),
        ({"base": 1.0}, "base is 1.0: it must be finite and above 1"),
        ({"base": math.nan}, "base is nan: it must be finite and above 1"),
        ({"dtype": torch.int32}, "dtype is torch.int32: choose one of torch.bfloat16, .*float64"),
        ({"device": "cuda"}, "no NVIDIA GPU is visible here"),
    ],
)
def test_bad_arguments_of_tables_are_refused(arguments, said):
    with pytest.raises(ValueError, match=said):
        rotary_tables(**{"n_positions": 3, "head_dim": 4} | arguments)
