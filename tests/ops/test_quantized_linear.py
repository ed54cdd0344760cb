"""Tests the quantizer, packed codes, loaders of other formats, and PyTorch's own kernels."""

import pytest
import torch
from torch import Tensor

from tests.ops.problems import DEVICE
from tests.refusals import assert_refused
from tnp.gates.checks import relative_error
from tnp.ops.quantized_linear import quantized_linear, torch_forms
from tnp.ops.quantized_linear.formats import from_awq, from_compressed_tensors, from_gptq
from tnp.ops.quantized_linear.packing import pack, unpack
from tnp.ops.quantized_linear.quantizer import (
    QuantizedWeight,
    dequantize_weight,
    quantize_weight,
)

TINY = 2.0**-24  # the smallest number of float16
N_OUT, N_IN, GROUP = 16, 64, 32
PLACES = (0, 2, 4, 6, 1, 3, 5, 7)  # of AWQ's codes in a word, from the low bits on


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def whole(most: int, *shape: int, seed: int = 0) -> Tensor:
    """Returns random numbers from 0 to `most`, both of which occur."""
    found = torch.randint(0, most + 1, shape, generator=torch.Generator().manual_seed(seed))
    found.view(-1)[:2] = torch.tensor([0, most])
    return found


def words(codes: Tensor, bits: int, places: tuple[int, ...] | None = None) -> Tensor:
    """Packs the last dimension into int32 by Python's own numbers, in this order of a word."""
    each = 32 // bits
    order = places or tuple(range(each))
    rows = codes.reshape(-1, each).tolist()
    packed = [sum(row[k] << bits * at for at, k in enumerate(order)) for row in rows]
    signed = [word - 2**32 if word >= 2**31 else word for word in packed]
    return torch.tensor(signed, dtype=torch.int32).view(*codes.shape[:-1], -1)


# --------------------------------------------------------------------------------------- packing


@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_survives_packing(bits):
    codes = torch.arange(2**bits).repeat(3, 2)
    assert torch.equal(unpack(pack(codes, bits)).long(), codes)


def test_a_word_holds_its_codes_where_the_page_says():
    assert pack(torch.arange(8)[None], 4).item() == 0x75316420
    assert pack(torch.tensor([[0, 128, 255]]), 8).tolist() == [[-128, 0, 127]]


