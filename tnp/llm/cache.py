"""Keeps the keys and values of a batch of sequences, and their lengths on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tnp.llm.decoder import Decoder
from tnp.ops.kv_cache.paged import Handles, PagedCache
from tnp.util.checks import require_count


class Places(NamedTuple):
    """Says where new tokens are written: the row of each in a layer's memory, and the slot there.

    `tokens` are the numbers, b · T + t, of those tokens that are written; None stands for all.
    """

    rows: Tensor
    slots: Tensor
    tokens: Tensor | None


class Cache:
    """Holds keys and values of all layers.

    `keys[layer]` and `values[layer]` are [batch, n_kv_heads, capacity, head_dim], or in pages
    [n_pages, n_kv_heads, page, head_dim] with `page_table` int32 [batch, columns]. `lengths` is
    int32 [batch], how many tokens each sequence has. `capacity` is the most that it may have.

    Args:
        decoder: gives sizes, dtype and device.
        batch: how many sequences.
        capacity: the most tokens of a sequence.

    Raises:
        ValueError: batch or capacity is no whole number from 1 on, or a sequence would be longer
            than the decoder's longest.
    """

    def __init__(self, decoder: Decoder, batch: int, capacity: int) -> None:
        s = decoder.sizes
        batch, capacity = require_count("batch", batch, 1), require_count("capacity", capacity, 1)
        _require_no_longer(capacity, s.longest)
        shape = s.n_layers, batch, s.n_kv_heads, capacity, s.head_dim
        on = {"dtype": decoder.dtype, "device": decoder.device}
        # Zeros, because rows that were never written must be finite.
        self.keys: Sequence[Tensor] = torch.zeros(shape, **on)
        self.values: Sequence[Tensor] = torch.zeros(shape, **on)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=decoder.device)
        self.page_table: Tensor | None = None
        self.capacity = capacity
        self.is_empty = True  # whether no sequence has tokens, as the host knows it

    @classmethod
    def of_pages(cls, pool: PagedCache, handles: Handles, n_tokens: int) -> Cache:
        """Returns a cache in pages of `pool`, with room for `n_tokens` more of each sequence.

        The pool counts these tokens at once. So write all of them before its next use.

        Raises:
            ValueError, CacheFull: as `PagedCache.extend`.
        """
        lengths = pool.n_keys(handles)
        most = int(lengths.max()) if len(lengths) else 0
        pool.extend(handles, n_tokens)
        cache = cls.__new__(cls)
        layers = [pool.layer(layer) for layer in range(pool.n_layers)]
        cache.keys, cache.values = zip(*layers, strict=True)
        cache.lengths, cache.page_table = lengths, pool.page_table(handles)
        cache.capacity, cache.is_empty = most + n_tokens, most == 0
        return cache

    def reset(self) -> None:
        """Forgets all tokens. Their memory is not changed."""
        self.lengths.zero_()
        self.is_empty = True

    def places(self, positions: Tensor, n_new: Tensor | None = None) -> Places:
        """Returns where tokens at `positions` [B, T] are written, int64.

        Args:
            positions: each token's place in its sequence.
            n_new: int [B], how many of the T tokens each sequence has, from the first on; None:
                all. The host then waits for the device.
        """
        if self.page_table is None:
            rows = torch.arange(len(positions), device=positions.device)[:, None]
            rows, slots = rows.expand_as(positions), positions
        else:
            page = self.keys[0].shape[2]
            columns = (positions // page).clamp(max=self.page_table.shape[1] - 1)
            rows, slots = self.page_table.gather(1, columns).long(), positions % page
        rows, slots, tokens = rows.flatten(), slots.flatten(), None
        if n_new is not None:
            ahead = torch.arange(positions.shape[1], device=positions.device)
            tokens = (ahead < n_new[:, None]).flatten().nonzero()[:, 0]
            rows, slots = rows[tokens], slots[tokens]
        return Places(rows, slots, tokens)

    def write(self, layer: int, k: Tensor, v: Tensor, places: Places) -> None:
        """Writes new tokens' k and v [B, n_kv_heads, T, head_dim] to their places in a layer."""
        for memory, x in ((self.keys[layer], k), (self.values[layer], v)):
            x = x.transpose(1, 2).flatten(0, 1)
            if places.tokens is not None:
                x = x[places.tokens]
            memory.transpose(1, 2).index_put_((places.rows, places.slots), x)


def _require_no_longer(n_tokens: int, longest: int) -> None:
    if n_tokens > longest:
        raise ValueError(
            f"a sequence would have {n_tokens} tokens: this decoder's sequences have at most "
            f"{longest}"
        )
