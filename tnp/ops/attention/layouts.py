"""Converts between the layouts of queries, keys and values.

`attention` takes [B, H, T, D] with any strides whose last dimension is contiguous. Projections
write, and FlashAttention takes, [B, T, H, D]. Packed sequences lie in rows [B · T, H, D]. Grouped
[B, H_kv, G, T, D] shows the G heads of queries that share a head of keys.

Nothing is copied if strides allow a view.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def heads_first(x: Tensor) -> Tensor:
    """Returns [B, T, H, D] as [B, H, T, D], a view."""
    _require_dimensions(x, "[B, T, H, D]")
    return x.transpose(1, 2)


def tokens_first(x: Tensor) -> Tensor:
    """Returns [B, H, T, D] as [B, T, H, D], a view. It is contiguous if x is a result of ours."""
    _require_dimensions(x, "[B, H, T, D]")
    return x.transpose(1, 2)


def to_rows(x: Tensor) -> Tensor:
    """Returns [B, H, T, D] as rows [B · T, H, D]: the samples as sequences of equal length."""
    return tokens_first(x).flatten(0, 1)


def from_rows(x: Tensor, batch: int) -> Tensor:
    """Returns rows [B · T, H, D] as a view [B, H, T, D]; ValueError if `batch` does not divide."""
    _require_dimensions(x, "[B · T, H, D]")
    if batch < 1 or len(x) % batch:
        raise ValueError(f"batch is {batch}: it must divide x's {len(x)} rows")
    return heads_first(x.unflatten(0, (batch, len(x) // batch)))


def grouped(q: Tensor, n_kv_heads: int) -> Tensor:
    """Returns [B, H, T, D] as [B, H_kv, G, T, D], a view. [:, h] are the queries of head h of keys.

    So with keys [B, H_kv, T, D] scores are `grouped(q, H_kv) @ k[:, :, None].mT`. Raises ValueError
    if `n_kv_heads` does not divide the heads.
    """
    _require_dimensions(q, "[B, H, T, D]")
    n_heads = q.shape[1]
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(f"n_kv_heads is {n_kv_heads}: it must divide q's {n_heads} heads")
    return q.unflatten(1, (n_kv_heads, n_heads // n_kv_heads))


def ungrouped(x: Tensor) -> Tensor:
    """Returns [B, H_kv, G, T, D] as [B, H, T, D]; the inverse of `grouped`."""
    _require_dimensions(x, "[B, H_kv, G, T, D]")
    return x.flatten(1, 2)


def _require_dimensions(x: Tensor, layout: str) -> None:
    if x.dim() != layout.count(",") + 1:
        raise ValueError(f"x has shape {tuple(x.shape)}: it must be {layout}")
