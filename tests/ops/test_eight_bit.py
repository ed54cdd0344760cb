"""Tests attention in 8 bits: the quantizer bit by bit, and results against the emulation."""

import math

import pytest
import torch

from tests.ops.problems import DEVICE, assert_within_budget, by, setting
from tnp.dispatch import plans, selection
from tnp.gates.checks import relative_error
from tnp.ops.attention import OPERATOR, attention, eight_bit, few_keys
from tnp.ops.attention.eight_bit.quantize import Quantized, quantizer


def drawn(n_q: int, n_k: int, batch: int = 1, n_heads: int = 2) -> tuple[torch.Tensor, ...]:
    """Returns views of one projection, of values of mean 1, whose sums in float32 are exact."""
    generator = torch.Generator().manual_seed(n_q + n_k)
    shape = batch, max(n_q, n_k), 3, n_heads, eight_bit.HEAD_DIM
    x = (torch.randn(shape, generator=generator) * 16).round() / 16
    x[:, :, 2] += 1.0
    q, k, v = x.bfloat16().to(DEVICE).permute(2, 0, 3, 1, 4)
    return q[:, :, :n_q], k[:, :, :n_k], v[:, :, :n_k]


def named(q, k, v, n_keys=None) -> dict:
    return dict(zip(OPERATOR.tensors, (q, k, v, n_keys, None, None), strict=True))


def quantized(q, k, v, n_keys=None) -> Quantized:
    inputs = q, k, v, n_keys, None, None
    return quantizer(selection.describe(OPERATOR, inputs), inputs)(inputs)


def values_of(x: Quantized, at: tuple[int, int]) -> torch.Tensor:
    """Returns v of one head [L, D] in the order of keys, from tiles of 64 transposed keys."""
    tiles = x.v[at].float().unflatten(0, (-1, 64)).mT.flatten(0, 1)
    position = torch.arange(len(tiles), device=DEVICE)
    key = position // 16 * 16 + position // 2 % 2 * 8 + position // 4 % 4 * 2 + position % 2
    ordered = torch.empty_like(tiles)
    ordered[key] = tiles
    units = torch.exp2(x.scales[at][:, 1]).repeat_interleave(eight_bit.BLOCK)
    return (ordered * units[:, None]).double()


def assert_held(x: Quantized, inputs: dict) -> None:
    for at, n, head in eight_bit.heads(inputs):
        of_keys = x.scales[at][:, 0].repeat_interleave(eight_bit.BLOCK)[:n, None]
        assert torch.equal((x.q[at].float() * x.q_scale[at][:, None]).double(), head.q)
        assert torch.equal((x.k[at][:n].float() * of_keys).double(), head.k)
        assert torch.equal(values_of(x, at)[:n], head.v)
        assert torch.equal(x.vector[at].double(), head.of_values)
        last = -(-n // eight_bit.BLOCK) * eight_bit.BLOCK
        assert not values_of(x, at)[n:last].any()
        assert not x.k[at][n:last].float().any()


@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (130, 127), (5, 129), (70, 700)])
def test_quantizer_agrees_with_pytorchs_casts_bit_by_bit(n_q, n_k):
    q, k, v = drawn(n_q, n_k)
    assert_held(quantized(q, k, v), named(q, k, v))


def test_quantizer_reads_no_padding():
    n_keys = torch.tensor([5, 260], dtype=torch.int32, device=DEVICE)
    q, k, v = drawn(20, 300, batch=2)
    k[0, :, 5:], v[0, :, 5:] = math.nan, math.nan
    k[1, :, 260:], v[1, :, 260:] = math.nan, math.nan
    assert_held(quantized(q, k, v, n_keys), named(q, k, v, n_keys))


