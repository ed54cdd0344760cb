"""Reads quantized weights of other packages: GPTQ, AWQ, compressed-tensors. All are permutations.

- GPTQ: a word holds inputs of one output, in order from the low bits on. Zero points lie likewise,
  outputs in order.
- AWQ: a word holds eight outputs of one input, in the places 0 2 4 6 1 3 5 7. Zero points too.
- compressed-tensors, "pack-quantized": a word holds inputs of one output, in order. Zero points are
  packed along the outputs.

Sources: GPTQModel 7.7.0, compressed-tensors 0.20.0.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tnp.ops.quantized_linear.definition import GROUPS
from tnp.ops.quantized_linear.packing import EACH, MIDDLE, pack, shifts
from tnp.ops.quantized_linear.quantizer import QuantizedWeight
from tnp.util.checks import require_tensors

WORD_BITS = 32
GPTQ_ADDS = {"gptq": 1, "gptq_v2": 0}  # what is missing in stored zero points, by format


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    bits: int = 4,
    checkpoint_format: str = "gptq",
) -> QuantizedWeight:
    """Returns a layer of a GPTQ checkpoint.

    Args:
        qweight: int32 [n_in · bits / 32, n_out].
        qzeros: int32 [n_groups, n_out · bits / 32].
        scales: bfloat16 or float16 [n_groups, n_out].
        g_idx: int32 [n_in], the group of each input, or None. Groups must follow one another.
        bits: 4 or 8.
        checkpoint_format: "gptq", which stores zero points less one, or "gptq_v2".

    Raises:
        ValueError: tensors do not fit together, or `g_idx` has groups in activation order.
    """
    if checkpoint_format not in GPTQ_ADDS:
        raise ValueError(
            f"checkpoint_format is {checkpoint_format!r}: it must be 'gptq' or 'gptq_v2'"
        )
    each = _each(bits)
    _require_words(qweight=qweight, qzeros=qzeros)
    _require_scales("scales", scales)
    n_in, (n_groups, n_out) = len(qweight) * each, scales.shape
    _require_shape("qweight", qweight, (n_in // each, n_out))
    _require_groups("scales", n_groups, n_in)
    _require_shape("qzeros", qzeros, (n_groups, _words("n_out", n_out, each)))
    if g_idx is not None:
        _require_shape("g_idx", g_idx, (n_in,))
        group = n_in // n_groups
        if not torch.equal(g_idx.long().cpu(), torch.arange(n_in) // group):
            raise ValueError(
                f"g_idx has groups in activation order: groups must be {group} inputs in turn, as "
                "a checkpoint made with desc_act=False has them"
            )
    codes = _unpacked(qweight, bits, 0).t()
    # Less one, a zero point of 0 is stored as the largest code.
    zeros = (_unpacked(qzeros, bits, 1).t() + GPTQ_ADDS[checkpoint_format]) % 2**bits
    return _made(codes, bits, scales.t(), zeros)


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> QuantizedWeight:
    """Returns a layer of an AWQ checkpoint ("gemm"), 4 bits.

    Args:
        qweight: int32 [n_in, n_out / 8].
        qzeros: int32 [n_groups, n_out / 8].
        scales: bfloat16 or float16 [n_groups, n_out].

    Raises:
        ValueError: tensors do not fit together.
    """
    _require_words(qweight=qweight, qzeros=qzeros)
    _require_scales("scales", scales)
    n_in, (n_groups, n_out) = len(qweight), scales.shape
    width = _words("n_out", n_out, EACH)
    _require_shape("qweight", qweight, (n_in, width))
    _require_groups("scales", n_groups, n_in)
    _require_shape("qzeros", qzeros, (n_groups, width))
    places = shifts(qweight.device)
    codes, zeros = (
        ((words.unsqueeze(-1) >> places) & 15).flatten(1).t() for words in (qweight, qzeros)
    )
    return _made(codes, 4, scales.t(), zeros)


def from_compressed_tensors(
    weight_packed: Tensor,
    weight_scale: Tensor,
    weight_shape: Tensor | Sequence[int],
    weight_zero_point: Tensor | None = None,
    *,
    bits: int = 4,
    weight_g_idx: Tensor | None = None,
) -> QuantizedWeight:
    """Returns a layer of a compressed-tensors checkpoint in format "pack-quantized".

    Args:
        weight_packed: int32 [n_out, n_in · bits / 32].
        weight_scale: bfloat16 or float16 [n_out, n_groups].
        weight_shape: n_out and n_in.
        weight_zero_point: int32 [n_out · bits / 32, n_groups], packed along the outputs, or None if
            the weight is symmetric.
        bits: 4 or 8.
        weight_g_idx: must be None: groups follow one another.

    Raises:
        ValueError: tensors do not fit together.
    """
    if weight_g_idx is not None:
        raise ValueError(
            "weight_g_idx is given: it must be None, because groups must be inputs in turn"
        )
    each = _each(bits)
    _require_words(weight_packed=weight_packed)
    _require_scales("weight_scale", weight_scale)
    n_out, n_in = (int(size) for size in weight_shape)
    _require_shape("weight_packed", weight_packed, (n_out, _words("n_in", n_in, each)))
    n_groups = weight_scale.shape[1]
    _require_shape("weight_scale", weight_scale, (n_out, n_groups))
    _require_groups("weight_scale", n_groups, n_in)
    zeros = None
    if weight_zero_point is not None:
        _require_words(weight_zero_point=weight_zero_point)
        width = _words("n_out", n_out, each)
        _require_shape("weight_zero_point", weight_zero_point, (width, n_groups))
        zeros = _unpacked(weight_zero_point, bits, 0)
    return _made(_unpacked(weight_packed, bits, 1), bits, weight_scale, zeros)


def _each(bits: int) -> int:
    """Returns how many codes a word holds."""
    if bits not in MIDDLE:
        raise ValueError(f"bits is {bits!r}: it must be 4 or 8")
    return WORD_BITS // bits


def _words(name: str, size: int, each: int) -> int:
    """Returns how many words hold `size` codes."""
    if size % each:
        raise ValueError(f"{name} is {size}: it must be a multiple of {each}, the codes of a word")
    return size // each


def _unpacked(words: Tensor, bits: int, dim: int) -> Tensor:
    """Returns codes that follow one another along a dimension, from the low bits of a word on."""
    places = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    shape = [1] * (words.dim() + 1)
    shape[dim + 1] = len(places)
    return ((words.unsqueeze(dim + 1) >> places.view(shape)) & (2**bits - 1)).flatten(dim, dim + 1)


def _made(codes: Tensor, bits: int, scales: Tensor, zeros: Tensor | None) -> QuantizedWeight:
    """Returns the weight of codes [n_out, n_in], without zero points that are all the middle."""
    if zeros is not None and bool((zeros == MIDDLE[bits]).all()):
        zeros = None
    zeros = zeros if zeros is None else zeros.to(torch.uint8).contiguous()
    return QuantizedWeight(pack(codes, bits), scales.contiguous(), zeros)


def _require_words(**tensors: Tensor) -> None:
    require_tensors(**tensors)
    for name, x in tensors.items():
        if x.dtype != torch.int32 or x.dim() != 2 or not x.numel():
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)}: it must be a torch.int32 matrix"
            )


def _require_scales(name: str, scales: Tensor) -> None:
    require_tensors(**{name: scales})
    of_16_bits = scales.dtype in (torch.bfloat16, torch.float16)
    if not of_16_bits or scales.dim() != 2 or not scales.numel():
        raise ValueError(
            f"{name} is {scales.dtype} {tuple(scales.shape)}: it must be a matrix in "
            "torch.bfloat16 or torch.float16"
        )


def _require_groups(name: str, n_groups: int, n_in: int) -> None:
    if n_in % n_groups or (n_groups > 1 and n_in // n_groups not in GROUPS):
        raise ValueError(
            f"{name} has {n_groups} groups for {n_in} inputs: groups must have 32, 64, 128 or all "
            "inputs"
        )


def _require_shape(name: str, x: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}: it must be {shape} beside the other tensors"
        )
