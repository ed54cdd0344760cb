"""Tests the feed-forward layer in 8 bits: quantizers bit by bit, bounds, panels, sums."""

import math
from itertools import product

import pytest
import torch

from tests.ops.problems import DEVICE, setting
from tnp.dispatch import devices, plans
from tnp.gates.checks import relative_error
from tnp.gates.results import compute
from tnp.ops._shared import e4m3
from tnp.ops._shared.blocks_8bit import Blocks, blocks_quantizer
from tnp.ops._shared.gradient_8bit import gradient
from tnp.ops._shared.rows_8bit import InRows, n_norms, weight_quantizer
from tnp.ops.mlp import OPERATOR, composed_8bit, eight_bit, mlp

IN_8_BITS = next(one for one in OPERATOR.implementations if one.name == "e4m3")


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    magnitudes = 10.0 ** (torch.arange(shape[0]) % 7 - 3.0)
    return (torch.randn(shape, generator=generator) * magnitudes[:, None]).to(DEVICE)


def in_float64(found: InRows) -> torch.Tensor:
    return found.x.double() * found.scale.double()[:, None]


def blocks_in_float64(found: Blocks) -> torch.Tensor:
    return found.rows.double() * found.scale.double()[:, None]


def quantized(x: torch.Tensor, padded: tuple[int, int] | None = None, ordered=False) -> InRows:
    return weight_quantizer(x.shape, x.stride(), padded, (ordered, False))(x)[0]


def in_blocks(x: torch.Tensor, w: torch.Tensor, factor: float = 1.0) -> Blocks:
    quantize = blocks_quantizer(x.shape, x.stride(0), n_norms(w.shape), panels=True)
    return quantize(x, quantized(w), factor)


