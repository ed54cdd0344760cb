"""Lets kernels walk the rows of [..., width] tensors where they lie, without a copy.

Leading dimensions with one step between rows are joined. Up to two may remain for all tensors
together: see `tnp.ops._shared.rows.row_offsets`. That covers the halves of a [rows, 2·width]
projection, and tokens h[:, n:] of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Walk:
    """Describes a walk through several tensors of one shape.

    `strides` are (outer, inner) of each tensor, in elements. `copied` says which tensors must be
    made contiguous first: their rows are not contiguous, or have more than two different steps.
    """

    n_rows: int
    width: int
    n_inner: int
    strides: tuple[tuple[int, int], ...]
    copied: tuple[bool, ...]

    @property
    def flat(self) -> bool:
        """Returns whether every tensor is contiguous."""
        return self.n_rows == 1 or (
            self.n_inner == self.n_rows and all(inner == self.width for _, inner in self.strides)
        )

    @property
    def integers(self) -> tuple[int, ...]:
        """Returns the kernels' arguments: n_inner, then outer and inner strides in turn."""
        return self.n_inner, *(step for pair in self.strides for step in pair)

    def laid_out(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Returns tensors with these strides: the tensors themselves, or copies."""
        if True not in self.copied:
            return tensors
        pairs = zip(tensors, self.copied, strict=True)
        return tuple(x.contiguous() if copied else x for x, copied in pairs)


def walk(*tensors: torch.Tensor) -> Walk:
    """Returns the walk through tensors [..., width] of one shape, each with its own strides."""
    *leading, width = tensors[0].shape
    n_rows = prod(leading)
    copied = [width > 1 and x.stride(-1) != 1 for x in tensors]
    groups = _groups(tensors, leading, width, copied)
    if len(groups) > 2:
        copied = [not x.is_contiguous() for x in tensors]
        groups = _groups(tensors, leading, width, copied)
    none = (0,) * len(tensors)
    n_inner, inner = groups[-1] if groups else (1, none)
    outer = groups[0][1] if len(groups) == 2 else none
    pairs = tuple(zip(outer, inner, strict=True))
    return Walk(n_rows, width, n_inner, pairs, tuple(copied))


def _groups(
    tensors: tuple[torch.Tensor, ...], leading: list[int], width: int, copied: list[bool]
) -> list[tuple[int, tuple[int, ...]]]:
    """Returns sizes and strides of the leading dimensions, joined where rows have one step."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for at, size in enumerate(leading):
        if size == 1:
            continue
        dense = width * prod(leading[at + 1 :])
        pairs = zip(tensors, copied, strict=True)
        steps = tuple(dense if copy else x.stride(at) for x, copy in pairs)
        if found and found[-1][1] == tuple(step * size for step in steps):
            found[-1] = found[-1][0] * size, steps
        else:
            found.append((size, steps))
    return found
