"""Runs PyTorch's own kernels for weights of 4 and 8 bits."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

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

    packed, scales_and_zeros = kept(lay_out, x, weight, scales, zeros)
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

    w = kept(dequantize, x, weight, scales, zeros)
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


def kept(make: Callable, x: Tensor, weight: Tensor, *others: Tensor | None) -> Any:
    """Returns `make(x, weight, *others)`, made anew if a tensor but x is another or was changed.

    Tensors of inference mode do not tell whether they were changed: they are laid out every time.
    What is made must not hold the weight, nor a view of it: it would stay for ever.
    """
    of = weight, *others
    if any(one is not None and one.is_inference() for one in of):
        return make(x, *of)
    versions = [None if one is None else one._version for one in of]
    before, version, made = _made(make).get(weight, ((), (), None))
    if version != versions or any(a is not b for a, b in zip(before, others, strict=True)):
        made = make(x, *of)
        _made(make)[weight] = others, versions, made
    return made


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
