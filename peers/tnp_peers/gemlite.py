"""Runs GemLite's linear layer, in Triton, on 16-bit inputs and codes of 4 and 8 bits.

Codes and scales are as ours: (code − zero) · scale. Symmetric codes of 4 bits pass their zero point
as a whole number, and are exact. Zero points of groups pass as −zero · scale in x's dtype, rounded.

GemLite brings tuned configurations of an H100, and chooses by a GPU's name. On a GPU without any,
such as an H200, the first call for a number of rows times some twenty.
"""

from typing import Any

from torch import Tensor, bfloat16, uint8

from tnp.dispatch.spec import Implementation, on_cuda
from tnp.ops.quantized_linear.definition import OF_16_BITS, OPTIONS
from tnp.ops.quantized_linear.packing import MIDDLE, bits_of, unpack
from tnp.ops.quantized_linear.torch_forms import kept
from tnp_peers.support import both, multiples

INPUTS = 32  # its inputs come in multiples of this (GemLiteLinearTriton.MIN_SIZE)
OUTPUTS = 128  # it reads scales without a mask, so that outputs must fill its tiles


def gemlite(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs GemLiteLinear. Few rows add their parts by atomics, in x's dtype."""
    return kept(plan, x, weight, scales, zeros, bias)(x)


def plan(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Any:  # fmt: skip
    """Returns a GemLiteLinear with the weight in its layout."""
    from gemlite import DType, GemLiteLinear

    bits, n_in = bits_of(weight), x.shape[-1]
    group = n_in // scales.shape[1]
    dtype = DType.BF16 if x.dtype == bfloat16 else DType.FP16
    layer = GemLiteLinear(
        bits, group_size=group, in_features=n_in, out_features=len(weight),
        input_dtype=dtype, output_dtype=dtype,
    )  # fmt: skip
    symmetric, bias = zeros is None, None if bias is None else bias.to(x.dtype)
    if symmetric and bits == 8:
        layer.pack(weight.clone(), scales, None, bias)
    else:
        points = MIDDLE[bits] if symmetric else zeros.to(x.dtype)
        layer.pack(unpack(weight).to(uint8), scales, points, bias)
    if group == n_in:  # scales the weights, as its helpers A16W8 and A16Wn do on NVIDIA GPUs
        layer.W_group_mode, layer.channel_scale_mode = 2 if symmetric and bits == 8 else 3, 0
    return layer


GEMLITE = Implementation(
    "gemlite",
    run=gemlite,
    supported=both(multiples(INPUTS, "n_in"), multiples(OUTPUTS, "n_out"), on_cuda(80)),
    dtypes=OF_16_BITS,
    options=OPTIONS,
    gradients=(),
    traceable=False,
    nondeterministic=("y",),
    plan=plan,
)
