"""Keeps keys and values of many sequences in pages of a pool, which `decode_attention` reads.

A page holds a fixed number of tokens of every layer. Sequences take pages in any order as they
grow, and give them back. Forks share pages until one of them writes (Kwon et al., PagedAttention,
arXiv 2309.06180). The host knows the owners of each page, so nothing waits for the device. A
captured step reads and writes by `n_keys` and `page_table`, tensors that the host fills before it.
The device keeps the number of owners of each page, so that a step cannot write to a free or shared
page.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from tnp.ops.attention.layouts import to_rows
from tnp.util.checks import (
    numbers_on_host,
    require_between,
    require_count,
    require_lengths,
    require_no_gradient,
    require_pages,
    require_tensors,
    visible_device,
)


class CacheFull(RuntimeError):
    """Says that the cache has too few free pages. Nothing was changed."""


class Handle:
    """Stands for a sequence in a cache. `PagedCache.allocate` and `fork` return it."""

    __slots__ = ("_cache", "_pages", "_lengths", "_replaced")

    def __init__(self, cache: PagedCache, pages: list[int], lengths: list[int]) -> None:
        self._cache: PagedCache | None = cache  # None once it was freed
        # pages in their order; the length in each layer
        self._pages, self._lengths = pages, lengths
        self._replaced = 0  # how many pages were replaced: tables from before are invalid


Handles = Handle | Sequence[Handle]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
NOBODYS = -1  # in a page table, for a page that its sequence does not have


class PagedCache:
    """Holds a pool of pages, and the sequences that own them.

    Args:
        n_pages: how many pages the pool has.
        page: tokens of a page. Our kernel of `decode_attention` takes multiples of 16.
        n_layers: how many layers have keys and values in every page.
        n_kv_heads, head_dim: heads of a token in a layer, and their width.
        dtype: the dtype of keys and values: float64, float32, bfloat16, float16 or float8_e4m3fn.
        device: where to keep 2 · n_layers · n_pages · page · n_kv_heads · head_dim numbers.
    """

    def __init__(
        self,
        n_pages: int,
        *,
        page: int = 256,
        n_layers: int,
        n_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        counts = {"n_pages": n_pages, "page": page, "n_layers": n_layers}
        counts |= {"n_kv_heads": n_kv_heads, "head_dim": head_dim}
        n_pages, page, n_layers, n_kv_heads, head_dim = (
            require_count(name, value, 1) for name, value in counts.items()
        )
        if dtype not in DTYPES:
            raise ValueError(f"dtype is {dtype!r}: choose from {', '.join(map(str, DTYPES))}")
        self.page, self.dtype, self.device = page, dtype, visible_device(device)
        shape = n_layers, n_pages, page, n_kv_heads, head_dim
        # Zeros, because rows that were never written must be finite.
        self._k, self._v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._free = list(range(n_pages))
        self._owners = [0] * n_pages  # how many sequences own each page
        self._owners_there = torch.zeros(n_pages, dtype=torch.int32, device=device)
        # returned page tables: their versions, and their sequences
        self._tables = WeakIdKeyDictionary()

    @property
    def n_layers(self) -> int:
        """Returns the number of layers."""
        return len(self._k)

    @property
    def n_free(self) -> int:
        """Returns the number of free pages."""
        return len(self._free)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """Returns a layer's k and v [n_pages, n_kv_heads, page, head_dim], for decode_attention."""
        self._require_layer(layer)
        return self._k[layer].transpose(1, 2), self._v[layer].transpose(1, 2)

    def allocate(self, n_tokens: int = 0) -> Handle:
        """Returns a new, empty sequence with pages for `n_tokens` tokens. It may grow further.

        Raises:
            ValueError: n_tokens is no whole number from 0 on.
            CacheFull: there are too few free pages.
        """
        n_tokens = require_count("n_tokens", n_tokens, 0)
        pages = self._take(-(-n_tokens // self.page))
        return Handle(self, pages, [0] * len(self._k))

    def fork(self, handle: Handle) -> Handle:
        """Returns a new sequence with the same tokens. Both share pages until one of them writes.

        Raises:
            ValueError: the handle was freed, or belongs to another cache.
        """
        self._require_own([handle])
        written = -(-max(handle._lengths) // self.page)
        pages = handle._pages[:written]
        self._count(pages, 1)
        return Handle(self, pages, list(handle._lengths))

    def free(self, handle: Handle) -> None:
        """Gives back the pages that no other sequence has. The handle becomes invalid.

        Raises:
            ValueError: the handle was freed already, or belongs to another cache.
        """
        self._require_own([handle])
        self._give_back(handle._pages)
        handle._cache, handle._pages = None, []
        handle._replaced += 1

    def append(self, handles: Handles, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Adds keys and values of new tokens to a layer.

        The host counts tokens and takes pages here, so a step with this call cannot be captured.
        For captured steps, `extend` and `write` do the two halves of the work.

        Args:
            handles: a sequence, or several, each once.
            k, v: [n_kv_heads, T, head_dim] for one sequence, [B, n_kv_heads, T, head_dim] for
                several, with the cache's dtype and device, and any strides.
            layer: which layer. Each layer counts its own tokens.

        Raises:
            ValueError: shapes, dtypes, devices, handles or the layer do not fit.
            CacheFull: there are too few free pages; nothing was written.
        """
        several = self._several(handles)
        self._require_layer(layer)
        require_tensors(k=k, v=v)
        k, v = (x[None] if isinstance(handles, Handle) else x for x in (k, v))
        self._require_tokens(len(several), k=k, v=v)
        n_tokens = k.shape[2]
        if n_tokens == 0 or not several:
            return
        self._grow(several, layer, n_tokens)
        for one in several:
            one._lengths[layer] += n_tokens
        self.write(k, v, self.n_keys(several, layer), self.page_table(several), layer)

    def extend(self, handles: Handles, n_tokens: int) -> None:
        """Counts `n_tokens` new tokens in every layer, and takes pages for them.

        `write` then fills them.

        Call it before a captured step, which then reads the results of `n_keys` and `page_table`.

        Args:
            handles: a sequence, or several, each once.
            n_tokens: new tokens of each sequence.

        Raises:
            ValueError: a handle does not fit, a sequence has layers of different lengths, or
                n_tokens is no whole number from 0 on.
            CacheFull: there are too few free pages; nothing was changed.
        """
        several = self._several(handles)
        n_tokens = require_count("n_tokens", n_tokens, 0)
        if n_tokens == 0:
            return
        for at, one in enumerate(several):
            if len(set(one._lengths)) > 1:
                raise ValueError(
                    f"handle {at} has {one._lengths} tokens in its layers: they must be equal"
                )
        self._grow(several, 0, n_tokens)
        for one in several:
            one._lengths = [length + n_tokens for length in one._lengths]

    def write(
        self, k: Tensor, v: Tensor, n_keys: Tensor, page_table: Tensor, layer: int = 0
    ) -> None:
        """Writes the last tokens of sequences to the places that `n_keys` and `page_table` give.

        The host does not read these tensors, so a captured step uses their numbers at each replay.

        Args:
            k, v: [B, n_kv_heads, T, head_dim], the last T tokens of each sequence, with the cache's
                dtype and device, and any strides.
            n_keys: int32 [B], the result of `n_keys` with these tokens, at least T. The device
                asserts that numbers are in range.
            page_table: int32 [B, columns], the result of `page_table`. It is valid until one of its
                sequences is freed, or writes to a page that it shared. The device asserts, also in
                a captured step, that a written page has exactly one owner. An older tensor of
                `page_table` is refused.
            layer: which layer.

        Raises:
            ValueError: shapes, dtypes, devices or the layer do not fit, the table is no longer
                valid, or on a CPU the numbers, or the owners of a page.
        """
        self._require_layer(layer)
        require_tensors(k=k, v=v, n_keys=n_keys, page_table=page_table)
        self._require_tokens(n_keys.numel(), k=k, v=v)
        require_lengths(k, n_keys=n_keys)
        shape = tuple(page_table.shape)
        if page_table.dtype != torch.int32 or len(shape) != 2 or shape[0] != len(n_keys):
            raise ValueError(
                f"page_table is {page_table.dtype} {shape}: it must be int32 [{len(n_keys)}, "
                "columns]"
            )
        n_tokens = k.shape[2]
        require_between("n_keys", n_keys, n_tokens, page_table.shape[1] * self.page)
        require_pages(page_table, n_keys, self.page, len(self._owners))
        ahead = torch.arange(-n_tokens, 0, device=n_keys.device)
        position = n_keys[:, None] + ahead
        pages = page_table.gather(1, position // self.page)
        self._require_one_owner(page_table, pages)
        slots = (pages.long() * self.page + position % self.page).flatten()
        for memory, x in ((self._k[layer], k), (self._v[layer], v)):
            _as_bytes(memory).flatten(0, 1).index_copy_(0, slots, _as_bytes(to_rows(x)))

    def n_keys(self, handles: Handles, layer: int = 0) -> Tensor:
        """Returns the tokens of each sequence in a layer, int32 [B] on the cache's device."""
        several = self._several(handles)
        self._require_layer(layer)
        found = [one._lengths[layer] for one in several]
        return torch.tensor(found, dtype=torch.int32, device=self.device)

    def lengths(self, handles: Handles, layer: int = 0) -> Tensor:
        """Returns the result of `n_keys`, the new name of this method."""
        warnings.warn("PagedCache.lengths is now n_keys", DeprecationWarning, stacklevel=2)
        return self.n_keys(handles, layer)

    def page_table(self, handles: Handles, columns: int | None = None) -> Tensor:
        """Returns each sequence's pages in their order and then −1, int32 [B, columns] on the
        cache's device.

        It is valid until one of its sequences is freed, or writes to a page that it shared. An
        older table reads tokens of other sequences.

        Args:
            handles: a sequence, or several.
            columns: the most pages that a sequence of a captured step may need. None: the pages of
                the longest sequence.

        Raises:
            ValueError: a handle was freed, is of another cache, or has more pages than columns.
        """
        several = self._several(handles)
        most = max((len(one._pages) for one in several), default=0)
        columns = most if columns is None else require_count("columns", columns, 0)
        if columns < most:
            raise ValueError(f"columns is {columns}: a sequence has {most} pages")
        rows = [one._pages + [NOBODYS] * (columns - len(one._pages)) for one in several]
        table = torch.tensor(rows, dtype=torch.int32).reshape(len(several), columns)
        table = table.to(self.device)
        if not table.is_inference():  # inference tensors do not count their changes
            of = [(one, one._replaced) for one in several]
            self._tables[table] = table._version, of
        return table

    def _grow(self, handles: list[Handle], layer: int, n_tokens: int) -> None:
        """Takes unshared pages for `n_tokens` more tokens, for all the sequences or for none."""
        missing, shared, writes = [], [], dict[int, int]()
        for one in handles:
            begin = one._lengths[layer]
            end = -(-(begin + n_tokens) // self.page)
            missing.append(max(0, end - len(one._pages)))
            for at in range(begin // self.page, min(end, len(one._pages))):
                page = one._pages[at]
                writes[page] = writes.get(page, 0) + 1
                # If all sequences that own a page write, the last one keeps it.
                if self._owners[page] - writes[page] > 0:
                    shared.append((one, at))
        new = iter(self._take(sum(missing) + len(shared)))
        old, copies = [one._pages[at] for one, at in shared], []
        for one, at in shared:
            one._pages[at] = next(new)
            one._replaced += 1
            copies.append(one._pages[at])
        for one, n in zip(handles, missing, strict=True):
            one._pages += [next(new) for _ in range(n)]
        if shared:
            source, place = (torch.tensor(pages, device=self.device) for pages in (old, copies))
            for memory in map(_as_bytes, (self._k, self._v)):
                memory[:, place] = memory[:, source]
            self._give_back(old)

    def _take(self, n: int) -> list[int]:
        """Takes `n` free pages, or raises CacheFull."""
        if n > len(self._free):
            raise CacheFull(
                f"{n} pages of {self.page} tokens are needed and {len(self._free)} of "
                f"{len(self._owners)} are free: free a sequence, or make the cache with more"
            )
        taken = self._free[len(self._free) - n :]
        del self._free[len(self._free) - n :]
        self._count(taken, 1)
        return taken

    def _give_back(self, pages: list[int]) -> None:
        self._count(pages, -1)
        self._free += [page for page in dict.fromkeys(pages) if not self._owners[page]]

    def _count(self, pages: list[int], more: int) -> None:
        """Adds `more` owners to each page, on the host and, after earlier launches, the device."""
        if not pages:
            return
        for page in pages:
            self._owners[page] += more
        changed = list(dict.fromkeys(pages))
        both = torch.tensor([changed, [self._owners[page] for page in changed]])
        place, owners = both.to(self.device, non_blocking=True)
        self._owners_there[place] = owners.int()

    def _require_valid(self, page_table: Tensor) -> None:
        version, of = self._tables.get(page_table, (None, ()))
        # This table is not from `page_table`, or has changed since.
        if version is None or version != page_table._version:
            return
        for sample, (one, replaced) in enumerate(of):
            if one._replaced != replaced:
                what = "was freed" if one._cache is None else "wrote to a page that it shared"
                raise ValueError(
                    f"page_table is older than its pages: sequence {sample} of it {what} since"
                )

    def _require_one_owner(self, page_table: Tensor, pages: Tensor) -> None:
        """Requires that each written page has one owner, and that the table is still valid."""
        if not torch.compiler.is_compiling():
            self._require_valid(page_table)
        owners = self._owners_there[pages.long()]
        rows = numbers_on_host(owners, 2)
        if rows is None:
            alone = (owners == 1).all()
            torch._assert_async(alone, "a page that is written must have exactly one owner")
            return
        for sample, row in enumerate(rows):
            for page, n in zip(pages[sample].tolist(), row, strict=True):
                if n != 1:
                    raise ValueError(
                        f"page {page} of sample {sample} has {n} owners: a page that is written "
                        "must have exactly one"
                    )

    def _several(self, handles: Handles) -> list[Handle]:
        if not isinstance(handles, (Handle, list, tuple)):
            raise ValueError(f"handles is {handles!r}: it must be a handle, or a list of them")
        several = [handles] if isinstance(handles, Handle) else list(handles)
        self._require_own(several)
        return several

    def _require_own(self, handles: list[Handle]) -> None:
        for at, one in enumerate(handles):
            if not isinstance(one, Handle):
                raise ValueError(f"handle {at} is {one!r}: it must be a result of allocate or fork")
            if one._cache is None:
                raise ValueError(f"handle {at} was freed: its pages may belong to another sequence")
            if one._cache is not self:
                raise ValueError(f"handle {at} belongs to another cache")
        if len(set(handles)) < len(handles):
            raise ValueError("handles has a handle twice: each may occur once")

    def _require_layer(self, layer: int) -> None:
        if layer.__class__ is not int or layer not in range(len(self._k)):
            raise ValueError(f"layer is {layer!r}: it must be from 0 to {len(self._k) - 1}")

    def _require_tokens(self, batch: int, **tensors: Tensor) -> None:
        n_kv_heads, head_dim = self._k.shape[3:]
        require_no_gradient("a cache", **tensors)
        for name, x in tensors.items():
            if x.dtype != self.dtype or x.device != self._k.device:
                raise ValueError(
                    f"{name} is {x.dtype} on {x.device} and the cache {self.dtype} on "
                    f"{self._k.device}: they must be equal"
                )
            if x.dim() != 4 or (*x.shape[:2], x.shape[3]) != (batch, n_kv_heads, head_dim):
                raise ValueError(
                    f"{name} has shape {tuple(x.shape)}: it must be [{batch}, {n_kv_heads}, T, "
                    f"{head_dim}], or without B for one sequence"
                )
        if tensors["k"].shape != tensors["v"].shape:
            shapes = " and ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
            raise ValueError(f"{shapes}: they must be equal")


def _as_bytes(x: Tensor) -> Tensor:
    """Views elements of 8 bits as whole numbers, which PyTorch can index."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
