"""Packs samples of different sizes: outside attention, their rows follow one another without
padding.

Every operator but attention computes a row from that row only. So the rows of all samples can form
one sample, with context rows first and targets after. Only queries, keys, values and attention's
output are moved to the padded order and back. Both moves are a gather, and each is the gradient of
the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tnp.model.buckets import rounded

Capacity = tuple[int, int]  # packed context and target rows


def capacity_for(counts: tuple[int, int], batch: int, sizes: tuple[int, int]) -> Capacity:
    """Returns how many rows to pack these numbers of context and target points into, with one spare
    row.

    Numbers are rounded up like buckets, so that few capacities occur, and are at most the unpacked
    rows.
    """
    return tuple(
        min(rounded(n + 1), batch * size + 1) for n, size in zip(counts, sizes, strict=True)
    )


@dataclass(frozen=True)
class Rows:
    """Maps places of points between packed and padded rows.

    The last packed row belongs to no point, so that padding has a row to read.

    Attributes:
        of_place: int64 [B · n], the packed row of each padded place. Padding has the last row.
        place: int64 [capacity], the padded place of each packed row. A spare row has any place.
        is_real: bool [capacity, 1], whether a packed row belongs to a point.
    """

    of_place: torch.Tensor
    place: torch.Tensor
    is_real: torch.Tensor

    @classmethod
    def of(cls, lengths: torch.Tensor, n: int, capacity: int) -> Rows:
        """Returns the rows of samples with `lengths` [B] ≤ n, whose sum is below `capacity`."""
        ends = lengths.long().cumsum(0)
        starts = (ends - lengths).unsqueeze(1)
        point = torch.arange(n, device=lengths.device)
        of_place = torch.where(point < lengths.unsqueeze(1), starts + point, capacity - 1)
        row = torch.arange(capacity, device=lengths.device)
        sample = torch.searchsorted(ends, row, right=True).clamp(max=len(lengths) - 1)
        place = sample * n + (row - starts.flatten()[sample]).clamp(max=n - 1)
        return cls(of_place.flatten(), place, (row < ends[-1]).unsqueeze(1))

    def then(self, other: Rows, n: int, n_other: int) -> Rows:
        """Appends n_other places to each sample, and the packed rows of `other`."""
        n_rows, both = len(self.place), n + n_other
        of_place = [self.of_place.view(-1, n), n_rows + other.of_place.view(-1, n_other)]
        place = [
            self.place // n * both + self.place % n,
            other.place // n_other * both + n + other.place % n_other,
        ]
        is_real = [self.is_real, other.is_real]
        return Rows(torch.cat(of_place, 1).flatten(), torch.cat(place), torch.cat(is_real))


class _Move(torch.autograd.Function):
    """Gathers x[index]. Its gradient is gathered by `back`, and is 0 where `is_real` is False.

    PyTorch's own gradient of a gather adds up, by atomics or after sorting.
    """

    @staticmethod
    def forward(ctx, x, index, back, is_real):
        ctx.save_for_backward(back, is_real)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, gradient):
        back, is_real = ctx.saved_tensors
        moved = gradient.index_select(0, back)
        return (moved if is_real is None else moved * is_real), None, None, None


@dataclass(frozen=True)
class Packing:
    """Packs a batch's points: context rows [0, n_context), then target rows.

    Args:
        context_lengths, target_lengths: int32 [B].
        padded: context and target places of each sample, (M, N).
        capacity: packed context and target rows. Each must be larger than the number of points.
    """

    context_lengths: torch.Tensor
    target_lengths: torch.Tensor
    padded: tuple[int, int]
    capacity: Capacity

    def __post_init__(self) -> None:
        lengths = self.context_lengths, self.target_lengths
        context, target = map(Rows.of, lengths, self.padded, self.capacity)
        rows = {"context": context, "target": target, "all": context.then(target, *self.padded)}
        object.__setattr__(self, "_rows", rows)

    @property
    def n_targets(self) -> torch.Tensor:
        """Returns the number of targets of the batch, int32 [1]."""
        return self.target_lengths.sum(0, keepdim=True, dtype=torch.int32)

    def pack(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """Packs points [B, n, width] of "context", "target" or "all" to [1, capacity, width]."""
        rows = self._rows[what]
        moved = _Move.apply(x.flatten(0, 1), rows.place, rows.of_place, None)
        return moved.unsqueeze(0)

    def unpack(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """Unpacks heads [1, H, capacity, D] to [B, H, n, D], with the spare row as padding."""
        rows, n_heads = self._rows[what], x.shape[1]
        flat = x.transpose(1, 2).flatten(0, 1).flatten(1)
        moved = _Move.apply(flat, rows.of_place, rows.place, rows.is_real)
        per_sample = moved.view(len(self.context_lengths), -1, n_heads, x.shape[-1])
        return per_sample.transpose(1, 2)

    def around(self, attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Calls attend(q, k, v) → [B, n, width] with unpacked heads, and packs its result."""
        what = "target" if q.shape[2] == self.capacity[1] else "all"
        o = attend(self.unpack(q, what), *(self.unpack(x, "context") for x in (k, v)))
        return self.pack(o, what)