def test_scales_are_the_least_powers_of_two_and_rows_of_zeros_have_one():
    q, k, v = (torch.zeros(1, 1, 6, 64, dtype=torch.bfloat16, device=DEVICE) for _ in "qkv")
    for row, largest in enumerate((448.0, 450.0, 1.0, -1.75, 2.0**-60)):
        q[0, 0, row, 7] = largest
    x = quantized(q, k, v)
    least = 2.0**eight_bit.LEAST
    assert x.q_scale.flatten().tolist() == [1.0, 2.0, 2.0**-8, 2.0**-8, least, least]
    assert x.q.float()[0, 0, :, 7].tolist() == [448.0, 224.0, 256.0, -448.0, 0.0, 0.0]
    o = attention(q, k, v, implementation="e4m3")
    assert torch.equal(o, torch.zeros_like(o))


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize(("n_q", "n_k"), [(1, 1), (65, 128), (20, 129), (40, 400)])
def test_attention_and_its_gradients_equal_their_emulation(n_q, n_k, lse):
    """Keys and values of mean 1 make a lost vector, of o or of lse, far larger than the bound.

    The backward kernel for few keys computes a delta of its own, which is closer to float64.
    """
    sizes = {"batch": 1, "n_heads": 2, "n_q": n_q, "n_k": n_k, "head_dim": eight_bit.HEAD_DIM}
    of = setting(OPERATOR, "e4m3", "bfloat16", **sizes, lse=lse)
    of.inputs.update(zip("qkv", (x.contiguous() for x in drawn(n_q, n_k)), strict=True))
    of.inputs["k"].add_(1.0)
    of = of.with_upstream(of.upstream)
    got = by(of, "e4m3")
    assert_within_budget(of, got)
    bounds = {"o": 2.0**-8} | ({"lse": 2.0**-20} if lse else {})
    if n_k > few_keys.MAX_KEYS:
        bounds |= dict.fromkeys(("dq", "dk", "dv"), 0.02)
    for name, bound in bounds.items():
        assert relative_error(got[name], of.rounded[name]) < bound, name


def test_gradients_are_those_of_16_bits_at_the_saved_results():
    """Nothing of 8 bits but o and lse reaches the backward pass: `fused` gives equal gradients."""
    inputs = (*drawn(40, 400), None, None, None)
    both = [plans.build(OPERATOR, name, inputs, wanted=tuple("qkv")) for name in ("e4m3", "fused")]
    outputs, saved = both[0].forward(inputs, (0.125,))
    do = torch.randn(outputs[0].shape, generator=torch.Generator().manual_seed(0))
    do = do.to(DEVICE, torch.bfloat16)
    found = [plan.backward((do,), plan.kept(inputs, outputs), saved, (0.125,)) for plan in both]
    for ours, of_fused in zip(*found, strict=True):
        torch.testing.assert_close(ours, of_fused)


def test_padding_has_no_part_in_anything():
    n_keys = torch.tensor([1, 130], dtype=torch.int32, device=DEVICE)
    q, k, v = drawn(33, 300, batch=2)
    expected = attention(q, k, v, n_keys=n_keys, implementation="e4m3")
    for b, n in enumerate(n_keys.tolist()):
        k[b, :, n:], v[b, :, n:] = math.nan, math.nan
        alone = attention(
            q[b : b + 1], k[b : b + 1, :, :n], v[b : b + 1, :, :n], implementation="e4m3"
        )
        assert torch.equal(alone[0], expected[b])
    poisoned = attention(q, k, v, n_keys=n_keys, implementation="e4m3")
    assert torch.equal(poisoned, expected)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_infinities_and_nan_are_not_hidden_by_a_scale(name, bad):
    inputs = named(*drawn(8, 300))
    inputs[name][0, 1, 3, 5] = bad
    o = attention(*(inputs[one] for one in "qkv"), implementation="e4m3")
    finite = torch.isfinite(o)
    assert finite[0, 0].all()
    if name == "q":
        assert not finite[0, 1, 3].any() and finite[0, 1, 4:].all()
    elif name == "k":
        assert not finite[0, 1].any()
    else:
        assert not finite[0, 1, :, 5].any()


@pytest.mark.parametrize("left_out", ["order", "vector"])
def test_emulation_tells_a_wrong_order_of_keys_and_a_lost_vector(left_out):
    """`rounded` allows far less than either mistake."""
    q, k, v = drawn(40, 400)
    inputs, sizes = named(q, k, v), (1, 2, 40, 400, eight_bit.HEAD_DIM)
    case = OPERATOR.case("bfloat16", *sizes, forward_only=True)
    exact = OPERATOR.reference(*(x.double() for x in (q, k, v)), None, None, None, 0.125)
    allowed = relative_error(eight_bit.rounded(case, inputs, None)["o"], exact)
    name = {"order": "values in another order than keys", "vector": "values less their mean"}
    wrong = OPERATOR.controls[name[left_out]](q, k, v, None, None, None, 0.125)
    assert relative_error(wrong, exact) > 5 * OPERATOR.budget.outputs * allowed