@pytest.mark.parametrize("shape", [(1, 16), (70, 48), (37, 2100), (600, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizer_of_weights_agrees_with_pytorchs_casts_bit_by_bit(shape, dtype):
    x = drawn(*shape).to(dtype)
    x[0] = 0.0
    for strides in (x.stride(), (1, shape[0])):
        both = weight_quantizer(shape, strides)(x if strides[1] == 1 else x.t().contiguous())
        for found, exact in zip(both, (x, x.t()), strict=True):
            assert torch.equal(in_float64(found), e4m3.scaled(exact.float(), (1,), e4m3.LEAST))
            norm = exact.double().norm(dim=1).max()
            assert math.isclose(found.bound.max().item(), norm, rel_tol=1e-6)
            assert len(found.bound) == n_norms(exact.shape)


def test_padding_is_zero():
    x = drawn(42, 30)
    found, transposed = weight_quantizer(x.shape, x.stride(), (48, 32))(x)
    assert torch.equal(in_float64(transposed)[:30, :42], in_float64(quantized(x.t())))
    assert weight_quantizer(x.shape, x.stride(), both=False)(x)[1] is None
    assert transposed.x.shape == (32, 48) and not transposed.x.float()[30:].any()
    assert found.x.shape == (48, 32) and found.scale.shape == (48,)
    assert torch.equal(in_float64(found)[:42, :30], in_float64(quantized(x)))
    assert not found.x.float()[42:].any() and not found.x.float()[:, 30:].any()


def test_ordered_columns_are_those_that_a_thread_holds():
    """Threads 0 to 3 hold columns 8j + 2t and 8j + 2t + 1 of a matmul's sum of 64 columns."""
    x = drawn(20, 128)
    held = [
        64 * g + 8 * j + 2 * t + c for g, t, j, c in product((0, 1), range(4), range(8), (0, 1))
    ]
    found = quantized(x, ordered=True)
    assert torch.equal(in_float64(found), in_float64(quantized(x))[:, held])
    _, found = weight_quantizer(x.t().shape, x.t().stride(), ordered=(False, True))(x)
    assert torch.equal(in_float64(found), in_float64(quantized(x))[:, held])


@pytest.mark.parametrize("shape", [(1, 16), (128, 64), (300, 80)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizer_of_activations_agrees_with_pytorchs_casts_bit_by_bit(shape, dtype):
    x = drawn(*shape).to(dtype)
    x[0] = 0.0
    wide = torch.cat([x, x], 1)
    for one in (x, wide[:, : shape[1]]):
        found = in_blocks(one, drawn(48, shape[1]))
        assert torch.equal(blocks_in_float64(found), e4m3.blocks(x.float()))


def test_panels_hold_the_rows_that_a_thread_of_a_tile_holds():
    """Threads of warp w hold rows 16w + r, 16w + 8 + r and those plus 64, which make a word."""
    x = drawn(300, 32)
    found = in_blocks(x, drawn(48, 32))
    rows = [
        16 * w + r + 64 * h + 8 * b for w, r, h, b in product(range(4), range(8), (0, 1), (0, 1))
    ]
    codes = torch.zeros(384, 32, dtype=torch.uint8, device=DEVICE)
    codes[:300] = found.rows.view(torch.uint8)
    expected = codes.unflatten(0, (3, 128))[:, rows].mT
    assert torch.equal(found.panels.view(torch.uint8), expected)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinities_and_nan_are_not_hidden_by_a_scale(bad):
    x = drawn(40, 32)
    x[3, 5] = bad
    of_weights = quantized(x).x.float()
    assert of_weights[3, 5].isnan() and of_weights[torch.arange(40) != 3].isfinite().all()
    assert math.isnan(bad) or of_weights[3].isnan().all()
    rows = in_blocks(x, drawn(48, 32)).rows.float()
    assert rows[3, 5].isnan() and rows.isnan().sum() == 1
    assert mlp_in_8_bits(x.bfloat16(), drawn(48, 32), drawn(32, 48))[3].isnan().all()


def test_no_product_exceeds_the_bound_of_its_rows():
    """Rows of x along one row of w: the bound of Cauchy and Schwarz is met."""
    w = drawn(48, 32)
    x = w[w.norm(dim=1).argmax()].repeat(20, 1) * drawn(20, 1)
    x8 = in_blocks(x, w, eight_bit.H_FACTOR)
    largest = (blocks_in_float64(x8) @ in_float64(quantized(w)).T).abs().max()
    share = largest / (448.0 * x8.bound.double())
    assert x8.bound.unique().numel() == 1 and 0.4 < share.max() <= 1.0


@pytest.mark.parametrize("n_rows", [1, 128, 700])
def test_gradient_of_a_weight_is_the_sum_over_all_rows(n_rows):
    """Values of mean one: sums that lose their last bits over many rows would be off."""
    w = drawn(48, 80)
    a, b = (in_blocks(1.0 + drawn(n_rows, 80), w) for _ in range(2))
    target = devices.of_device(torch.device(DEVICE))
    found = gradient(target, n_rows, 80, 80)(a, b).double()
    expected = blocks_in_float64(a).T @ blocks_in_float64(b)
    assert relative_error(found, expected) < 1e-5


def test_gradients_keep_small_rows():
    """Rows of a gradient of 1e-20 are as accurate as rows of 1: no scale of a loss is needed."""
    of = setting(OPERATOR, "e4m3", "bfloat16", rows=70, d_model=32, d_ff=48)

    def gradient(factor: float) -> torch.Tensor:
        def upstream(name, like):
            return of.upstream(name, like) * factor

        found = compute(OPERATOR, of.case.problem, mlp_in_8_bits, of.inputs, ("x",), upstream)
        return found["dx"].double() / factor

    assert torch.equal(gradient(1.0), gradient(2.0**-66))


def mlp_in_8_bits(*inputs):
    return mlp(*inputs, implementation="e4m3")


def test_only_requested_tensors_are_computed_and_saved():
    of = setting(OPERATOR, "e4m3", "bfloat16", rows=70, d_model=32, d_ff=48)
    inputs = tuple(of.inputs.values())
    outputs, saved = plans.build(OPERATOR, "e4m3", inputs).forward(inputs, ())
    assert saved == ()
    plan = plans.build(OPERATOR, "e4m3", inputs, wanted=("down",))
    outputs, saved = plan.forward(inputs, ())
    results = zip((outputs, saved), composed_8bit.FORWARD_Z.empty(("down",), inputs), strict=True)
    for given, allocated in results:
        assert [(x.shape, x.stride(), x.dtype) for x in given] == [
            (x.shape, x.stride(), x.dtype) for x in allocated
        ]
    found = plan.backward((torch.ones_like(outputs[0]),), plan.kept(inputs, outputs), saved, ())
    assert [x is None for x in found] == [True, True, False]