@pytest.mark.parametrize("name", ["torch", "triton"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_every_code_less_every_zero_point_is_exact(bits, dtype, name):
    """x is the identity, so that results are the weights themselves."""
    n = 2**bits
    codes, zeros = torch.arange(n).repeat(n, 1), torch.arange(n, dtype=torch.uint8)[:, None]
    x, scales = torch.eye(n, dtype=dtype), torch.ones(n, 1, dtype=dtype)
    given = (one.to(DEVICE) for one in (x, pack(codes, bits), scales, zeros))
    y = quantized_linear(*given, implementation=name)
    expected = torch.arange(n)[:, None] - torch.arange(n)[None, :]
    assert torch.equal(y.cpu().long(), expected)


# -------------------------------------------------------------------------------------- quantizer


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_weight_is_off_by_more_than_half_a_scale(bits, symmetric, dtype):
    w = normal(10, 96)
    w[0], w[1], w[2], w[3] = 0.0, w[1].abs() + 5.0, -w[2].abs(), TINY * w[3]
    w[4, ::2], w[5, :32], w[6], w[7] = 0.0, 3.0, 1e4 * w[6], w[7].round()
    for group in (32, None):
        found = quantize_weight(w, bits, group, symmetric, dtype)
        assert found.scales.dtype == dtype and (found.zeros is None) == symmetric
        error = (w.double() - dequantize_weight(found, torch.float64)).abs()
        halves = found.scales.double().repeat_interleave(found.group, 1) / 2
        assert (error <= halves).all()


def test_a_quantized_weight_knows_its_sizes_and_bytes():
    w = normal(8, 256, dtype=torch.float16)
    found = quantize_weight(w, 4, 64, symmetric=False)
    assert (found.bits, found.group, found.n_in, found.n_out) == (4, 64, 256, 8)
    assert found.nbytes == 8 * (128 + 4 * 2 + 4) and found.scales.dtype == torch.float16
    assert quantize_weight(w, 8, None).group == 256
    # Ratios to 16 bits, counted with scales of groups of 128.
    ratios = [w.nbytes / quantize_weight(w, bits, 128).nbytes for bits in (8, 4)]
    assert ratios == [2 / (1 + 2 / 128), 2 / (0.5 + 2 / 128)]
    assert [round(ratio, 2) for ratio in ratios] == [1.97, 3.88]


def test_a_dequantized_weight_is_exact_in_float32():
    found = quantize_weight(normal(4, 64), 8, 32, symmetric=False)
    assert torch.equal(dequantize_weight(found).double(), dequantize_weight(found, torch.float64))


def test_what_cannot_be_quantized_is_refused():
    w = normal(4, 64)
    assert_refused(
        (lambda: quantize_weight(w, 3, 32), "bits is 3: it must be 4 or 8"),
        (lambda: quantize_weight(w, 4, 48), "group is 48: it must divide n_in, which is 64"),
        (lambda: quantize_weight(w, 4, 0), "group is 0: it must be a whole number, at least 1"),
        (lambda: quantize_weight(w[0], 4, 32), r"weight has shape \(64,\): it must be"),
        (lambda: quantize_weight(w.long(), 4, 32), "weight is torch.int64: it must be a float"),
        (lambda: quantize_weight(w / 0, 4, 32), "weight has a number that is not finite"),
        (lambda: quantize_weight(w, 4, 32, 1), "symmetric is 1: it must be True or False"),
        (lambda: quantize_weight(w, 4, 32, True, torch.float32), "dtype is torch.float32: it must"),
        (lambda: quantize_weight(1e7 * w, 8, 32, dtype=torch.float16), "its scales must be finite"),
        (lambda: quantize_weight(w[:, :60], 4, None), "n_in is 60: it must be a multiple of 8"),
    )


# ---------------------------------------------------------------------------------------- formats


def parts(bits: int) -> tuple[Tensor, Tensor, Tensor, QuantizedWeight]:
    """Returns codes [n_out, n_in], zero points [n_out, n_groups], scales, and the weight."""
    codes = whole(2**bits - 1, N_OUT, N_IN)
    zeros = whole(2**bits - 1, N_OUT, N_IN // GROUP, seed=1)
    scales = normal(N_OUT, N_IN // GROUP, seed=2, dtype=torch.float16).abs()
    return codes, zeros, scales, QuantizedWeight(pack(codes, bits), scales, zeros.byte())


def assert_same(found: QuantizedWeight, expected: QuantizedWeight) -> None:
    for name in ("weight", "scales", "zeros"):
        ours, own = getattr(found, name), getattr(expected, name)
        assert ours is own is None or (torch.equal(ours, own) and ours.dtype == own.dtype), name
        assert ours is None or ours.is_contiguous()


@pytest.mark.parametrize("bits", [4, 8])
def test_a_gptq_checkpoint_is_read(bits):
    codes, zeros, scales, expected = parts(bits)
    qweight, g_idx = words(codes, bits).t().contiguous(), torch.arange(N_IN) // GROUP
    for checkpoint_format, stored in (("gptq", (zeros - 1) % 2**bits), ("gptq_v2", zeros)):
        qzeros = words(stored.t().contiguous(), bits)
        for order in (None, g_idx.int()):
            found = from_gptq(
                qweight, qzeros, scales.t(), order, bits=bits, checkpoint_format=checkpoint_format
            )
            assert_same(found, expected)


def test_an_awq_checkpoint_is_read():
    codes, zeros, scales, expected = parts(4)
    qweight, qzeros = (words(x.t().contiguous(), 4, PLACES) for x in (codes, zeros))
    assert_same(from_awq(qweight, qzeros, scales.t()), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_compressed_tensors_checkpoint_is_read(bits):
    codes, zeros, scales, expected = parts(bits)
    shape, packed = torch.tensor([N_OUT, N_IN]), words(codes, bits)
    points = words(zeros.t().contiguous(), bits).t()
    assert_same(from_compressed_tensors(packed, scales, shape, points, bits=bits), expected)
    symmetric = QuantizedWeight(expected.weight, scales)
    assert_same(from_compressed_tensors(packed, scales, (N_OUT, N_IN), bits=bits), symmetric)


def test_zero_points_in_the_middle_are_left_out():
    codes, zeros, scales, _ = parts(4)
    qzeros = words(torch.full_like(zeros.t(), 7), 4)
    found = from_gptq(words(codes, 4).t(), qzeros, scales.t())
    assert found.zeros is None


def test_a_checkpoint_that_does_not_fit_is_one_sentence():
    codes, zeros, scales, _ = parts(4)
    packed, s = words(codes, 4), scales.t()
    qweight, qzeros = packed.t().contiguous(), words(zeros.t().contiguous(), 4)
    points = words(zeros.t().contiguous(), 4).t()
    shape, acted = (N_OUT, N_IN), torch.arange(N_IN).flip(0) // GROUP
    by_awq = words(codes.t().contiguous(), 4, PLACES), qzeros, s
    read = from_compressed_tensors
    assert_refused(
        (lambda: from_gptq(qweight, qzeros, s, acted), "g_idx has groups in activation order"),
        (lambda: from_gptq(qweight, qzeros, s, acted[1:]), r"g_idx has shape \(63,\): it must be"),
        (lambda: from_gptq(qweight[1:], qzeros, s), "scales has 2 groups for 56 inputs: groups"),
        (lambda: from_gptq(qweight[:, 1:], qzeros, s), r"qweight has shape \(8, 15\): it must be"),
        (lambda: from_gptq(qweight, qzeros[:, 1:], s), r"qzeros has shape \(2, 1\): it must be"),
        (lambda: from_gptq(qweight.long(), qzeros, s), "qweight is torch.int64"),
        (lambda: from_gptq(qweight, qzeros, s.float()), "scales is torch.float32"),
        (lambda: from_gptq(qweight, qzeros, s, bits=3), "bits is 3: it must be 4 or 8"),
        (lambda: from_gptq(qweight, qzeros, s, checkpoint_format="marlin"), "'marlin': it must be"),
        (lambda: from_gptq(qweight, None, s), "qzeros is None: it must be a tensor"),
        (lambda: from_awq(by_awq[0][:, 1:], *by_awq[1:]), r"qweight has shape \(64, 1\): it must"),
        (lambda: from_awq(*by_awq[:2], s[:, 1:]), "n_out is 15: it must be a multiple of 8"),
        (lambda: from_awq(by_awq[0][:60], *by_awq[1:]), "scales has 2 groups for 60 inputs"),
        (lambda: read(packed[:, 1:], scales, shape), r"weight_packed has shape \(16, 7\): it must"),
        (lambda: read(packed, scales[1:], shape), r"weight_scale has shape \(15, 2\): it must be"),
        (lambda: read(packed, scales, shape, points[1:]), r"weight_zero_point has shape \(1, 2\)"),
        (lambda: read(packed, scales, shape, weight_g_idx=acted), "weight_g_idx is given: it must"),
    )


# ------------------------------------------------------------------------- PyTorch's own kernels


def given(bits: int, group: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    quantized = quantize_weight(normal(24, 128), bits, group)
    return normal(3, 128, seed=1, dtype=torch.bfloat16), quantized.weight, quantized.scales


def exact(x: Tensor, *quantized: Tensor) -> Tensor:
    return x.double() @ dequantize_weight(QuantizedWeight(*quantized), torch.float64).t()


def test_pytorchs_int8_product_takes_a_scale_for_a_row():
    x, weight, scales = given(8)
    y = quantized_linear(x, weight, scales, bias=torch.ones(24), implementation="int8pack")
    assert relative_error(y, exact(x, weight, scales) + 1) < 4e-3
    with pytest.raises(RuntimeError, match="takes a scale for a row of 128, not for 32"):
        quantized_linear(*given(8, 32), implementation="int8pack")


def test_a_dequantized_weight_is_kept_until_a_tensor_changes():
    tensors = list(given(4, 32))
    made = torch_forms._made(torch_forms.dequantize)

    def run() -> Tensor:
        return quantized_linear(*tensors, implementation="dequantized")

    first, before = run(), len(made)
    assert relative_error(first, exact(*tensors)) < 4e-3
    kept = made[tensors[1]][-1]
    assert torch.equal(run(), first) and made[tensors[1]][-1] is kept
    tensors[2] *= 2.0
    assert torch.equal(run(), 2.0 * first) and made[tensors[1]][-1] is not kept
    tensors.clear()
    assert len(made) == before - 1


def test_tinygemms_layout_stands_for_the_same_weights():
    with pytest.raises(RuntimeError, match="it takes bits=4, not 8"):
        quantized_linear(*given(8, 32), implementation="tinygemm")
    if DEVICE.type != "cuda":
        with pytest.raises(RuntimeError, match="needs a CUDA device"):
            quantized_linear(*given(4, 32), implementation="tinygemm")
        return
    for zeros in (None, whole(15, 24, 4).byte()):
        tensors = [x if x is None else x.to(DEVICE) for x in (*given(4, 32), zeros)]
        y = quantized_linear(*tensors, implementation="tinygemm")
        assert relative_error(y, exact(*tensors)) < 8e-3
