"""Reads the inputs of operators on rows: x as a matrix, weights cast and padded.

All decisions are made once for a plan, because the tensors of all its calls have the same layout.
The last dimension of a kernel's operand is contiguous; rows may lie further apart.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from tnp.dispatch.spec import Call, Reason
from tnp.ops._shared.casting import cast_weight

# Hidden widths are padded to multiples of this many units. If Triton knows a multiple of 16, it
# loads 16 bytes at a time.
HIDDEN_MULTIPLE = 16
# TMA needs addresses, and the distance of rows, in multiples of this many bytes.
TMA_MULTIPLE = 16

Read = Callable[[torch.Tensor], torch.Tensor]
Many = tuple[torch.Tensor | None, ...]
# shape and strides, the arguments of new_empty_strided
Layout = tuple[tuple[int, ...], tuple[int, ...]]


def dense(*shape: int) -> Layout:
    """Returns the shape and strides of contiguous memory, for `x.new_empty_strided(*layout)`.

    A launch makes its layouts once: `x.new_empty(x.shape)` at every call takes the host longer.
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(shape), tuple(reversed(strides))


def hidden_width(d_ff: int) -> int:
    """Returns d_ff, rounded up to a width that the kernels multiply."""
    return -(-d_ff // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE


def saves_rows(call: Call, most: int) -> Reason:
    """Returns why a kernel that saves up to `most` hidden rows cannot serve a call, or None."""
    if not call.wanted:
        return "it saves for a backward pass that is not wanted"
    if call.problem["rows"] > most:
        return f"of more than {most:,} rows nothing is saved"
    return None


@dataclass(frozen=True)
class Rows:
    """Reads x [..., D] as a matrix [n, width] whose rows are contiguous.

    `pointed(x)` starts at the matrix's address and may have any shape: that is enough for a kernel
    that takes sizes and strides. `matrix(x)` is the matrix itself.
    """

    n: int
    width: int
    stride: int  # from one row to the next
    pointed: Read
    matrix: Read


def rows_of(x: torch.Tensor, tma: bool = False, contiguous: bool = False) -> Rows:
    """Returns how to read a tensor [..., D] as rows.

    It is read in place if possible, and else copied at every call.

    Args:
        x: any tensor of the plan's layout.
        tma: rows must start at multiples of 16 bytes, and may not overlap.
        contiguous: rows must follow one another.
    """
    width, flat = x.shape[-1], x.dim() == 2
    n = x.numel() // width
    shape = n, width
    rows_follow = x.is_contiguous() or (not contiguous and (flat or _collapses(x)))
    in_place = rows_follow and x.stride(-1) == 1
    stride = (x if flat else x.view(shape)).stride(0) if in_place else width
    if in_place and tma:
        bytes_apart = stride * x.element_size()
        misses = x.data_ptr() % TMA_MULTIPLE or bytes_apart % TMA_MULTIPLE
        in_place = bytes_apart > 0 and not misses
    if in_place:
        return Rows(n, width, stride, _itself, _itself if flat else lambda x: x.view(shape))

    def copied(x: torch.Tensor) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    return Rows(n, width, width, copied, copied if flat else lambda x: copied(x).view(shape))


def near(tensors: Many, dims: tuple[tuple[int, ...], ...]) -> Callable[[Many], Many]:
    """Returns a function that prepares tensors for a kernel that counts some offsets in 32 bits.

    The function returns a contiguous copy of a tensor whose offsets along `dims` need more bits. It
    returns other tensors unchanged. Offsets of 64 bits would cost registers at every call, and
    such a tensor is rare.

    Args:
        tensors: tensors of the plan's layout; some may be None.
        dims: for each of them, the dimensions whose offsets have 32 bits.
    """
    pairs = zip(tensors, dims, strict=True)
    far = [x is not None and reach(x, of_x) >= 2**31 for x, of_x in pairs]
    if True not in far:
        return _itself

    def read(tensors: Many) -> Many:
        pairs = zip(tensors, far, strict=True)
        return tuple(x.contiguous() if copied else x for x, copied in pairs)

    return read


def reach(x: torch.Tensor, dims: tuple[int, ...]) -> int:
    """Returns the largest offset along these dimensions, in elements."""
    return sum((x.shape[dim] - 1) * x.stride(dim) for dim in dims)


def _collapses(x: torch.Tensor) -> bool:
    """Returns whether all dimensions but the last can be viewed as one."""
    sizes = zip(x.shape[:-1], x.stride()[:-1], strict=True)
    apart = [pair for pair in sizes if pair[0] != 1]
    pairs = zip(apart, apart[1:], strict=False)
    return all(step == inner * size for (_, step), (size, inner) in pairs)


def _itself(x: Any) -> Any:
    return x


def weights(
    up: torch.Tensor, down: torch.Tensor, dtype: torch.dtype, tma: bool = False
) -> Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    """Returns a function that returns up [..., F, D] and down [..., O, F] in `dtype`, contiguous.

    F is zero-padded if necessary, which is exact: silu(0) = 0.
    """
    padding = hidden_width(up.shape[-2]) - up.shape[-2]
    as_it_is = not padding and up.is_contiguous() and down.is_contiguous()
    # A cast is a new tensor, which the allocator aligns.
    moved = tma and any(w.dtype == dtype and w.data_ptr() % TMA_MULTIPLE for w in (up, down))
    if as_it_is and not moved:
        return lambda up, down: (cast_weight(up, dtype), cast_weight(down, dtype))

    def made(up: torch.Tensor, down: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        up, down = cast_weight(up, dtype), cast_weight(down, dtype)
        if padding:
            up, down = F.pad(up, (0, 0, 0, padding)), F.pad(down, (0, padding))
        if moved:
            return up.clone(memory_format=torch.contiguous_format), down.clone(
                memory_format=torch.contiguous_format
            )
        return up.contiguous(), down.contiguous()

    return made


def of_up(up: torch.Tensor) -> Read:
    """Returns a function from the float32 gradient of padded up to the gradient of `up`."""
    return _unpadded(up, -2, up.shape[-2])


def of_down(down: torch.Tensor) -> Read:
    """Returns a function from the float32 gradient of padded down to the gradient of `down`."""
    return _unpadded(down, -1, down.shape[-1])


def _unpadded(weight: torch.Tensor, dim: int, d_ff: int) -> Read:
    dtype = weight.dtype
    if hidden_width(d_ff) == d_ff:
        return _itself if dtype == torch.float32 else lambda gradient: gradient.to(dtype)
    return lambda gradient: gradient.narrow(dim, 0, d_ff).to(dtype).contiguous()
