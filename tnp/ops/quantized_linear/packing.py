"""Packs codes of 8 and 4 bits into the tensors that `quantized_linear` reads.

A code of 8 bits is stored as int8, less 128. Codes of 4 bits are stored eight to an int32. From the
lowest bits on they are codes 0 2 4 6 1 3 5 7, as `shifts` says. So a mask of 0x000f000f takes codes
2i and 2i + 1 together, a code in each half of the word.
"""

from __future__ import annotations

import torch
from torch import Tensor

EACH = 8  # codes of 4 bits in a word
MIDDLE = {4: 8, 8: 128}  # the zero point of symmetric codes, by bits


def bits_of(weight: Tensor) -> int:
    """Returns the bits of a code: 4 for packed words in int32, and 8 for int8."""
    return 4 if weight.dtype == torch.int32 else 8


def shifts(device: torch.device) -> Tensor:
    """Returns int32 [8]: by how many bits each of eight codes is shifted in its word."""
    k = torch.arange(EACH, dtype=torch.int32, device=device)
    return 4 * (k // 2) + 16 * (k % 2)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Returns codes as `quantized_linear` takes its weight.

    Args:
        codes: whole numbers [n_out, n_in] in any dtype, from 0 to 2^bits − 1.
        bits: 4 or 8.

    Returns:
        int8 [n_out, n_in] for 8 bits, int32 [n_out, n_in / 8] for 4 bits, contiguous.

    Raises:
        ValueError: rows of 4 bits do not fill their words.
    """
    if bits == 8:
        return (codes.to(torch.int16) - MIDDLE[8]).to(torch.int8).contiguous()
    if codes.shape[-1] % EACH:
        raise ValueError(
            f"n_in is {codes.shape[-1]}: it must be a multiple of {EACH} for codes of 4 bits"
        )
    words = codes.to(torch.int32).unflatten(-1, (-1, EACH)) << shifts(codes.device)
    return words.sum(-1, dtype=torch.int32)  # the places of eight codes do not overlap


def unpack(weight: Tensor) -> Tensor:
    """Returns the codes of a packed weight, int16 [n_out, n_in]."""
    if bits_of(weight) == 8:
        return weight.to(torch.int16) + MIDDLE[8]
    codes = (weight.unsqueeze(-1) >> shifts(weight.device)) & 15
    return codes.flatten(-2).to(torch.int16)


def centred(weight: Tensor, zeros: Tensor | None) -> Tensor:
    """Returns codes less their zero points, int16 [n_out, n_groups, group].

    Args:
        weight: the packed weight.
        zeros: uint8 [n_out, n_groups], or None for the middle of the codes, in one group.
    """
    codes = unpack(weight)
    if zeros is None:
        return codes.unsqueeze(1) - MIDDLE[bits_of(weight)]
    return codes.unflatten(1, (zeros.shape[1], -1)) - zeros.to(torch.int16).unsqueeze(-1)
