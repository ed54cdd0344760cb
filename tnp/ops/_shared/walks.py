"""How kernels walk the rows of [..., width] tensors where they lie, without a copy.

Leading dimensions that lie apart by one step are one; what is left of several tensors' leading
dimensions together may be two: see `tnp.ops._shared.rows.row_offsets`. So are walked the halves of
a [rows, 2·width] projection, and tokens h[:, n:] of a batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Walk:
    """Of several tensors of one shape.

    `strides` are (outer, inner) of each, in elements; `copied` says which must be made contiguous
    first, because their rows are not or because they lie apart by more than two steps.
    """

    n_rows: int
    width: int
    n_inner: int
    strides: tuple[tuple[int, int], ...]
    copied: tuple[bool, ...]

    @property
    def flat(self) -> bool:
        """Whether every tensor is one run of elements."""
        return self.n_rows == 1 or (
            self.n_inner == self.n_rows and all(inner == self.width for _, inner in self.strides)
        )

    @property
    def integers(self) -> tuple[int, ...]:
        """What the kernels take: n_inner, then outer and inner strides in turn."""
        return self.n_inner, *(step for pair in self.strides for step in pair)

    def laid_out(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The tensors as the strides say: themselves, or copies."""
        if True not in self.copied:
            return tensors
        pairs = zip(tensors, self.copied, strict=True)
        return tuple(x.contiguous() if copied else x for x, copied in pairs)


def walk(*tensors: torch.Tensor) -> Walk:
    """Of tensors [..., width] equal in shape, each with strides of its own."""
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
    """Sizes and strides of the leading dimensions, those joined that are one step in each."""
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
