"""Runs PyTorch's flex_attention: a mask is a function of indices and a map of blocks."""

from collections import OrderedDict
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tnp.dispatch.spec import Implementation, on_cuda
from tnp.ops.attention import HEAD_DIMS
from tnp.ops.attention.definition import OF_ANY_KIND
from tnp.ops.attention.torch_forms import on_host, softmax_scale
from tnp.ops.buffered_attention.definition import TAKEN, Rows
from tnp_peers.support import both, sizes

MOST_MASKS = 16


@cache
def _compiled_flex_attention() -> Callable:
    from torch.nn.attention.flex_attention import flex_attention

    # A kernel is compiled for each shape. Past dynamo's limit of shapes, `fullgraph` raises where
    # the default would go on uncompiled, with all scores in memory.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)


@cache
def _compiled_block_mask() -> Callable:
    from torch.nn.attention.flex_attention import create_block_mask

    return torch.compile(create_block_mask)  # uncompiled it holds an index for every score


def flex(
    q: Tensor, k: Tensor, v: Tensor, n_keys: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, scale: float, base2: bool = False, causal: bool = False,
    window: int = 0,
) -> Tensor:  # fmt: skip
    """Runs PyTorch's flex_attention, compiled.

    The map of blocks is made once for a problem and its lengths. A model makes it once a step for
    all its layers. Its time does not count.
    """
    lengths = n_keys, cu_seqlens_q, cu_seqlens_k
    return _compiled_flex_attention()(
        q, k, v, scale=softmax_scale(scale, base2), enable_gqa=q.shape[1] != k.shape[1],
        block_mask=_block_mask(q, k, lengths, causal, window),
    )  # fmt: skip


_masks: OrderedDict[tuple, Any] = OrderedDict()


def _block_mask(q: Tensor, k: Tensor, lengths: tuple, causal: bool, window: int) -> Any:
    """Returns the map of blocks for these lengths, or None if every query sees every key.

    A mask has its own tensors of lengths. It serves all tensors with equal numbers.
    """
    if all(x is None for x in lengths) and not causal and not window:
        return None
    return _made_once(partial(_seen, causal=causal, window=window), (causal, window), q, k, lengths)


def _made_once(seen: Callable, of: tuple, q: Tensor, k: Tensor, lengths: tuple) -> Any:
    """Returns the map of blocks for these lengths and the options `of`.

    `seen(n_q, n_k, *lengths)` returns the mask's function. The first of the lengths is n_keys.
    """
    batch, n_q, n_k = len(q), q.shape[2], k.shape[2]
    numbers = [None if x is None else tuple(on_host(x)) for x in lengths]
    key = batch, n_q, n_k, q.device, of, *numbers
    if key not in _masks:
        with torch.inference_mode(False):  # a later call may need gradients
            own = [None if x is None else x.clone() for x in lengths]
            of_batch = None if lengths[0] is None else batch
            _masks[key] = _compiled_block_mask()(
                seen(n_q, n_k, *own), of_batch, None, n_q, n_k, device=q.device
            )
        if len(_masks) > MOST_MASKS:
            _masks.popitem(last=False)
    return _masks[key]


def _seen(
    n_q: int, n_k: int, n_keys: Tensor | None, cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None, causal: bool, window: int,
) -> Callable:  # fmt: skip
    """Returns a function that says whether query i of sample b sees key j.

    `tnp.ops.attention.torch_forms.visible` does so for all at once.
    """
    from torch.nn.attention.flex_attention import and_masks

    masks = []
    if cu_seqlens_q is not None:
        of_q, of_k = (
            torch.searchsorted(cu.long(), torch.arange(n, device=cu.device), right=True) - 1
            for cu, n in ((cu_seqlens_q, n_q), (cu_seqlens_k, n_k))
        )
        ends = (cu_seqlens_k - cu_seqlens_q)[1:][of_q]
        masks.append(lambda b, h, i, j: of_q[i] == of_k[j])
    elif n_keys is not None:
        masks.append(lambda b, h, i, j: j < n_keys[b])

    def beside(b, i, j):  # distance of key j from the key beside query i
        if cu_seqlens_q is not None:
            return j - i - ends[i]
        return j - i - ((n_k if n_keys is None else n_keys[b]) - n_q)

    if causal or window:
        right = 0 if causal else window - 1
        masks.append(lambda b, h, i, j: beside(b, i, j) <= right)
    if window:
        masks.append(lambda b, h, i, j: beside(b, i, j) > -window)
    return and_masks(*masks)


def buffered(
    q: Tensor, k: Tensor, v: Tensor, n_keys: Tensor | None, scale: float, n_buffer: int,
    n_groups: int = 0, all_rows: bool = False, base2: bool = False,
) -> Tensor:  # fmt: skip
    """Runs flex_attention around a causal buffer. The map of blocks is made once, as in `flex`."""
    of = n_buffer, n_groups, all_rows
    block_mask = _made_once(partial(_beside, of), of, q, k, (n_keys,))
    return _compiled_flex_attention()(
        q, k, v, scale=softmax_scale(scale, base2), block_mask=block_mask
    )


def _beside(of: tuple[int, int, bool], n_q: int, n_k: int, n_keys: Tensor | None) -> Callable:
    """Returns what `tnp.ops.buffered_attention.definition.visible` says, as a function."""
    n_buffer, n_groups, all_rows = of
    rows = Rows.counted(n_k - n_buffer, n_buffer, n_groups, all_rows, n_q)

    def seen(b, h, i, j):
        at = i - rows.n_first
        beside = (at >= 0) & (at < rows.n_beside)
        point = j - rows.n_context
        of_context = (point < 0) if n_keys is None else (point < 0) & (j < n_keys[b])
        return of_context | (beside & (point >= 0) & (point <= at % n_buffer))

    return seen


BUFFERED = Implementation(
    "flex", run=buffered, supported=both(on_cuda(80), sizes("head_dim", HEAD_DIMS)), options=TAKEN
)
FLEX = Implementation(
    "flex",
    run=flex,
    supported=both(on_cuda(80), sizes("head_dim", HEAD_DIMS)),
    options=OF_ANY_KIND,
)
