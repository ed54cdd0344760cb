"""Keys and values of many sequences in pages of a pool, as `decode_attention` reads them.

A page holds so many tokens of every layer. Sequences take pages as they grow, in any order, and
give them back; forks share pages until one of them writes (Kwon et al., PagedAttention, arXiv
2309.06180). Which page is whose the host knows: no question of it waits for the device. A captured
step writes and reads by `lengths` and `page_table`, tensors that the host fills before it. How many
sequences have a page the device is told whenever pages change hands, so that a step cannot write to
one that is free or shared.
"""

from __future__ import annotations

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
    """There are not as many free pages as are needed; nothing was changed."""


class Handle:
    """A sequence in a cache, given by `PagedCache.allocate` and `fork`."""

    __slots__ = ("_cache", "_pages", "_lengths", "_replaced")

    def __init__(self, cache: PagedCache, pages: list[int], lengths: list[int]) -> None:
        self._cache: PagedCache | None = cache  # None once it was freed
        self._pages, self._lengths = pages, lengths  # in their order; of each layer
        self._replaced = 0  # pages that it no longer has: a table from before is of no use


Handles = Handle | Sequence[Handle]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
NOBODYS = -1  # in a page table, in place of a page that its sequence does not have


class PagedCache:
    """A pool of pages, and the sequences that have them.

    Args:
        n_pages: pages of the pool.
        page: tokens of a page; `decode_attention`'s own kernel takes multiples of 16.
        n_layers: layers, each with keys and values of its own in every page.
        n_kv_heads, head_dim: of a token in a layer.
        dtype: of keys and values: float64, float32, bfloat16, float16 or float8_e4m3fn.
        device: where they lie, 2 · n_layers · n_pages · page · n_kv_heads · head_dim numbers.
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
        # Zeros: rows that nobody has written must be finite.
        self._k, self._v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        self._free = list(range(n_pages))
        self._owners = [0] * n_pages  # sequences that have a page
        self._owners_there = torch.zeros(n_pages, dtype=torch.int32, device=device)
        self._tables = WeakIdKeyDictionary()  # that were handed out: their version, and of whom

    @property
    def n_layers(self) -> int:
        """Layers that have keys and values in every page."""
        return len(self._k)

    @property
    def n_free(self) -> int:
        """Pages that nobody has."""
        return len(self._free)

    def layer(self, layer: int) -> tuple[Tensor, Tensor]:
        """k and v of a layer, [n_pages, n_kv_heads, page, head_dim], views for decode_attention."""
        self._require_layer(layer)
        return self._k[layer].transpose(1, 2), self._v[layer].transpose(1, 2)

    def allocate(self, n_tokens: int = 0) -> Handle:
        """A new, empty sequence with pages for so many tokens; it may grow past them.

        Raises:
            ValueError: n_tokens is no whole number from 0 on.
            CacheFull: there are not as many pages.
        """
        n_tokens = require_count("n_tokens", n_tokens, 0)
        pages = self._take(-(-n_tokens // self.page))
        return Handle(self, pages, [0] * len(self._k))

    def fork(self, handle: Handle) -> Handle:
        """A new sequence with the same tokens, whose pages both have until one of them writes.

        Raises:
            ValueError: the handle was freed, or is another cache's.
        """
        self._require_own([handle])
        written = -(-max(handle._lengths) // self.page)
        pages = handle._pages[:written]
        self._count(pages, 1)
        return Handle(self, pages, list(handle._lengths))

    def free(self, handle: Handle) -> None:
        """Gives a sequence's pages back, those that no other has; the handle is of no use then.

        Raises:
            ValueError: the handle was freed already, or is another cache's.
        """
        self._require_own([handle])
        self._give_back(handle._pages)
        handle._cache, handle._pages = None, []
        handle._replaced += 1

    def append(self, handles: Handles, k: Tensor, v: Tensor, layer: int = 0) -> None:
        """Writes new tokens' keys and values of a layer behind those that the layer has.

        The host counts tokens and takes pages here, so that no step with it can be captured:
        `extend` and `write` are its two halves, for those that are.

        Args:
            handles: a sequence, or several, each once.
            k, v: [n_kv_heads, T, head_dim] of one, [B, n_kv_heads, T, head_dim] of several, in the
                cache's dtype and on its device; any strides.
            layer: which layer; each counts its own tokens.

        Raises:
            ValueError: shapes, dtypes, devices, handles or the layer do not fit.
            CacheFull: there are not as many pages; nothing was written.
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
        self.write(k, v, self.lengths(several, layer), self.page_table(several), layer)

    def extend(self, handles: Handles, n_tokens: int) -> None:
        """Counts so many new tokens in every layer, with pages of their own, that `write` fills.

        Before a captured step: `lengths` and `page_table` after it are what the step is to read.

        Args:
            handles: a sequence, or several, each once.
            n_tokens: of each.

        Raises:
            ValueError: a handle does not fit, a sequence has layers of different lengths, or
                n_tokens is no whole number from 0 on.
            CacheFull: there are not as many pages; nothing was changed.
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
        self, k: Tensor, v: Tensor, lengths: Tensor, page_table: Tensor, layer: int = 0
    ) -> None:
        """Writes the last tokens of sequences where `lengths` and `page_table` say they lie.

        The host reads no number of theirs, so that a captured step writes where they say then.

        Args:
            k, v: [B, n_kv_heads, T, head_dim], the last T tokens of each sequence, in the cache's
                dtype and on its device; any strides.
            lengths: int32 [B] as `lengths` gives, with these tokens; at least T. What is less, or
                past the table, the device asserts.
            page_table: int32 [B, columns] as `page_table` gives. It is valid until one of its
                sequences is freed or writes to a page that it shared. That a page which is written
                has exactly one owner the device asserts, in a captured step too; that a table is
                older is refused where it is the very tensor that `page_table` gave.
            layer: which layer.

        Raises:
            ValueError: shapes, dtypes, devices or the layer do not fit, the table is no longer
                valid, or on a CPU the numbers, or the owners of a page.
        """
        self._require_layer(layer)
        require_tensors(k=k, v=v, lengths=lengths, page_table=page_table)
        self._require_tokens(lengths.numel(), k=k, v=v)
        require_lengths(k, lengths=lengths)
        shape = tuple(page_table.shape)
        if page_table.dtype != torch.int32 or len(shape) != 2 or shape[0] != len(lengths):
            raise ValueError(
                f"page_table is {page_table.dtype} {shape}: it must be int32 [{len(lengths)}, "
                "columns]"
            )
        n_tokens = k.shape[2]
        require_between("lengths", lengths, n_tokens, page_table.shape[1] * self.page)
        require_pages(page_table, lengths, self.page, len(self._owners))
        ahead = torch.arange(-n_tokens, 0, device=lengths.device)
        position = lengths[:, None] + ahead
        pages = page_table.gather(1, position // self.page)
        self._require_one_owner(page_table, pages)
        slots = (pages.long() * self.page + position % self.page).flatten()
        for memory, x in ((self._k[layer], k), (self._v[layer], v)):
            _as_bytes(memory).flatten(0, 1).index_copy_(0, slots, _as_bytes(to_rows(x)))

    def lengths(self, handles: Handles, layer: int = 0) -> Tensor:
        """int32 [B] on the cache's device: tokens of each sequence in a layer."""
        several = self._several(handles)
        self._require_layer(layer)
        found = [one._lengths[layer] for one in several]
        return torch.tensor(found, dtype=torch.int32, device=self.device)

    def page_table(self, handles: Handles, columns: int | None = None) -> Tensor:
        """int32 [B, columns] on the cache's device: each sequence's pages in their order, then −1.

        It is valid until pages change hands: until one of its sequences is freed, or writes to a
        page that it shared. Whoever reads by an older table reads what others wrote.

        Args:
            handles: a sequence, or several.
            columns: as many as every sequence of a captured step may come to need; as many as the
                longest has where None.

        Raises:
            ValueError: a handle was freed or is another cache's, or has more pages than columns.
        """
        several = self._several(handles)
        most = max((len(one._pages) for one in several), default=0)
        columns = most if columns is None else require_count("columns", columns, 0)
        if columns < most:
            raise ValueError(f"columns is {columns}: a sequence has {most} pages")
        rows = [one._pages + [NOBODYS] * (columns - len(one._pages)) for one in several]
        table = torch.tensor(rows, dtype=torch.int32).reshape(len(several), columns)
        table = table.to(self.device)
        if not table.is_inference():  # which does not tell whether it was changed
            of = [(one, one._replaced) for one in several]
            self._tables[table] = table._version, of
        return table

    def _grow(self, handles: list[Handle], layer: int, n_tokens: int) -> None:
        """Pages for so many more tokens, none of them shared: of all the sequences or of none."""
        missing, shared, writes = [], [], dict[int, int]()
        for one in handles:
            begin = one._lengths[layer]
            end = -(-(begin + n_tokens) // self.page)
            missing.append(max(0, end - len(one._pages)))
            for at in range(begin // self.page, min(end, len(one._pages))):
                page = one._pages[at]
                writes[page] = writes.get(page, 0) + 1
                # The last of those that have a page, if all of them write, may keep it.
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
        """So many free pages, or CacheFull."""
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
        """So many more owners of each, here and, behind what was launched, on the device."""
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
        if version is None or version != page_table._version:  # not ours, or changed since
            return
        for sample, (one, replaced) in enumerate(of):
            if one._replaced != replaced:
                what = "was freed" if one._cache is None else "wrote to a page that it shared"
                raise ValueError(
                    f"page_table is older than its pages: sequence {sample} of it {what} since"
                )

    def _require_one_owner(self, page_table: Tensor, pages: Tensor) -> None:
        """Of the pages that are written; and a table that this cache gave must be valid still."""
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
                raise ValueError(f"handle {at} is {one!r}: it must be what allocate or fork gave")
            if one._cache is None:
                raise ValueError(f"handle {at} was freed: its pages may be another sequence's")
            if one._cache is not self:
                raise ValueError(f"handle {at} is another cache's")
        if len(set(handles)) < len(handles):
            raise ValueError("a handle stands twice among those given: each may stand once")

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
                    f"{head_dim}], without the first of one sequence"
                )
        if tensors["k"].shape != tensors["v"].shape:
            shapes = " and ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
            raise ValueError(f"{shapes}: they must be equal")


def _as_bytes(x: Tensor) -> Tensor:
    """Of 8 bits as whole numbers, which PyTorch can index."""
    return x.view(torch.uint8) if x.element_size() == 1 else x
