"""Checks the quantizer of `quantized_linear`: weights, results, and bytes.

A code is the nearest of equidistant numbers at a distance s, so a weight is off by at most s / 2,
with a variance of s² / 12. Inputs and errors are independent. So the relative error of results is

    r = √(mean of s² / 12) / σ_w

for any number of inputs. The budgets follow from that:

- Every weight is off by at most s / 2, exactly.
- The error of normal weights is within 5 % of theory, which knows the largest of so many numbers.
- The error of results against float64 of the original weights is within 10 % of r, beside the
  rounding of PyTorch's own results. The largest of n errors is below r·σ_y·(√(2 ln n) + 1.5).
- Codes, scales and zero points have exactly their bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tnp.dispatch import selection
from tnp.dispatch.registry import catalog
from tnp.gates.checks import Check, relative_error
from tnp.ops.quantized_linear import OPERATOR, quantized_linear
from tnp.ops.quantized_linear.packing import MIDDLE, pack
from tnp.ops.quantized_linear.quantizer import (
    QuantizedWeight,
    dequantize_weight,
    quantize_weight,
)

N_OUT, N_IN, ROWS = 512, 2048, 64
GROUPS = (32, 64, 128, N_IN)
# Relative rms errors of normal weights by (bits, symmetric), for each of GROUPS: a scale is the
# expected largest of so many absolute values over 127 or 7, or their expected range over 255 or 15.
THEORY = {
    (8, True): (0.0054, 0.0060, 0.0065, 0.0083),
    (8, False): (0.0048, 0.0054, 0.0059, 0.0078),
    (4, True): (0.0985, 0.108, 0.118, 0.150),
    (4, False): (0.0808, 0.0912, 0.1005, 0.133),
}
KIND = {True: "symmetric", False: "zero points"}


def checks(device: torch.device) -> Iterator[Check]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(N_OUT, N_IN, generator=generator).to(device)
    x = torch.randn(ROWS, N_IN, generator=generator).to(device, torch.bfloat16)
    for (bits, symmetric), expected in THEORY.items():
        for group, theory in zip(GROUPS, expected, strict=True):
            quantized = quantize_weight(weight, bits, group, symmetric)
            what = f"{bits} bits, {KIND[symmetric]}, groups of {group}"
            yield Check(f"the worst weight, {what}", "errors of half a scale",
                        worst(weight, quantized), 1.0)  # fmt: skip
            of_weights = relative_error(dequantize_weight(quantized), weight)
            yield Check(f"rms error of weights over theory, {what}", "less 1, absolute",
                        abs(of_weights / theory - 1), 0.05)  # fmt: skip
            yield Check(f"bytes, {what}", "difference",
                        abs(quantized.nbytes - n_bytes(bits, group, symmetric)), 0.0)  # fmt: skip
        quantized = quantize_weight(weight, bits, 128, symmetric)
        yield from _of_results(x, weight, quantized, f"{bits} bits, {KIND[symmetric]}")
    for bits in MIDDLE:
        late = worst(weight, scales_rounded_last(weight, bits, 128))
        yield Check(f"control must fail: scales rounded last, {bits} bits",
                    "errors of half a scale", late, 1.001, larger_is_better=True)  # fmt: skip


def worst(weight: Tensor, quantized: QuantizedWeight) -> float:
    """Returns the largest |w − ŵ| in units of half a scale."""
    error = (weight.double() - dequantize_weight(quantized, torch.float64)).abs()
    halves = quantized.scales.double().unsqueeze(-1) / 2
    return (error.unflatten(1, (-1, quantized.group)) / halves).max().item()


def n_bytes(bits: int, group: int, symmetric: bool) -> int:
    """Returns the bytes of a weight [N_OUT, N_IN]: codes, scales of 16 bits, codes of zeros."""
    n_groups = N_OUT * N_IN // group
    return N_OUT * N_IN * bits // 8 + n_groups * (2 if symmetric else 3)


def scales_rounded_last(weight: Tensor, bits: int, group: int) -> QuantizedWeight:
    """Quantizes with exact scales, and rounds these to nearest afterwards: the control."""
    w = weight.double().unflatten(1, (-1, group))
    scales = w.abs().amax(-1) / (MIDDLE[bits] - 1)
    codes = (w / scales.unsqueeze(-1)).round() + MIDDLE[bits]
    return QuantizedWeight(pack(codes.flatten(1), bits), scales.to(torch.bfloat16))


def _of_results(
    x: Tensor, weight: Tensor, quantized: QuantizedWeight, what: str
) -> Iterator[Check]:
    """Yields the checks of results against float64 of the original weights."""
    q = quantized
    given = x, q.weight, q.scales, q.zeros
    exact = x.double() @ weight.double().t()
    of_codes = x.double() @ dequantize_weight(q, torch.float64).t()
    own = relative_error(quantized_linear(*given), of_codes)
    r = q.scales.double().square().mean().div(12).sqrt().item() / weight.std().item()
    expected = math.hypot(r, own)
    furthest = expected * exact.std().item() * (math.sqrt(2 * math.log(exact.numel())) + 1.5)
    call = selection.describe(OPERATOR, (*given, None))
    for found in catalog().ours(OPERATOR.name):
        if selection.refuses(found, call) is not None:
            continue
        y = quantized_linear(*given, implementation=found.name)
        yield Check(f"rms error of results over r, {what}", "less 1, absolute",
                    abs(relative_error(y, exact) / expected - 1), 0.1, found.name)  # fmt: skip
        yield Check(f"largest error of results, {what}", "max_abs_error",
                    (y.double() - exact).abs().max().item(), furthest, found.name)  # fmt: skip
    shifted = quantized_linear(x, q.weight, q.scales.roll(-1, 1), q.zeros)
    yield Check(f"control must fail: scales of the next group, {what}", "less 1, absolute",
                abs(relative_error(shifted, exact) / expected - 1), 0.1,
                larger_is_better=True)  # fmt: skip
