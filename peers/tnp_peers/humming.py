"""Runs Humming's linear layer, which compiles its kernels by NVRTC on the first call.

It needs CUDA's headers. Its folder of compiled kernels is HUMMING_CACHE_DIR, or ~/.humming/cache.
"""

from typing import Any

import torch
from torch import Tensor

from tnp.dispatch.spec import Implementation, on_cuda
from tnp.ops.quantized_linear.definition import OF_16_BITS, OPTIONS
from tnp.ops.quantized_linear.packing import bits_of, unpack
from tnp.ops.quantized_linear.torch_forms import kept
from tnp_peers.support import both, multiples, rows, words

INPUTS, OUTPUTS = 64, 128  # its smallest tile on Hopper for 16-bit inputs (tune/sm90_policies.py)


def humming(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Runs HummingLayer with the tiles that its heuristics choose."""
    y = kept(plan, x, weight, scales, zeros, bias)(rows(x))
    return y.view(*x.shape[:-1], len(weight))


def plan(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None = None,
    bias: Tensor | None = None,
) -> Any:  # fmt: skip
    """Returns a HummingLayer with the weight in its layout.

    It reads words of a row's codes in order, and words of zero points in order of the outputs. A
    symmetric weight without code 0 turns into signs and magnitudes.
    """
    from humming.layer import HummingLayer

    bits, n_in, n_groups = bits_of(weight), x.shape[-1], scales.shape[1]
    given = {"weight": words(unpack(weight), bits), "weight_scale": scales}
    if zeros is not None:
        given["zero_point"] = words(zeros.t(), bits).t().contiguous()
    if bias is not None:
        given["bias"] = bias.to(x.dtype)
    with torch.cuda.device_of(weight):
        layer = HummingLayer(
            shape_n=len(weight),
            shape_k=n_in,
            weight_config={
                "dtype": f"uint{bits}",
                "group_size": n_in // n_groups if n_groups > 1 else 0,  # 0: a row
                "has_zero_point": zeros is not None,
            },
            has_bias=bias is not None,
            torch_dtype=x.dtype,
        ).to(weight.device)
        layer.load_from_tensors(given)
        layer.transform()
    return layer


HUMMING = Implementation(
    "humming",
    run=humming,
    supported=both(multiples(INPUTS, "n_in"), multiples(OUTPUTS, "n_out"), on_cuda(80)),
    dtypes=OF_16_BITS,
    options=OPTIONS,
    gradients=(),
    traceable=False,
    plan=plan,
)
