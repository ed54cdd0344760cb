"""Samples of sizes of their own without padding: outside attention their rows follow one another.

Every operator but attention computes a row from that row alone. So rows of all samples may stand as
one sample, context rows ahead and targets behind, and only queries, keys, values and attention's
output are moved between that order and the padded one, where sample b has a place for each of its
points. Both ways are a gather, and each is the gradient of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tnp.model.buckets import rounded

Capacity = tuple[int, int]  # packed context and target rows


def capacity_for(counts: tuple[int, int], batch: int, sizes: tuple[int, int]) -> Capacity:
    """Rows for so many context and target points of a batch of those sizes, and one that is spare.

    Rounded up as buckets are, so that few numbers stand for all, and no more than without packing.
    """
    return tuple(
        min(rounded(n + 1), batch * size + 1) for n, size in zip(counts, sizes, strict=True)
    )


@dataclass(frozen=True)
class Rows:
    """Where points stand, packed and padded.

    The last packed row is nobody's, so that padding has a row to read.

    Attributes:
        of_place: int64 [B · n], the packed row of each padded place; that of padding is the last.
        place: int64 [capacity], the padded place of each packed row; that of a spare row is any.
        is_real: bool [capacity, 1], which packed rows are a point's.
    """

    of_place: torch.Tensor
    place: torch.Tensor
    is_real: torch.Tensor

    @classmethod
    def of(cls, lengths: torch.Tensor, n: int, capacity: int) -> Rows:
        """Of samples with `lengths` [B] of at most n points, together fewer than `capacity`."""
        ends = lengths.long().cumsum(0)
        starts = (ends - lengths).unsqueeze(1)
        point = torch.arange(n, device=lengths.device)
        of_place = torch.where(point < lengths.unsqueeze(1), starts + point, capacity - 1)
        row = torch.arange(capacity, device=lengths.device)
        sample = torch.searchsorted(ends, row, right=True).clamp(max=len(lengths) - 1)
        place = sample * n + (row - starts.flatten()[sample]).clamp(max=n - 1)
        return cls(of_place.flatten(), place, (row < ends[-1]).unsqueeze(1))

    def then(self, other: Rows, n: int, n_other: int) -> Rows:
        """Of samples whose n places are followed by n_other others, and packed rows likewise."""
        n_rows, both = len(self.place), n + n_other
        of_place = [self.of_place.view(-1, n), n_rows + other.of_place.view(-1, n_other)]
        place = [
            self.place // n * both + self.place % n,
            other.place // n_other * both + n + other.place % n_other,
        ]
        is_real = [self.is_real, other.is_real]
        return Rows(torch.cat(of_place, 1).flatten(), torch.cat(place), torch.cat(is_real))


class _Move(torch.autograd.Function):
    """x [n, width] → x[index], whose gradient is gathered by `back` and 0 where not `is_real`.

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
    """A batch's points: context rows [0, n_context), target rows behind them.

    Args:
        context_lengths, target_lengths: int32 [B].
        padded: context and target places of each sample, (M, N).
        capacity: packed context and target rows, each more than there are points.
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
        """All targets of the batch, int32 [1]."""
        return self.target_lengths.sum(0, keepdim=True, dtype=torch.int32)

    def pack(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """Points [B, n, width] of "context", "target" or "all" → [1, capacity, width]."""
        rows = self._rows[what]
        moved = _Move.apply(x.flatten(0, 1), rows.place, rows.of_place, None)
        return moved.unsqueeze(0)

    def unpack(self, x: torch.Tensor, what: str) -> torch.Tensor:
        """Rows of heads [1, H, capacity, D] → [B, H, n, D]; padding holds a spare row's numbers."""
        rows, n_heads = self._rows[what], x.shape[1]
        flat = x.transpose(1, 2).flatten(0, 1).flatten(1)
        moved = _Move.apply(flat, rows.of_place, rows.place, rows.is_real)
        per_sample = moved.view(len(self.context_lengths), -1, n_heads, x.shape[-1])
        return per_sample.transpose(1, 2)

    def around(self, attend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """attend(q, k, v) → [B, n, width] of unpacked heads, packed again."""
        what = "target" if q.shape[2] == self.capacity[1] else "all"
        o = attend(self.unpack(q, what), *(self.unpack(x, "context") for x in (k, v)))
        return self.pack(o, what)
