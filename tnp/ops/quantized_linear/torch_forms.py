"""Runs PyTorch's own kernels for weights of 4 and 8 bits."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from tnp.dispatch.spec import Call, Implementation, Reason, on_cuda
from tnp.ops.quantized_linear.definition import GROUPS, OPTIONS

if TYPE_CHECKING:
    from collections.abc import Callable, MutableMapping

    from torch import Tensor

MULTIPLE = 8  # tinygemm's outputs come in tiles of this many
TILE = 16  # inputs of a tile of tinygemm


def tinygemm(x, weight, scales, zeros=None, bias=None):
    """Runs `_weight_int4pack_mm`. Its layout is made once for a weight, as long as it stays.

    A weight is (code − 8) · scale + zero there, with zero in bfloat16. So a zero point z becomes
    (8 − z) · scale, rounded. Symmetric weights are exact.
    """
    from torch import ops

    packed, scales_and_zeros = _kept(lay_out, x, weight, scales, zeros)
    group = x.shape[-1] // scales.shape[1]
    rows = x.reshape(-1, x.shape[-1])
    y = ops.aten._weight_int4pack_mm(rows, packed, group, scales_and_zeros)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.view(*x.shape[:-1], -1)


def lay_out(x, weight, scales, zeros=None, bias=None) -> tuple[Tensor, Tensor]:
    """Returns tinygemm's weight, and its scales and zeros [n_in / group, n_out, 2]."""
    import torch

    from tnp.ops.quantized_linear.packing import MIDDLE, unpack

    codes = unpack(weight).to(torch.uint8)
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    n_tiles = codes.shape[1] // TILE
    inner = next(n for n in (8, 4, 2) if n_tiles % n == 0)
    packed = torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), inner)
    offset = torch.zeros_like(scales)
    if zeros is not None:
        offset = ((MIDDLE[4] - zeros.float()) * scales.float()).to(scales.dtype)
    return packed, torch.stack((scales, offset), -1).transpose(0, 1).contiguous()


def dequantized(x, weight, scales, zeros=None, bias=None):
    """Runs PyTorch's linear layer with the weight in x's dtype, which is made once and kept.

    It is what quantized weights must beat: it reads 2 bytes a weight, and takes this memory too.
    """
    from torch.nn import functional as F

    w = _kept(dequantize, x, weight, scales, zeros)
    return F.linear(x, w, bias if bias is None else bias.to(x.dtype))


def dequantize(x, weight, scales, zeros=None, bias=None) -> Tensor:
    """Returns the weight [n_out, n_in] in x's dtype."""
    from tnp.ops.quantized_linear.quantizer import weight_of

    return weight_of(weight, scales, zeros, x.dtype)


@cache
def _made(make: Callable) -> MutableMapping:
    """Returns results of `make` by weight. A result goes when its weight goes."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


def _kept(
    make: Callable, x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None
) -> tuple[Tensor, Tensor] | Tensor:
    """Returns what `make` makes of a weight, anew if a tensor is another one or was changed.

    Tensors of inference mode do not tell whether they were changed: they are laid out every time.
    """
    of = weight, scales, zeros
    if any(one is not None and one.is_inference() for one in of):
        return make(x, *of)
    versions = tuple(None if one is None else one._version for one in of)
    found = _made(make).get(weight)
    if found is None or found[0] is not scales or found[1] is not zeros or found[2] != versions:
        found = _made(make)[weight] = scales, zeros, versions, make(x, *of)
    return found[3]


def int8pack(x, weight, scales, zeros=None, bias=None):
    """Runs `_weight_int8pack_mm`, with a scale for each row of the weight."""
    from torch import ops

    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = ops.aten._weight_int8pack_mm(rows, weight.contiguous(), scales.flatten())
    y = y if bias is None else y + bias.to(y.dtype)
    return y.view(*x.shape[:-1], -1)


def _tinygemm_takes(call: Call) -> Reason:
    p = call.problem
    if p["bits"] != 4:
        return "it takes bits=4, not 8"
    if p["group"] not in GROUPS:
        return f"it takes groups of {', '.join(map(str, GROUPS))}, not {p['group']}"
    if p["n_out"] % MULTIPLE:
        return f"n_out is {p['n_out']}: it takes multiples of {MULTIPLE}"
    return on_cuda(80)(call)


def _int8pack_takes(call: Call) -> Reason:
    p = call.problem
    if p["bits"] != 8:
        return "it takes bits=8, not 4"
    if p["group"] != p["n_in"]:
        return f"it takes a scale for a row of {p['n_in']}, not for {p['group']}"
    return None


IMPLEMENTATIONS = (
    Implementation(
        "dequantized",
        run=dequantized,
        provider="torch",
        options=OPTIONS,
        gradients=(),
        selectable=False,  # it takes the memory that quantized weights save
        traceable=False,
        plan=dequantize,
    ),
    Implementation(
        "tinygemm",
        run=tinygemm,
        provider="torch",
        supported=_tinygemm_takes,
        dtypes=("bfloat16",),
        options=OPTIONS,
        gradients=(),
        traceable=False,
        plan=lay_out,
    ),
    Implementation(
        "int8pack",
        run=int8pack,
        provider="torch",
        supported=_int8pack_takes,
        dtypes=("bfloat16",),
        options=("bits", "bias"),
        gradients=(),
    ),
)
