"""Tests the feed-forward layer in 8 bits: the quantizer bit by bit, and its bounds."""

import math

import pytest
import torch

from tests.ops.problems import DEVICE, setting
from tnp.dispatch import plans
from tnp.gates.checks import relative_error
from tnp.gates.results import compute
from tnp.ops._shared import e4m3
from tnp.ops._shared.rows_8bit import InRows, n_norms, rows_quantizer
from tnp.ops.mlp import OPERATOR, eight_bit, mlp

IN_8_BITS = next(one for one in OPERATOR.implementations if one.name == "e4m3")


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    magnitudes = 10.0 ** (torch.arange(shape[0]) % 7 - 3.0)
    return (torch.randn(shape, generator=generator) * magnitudes[:, None]).to(DEVICE)


def in_float64(found: InRows) -> torch.Tensor:
    return found.x.double() * found.scale.double()[:, None]


def quantized(x: torch.Tensor, padded: tuple[int, int] | None = None) -> InRows:
    return rows_quantizer(x, x.shape, x.stride(), padded)(x)


@pytest.mark.parametrize("shape", [(1, 16), (70, 48), (37, 2100), (600, 33)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantizer_agrees_with_pytorchs_casts_bit_by_bit(shape, dtype):
    x = drawn(*shape).to(dtype)
    x[0] = 0.0
    for one in (x, x.t().contiguous().t()):
        found = quantized(one)
        assert torch.equal(in_float64(found), e4m3.scaled(x.float(), (1,), e4m3.LEAST))
        norms = in_float64(found).norm(dim=1)
        assert math.isclose(found.bound.max().item(), x.double().norm(dim=1).max(), rel_tol=1e-6)
        assert relative_error(norms, x.double().norm(dim=1)) < 0.02
        assert len(found.bound) == n_norms(shape)


def test_padding_is_zero():
    x = drawn(42, 30)
    found = quantized(x, (48, 32))
    assert found.x.shape == (48, 32) and found.scale.shape == (48,)
    assert torch.equal(in_float64(found)[:42, :30], in_float64(quantized(x)))
    assert not found.x.float()[42:].any() and not found.x.float()[:, 30:].any()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_infinities_and_nan_are_not_hidden_by_a_scale(bad):
    x = drawn(40, 32)
    x[3, 5] = bad
    found = quantized(x).x.float()
    assert found[3, 5].isnan() and found[torch.arange(40) != 3].isfinite().all()
    assert math.isnan(bad) or found[3].isnan().all()


def test_no_product_exceeds_the_bound_of_its_rows():
    """Rows of x along one row of w: the bound of Cauchy and Schwarz is met."""
    w = drawn(48, 32)
    x = w[w.norm(dim=1).argmax()].repeat(20, 1) * drawn(20, 1)
    w8 = quantized(w)
    quantize = rows_quantizer(x, x.shape, x.stride(), norms=n_norms(w.shape))
    x8 = quantize(x, w8.bound, eight_bit.H_FACTOR)
    product = (in_float64(x8) @ in_float64(w8).T).abs().amax(1)
    share = product / (448.0 * x8.bound)
    assert share.max() <= 1.0 and share.min() > 0.4


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
    found = plan.backward((torch.ones_like(outputs[0]),), plan.kept(inputs, outputs), saved, ())
    assert [x is None for x in found] == [True, True, False]
