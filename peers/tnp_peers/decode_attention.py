"""Runs decode attention of FlashAttention-3 and FlashInfer.

Both take tokens first: q [B, T, H, D], and caches [B, S, H_kv, D] or [n_pages, page, H_kv, D]. Our
tensors are views of these.
"""

from collections import OrderedDict
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tnp.dispatch.spec import Implementation, on_cuda
from tnp_peers.support import both, sizes

HEAD_DIMS = (64, 128)  # the sizes of our comparison
WORKSPACE_BYTES = 128 * 1024 * 1024  # FlashInfer's documentation recommends this size
MOST_PLANNED = 64  # compositions whose plans are kept


def fa3(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, page_table: None,
    k_descale: None, v_descale: None, scale: float, cache: bool = False,
) -> Tensor:  # fmt: skip
    """Runs FlashAttention-3 of package fa3-fwd, which decides on the host how keys are split.

    Caches must be contiguous: fa3-fwd 0.0.3 is built without pages, and says so when called.
    """
    from fa3_fwd_interface import flash_attn_with_kvcache

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, softmax_scale=scale, causal=True)
    return o.transpose(1, 2)


def flashinfer(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, page_table: Tensor,
    k_descale: None, v_descale: None, scale: float, cache: bool = False,
) -> Tensor:  # fmt: skip
    """Runs FlashInfer's paged decode. The host plans once for each composition of a batch.

    Tensors `lengths` and `page_table` identify a composition, with their current values. So a later
    call with them runs without a plan, as a captured step does. `plan` measures the time of a plan
    separately. Tensors of inference mode do not tell whether they were changed, so every call with
    them plans.
    """
    wrapper = _planned(q, k, v, lengths, page_table, scale)
    o = wrapper.run(q[:, :, 0].contiguous(), (k.transpose(1, 2), v.transpose(1, 2)))
    return o.unsqueeze(2)


_plans: OrderedDict[tuple, tuple[Any, Tensor, Tensor]] = OrderedDict()


def _planned(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, page_table: Tensor, scale: float
) -> Any:
    """Returns the wrapper of a composition.

    It keeps the tensors, so that no other tensor has their identity.
    """
    of = q, k, v, lengths, page_table, None, None, scale
    if lengths.is_inference() or page_table.is_inference():
        return plan(*of)
    of_tensors = tuple((id(x), x._version) for x in (lengths, page_table))
    key = *of_tensors, q.shape, q.dtype, k.shape, k.dtype, scale
    if key not in _plans:
        _plans[key] = plan(*of), lengths, page_table
        if len(_plans) > MOST_PLANNED:
            _plans.popitem(last=False)
    return _plans[key][0]


@cache
def _workspace(device: torch.device) -> Tensor:
    """Returns the workspace that all wrappers of a device share: they run one after another."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def plan(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, page_table: Tensor,
    k_descale: None, v_descale: None, scale: float, cache: bool = False,
) -> Any:  # fmt: skip
    """Returns a new wrapper of `flashinfer` for a composition."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    (_, kv_heads, page, head_dim), heads = k.shape, q.shape[1]
    n_pages = -(-lengths // page)
    first = torch.zeros(1, dtype=torch.int32, device=q.device)
    used = torch.arange(page_table.shape[1], device=q.device) < n_pages[:, None]
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        _workspace(q.device), "NHD", use_tensor_cores=heads > kv_heads
    )
    wrapper.plan(
        torch.cat((first, n_pages.cumsum(0, dtype=torch.int32))), page_table[used],
        lengths - (n_pages - 1) * page, heads, kv_heads, head_dim, page,
        q_data_type=q.dtype, kv_data_type=k.dtype, sm_scale=scale,
    )  # fmt: skip
    return wrapper


_SIZES = sizes("head_dim", HEAD_DIMS)
FA3 = Implementation(
    "fa3",
    run=fa3,
    supported=both(on_cuda(80, below=100), _SIZES),
    dtypes=("bfloat16",),
    gradients=(),
    traceable=False,
)


def _paged(call):
    return None if call.problem["page_table"] else "it takes only a cache in pages"


FLASHINFER = Implementation(
    "flashinfer",
    run=flashinfer,
    supported=both(on_cuda(80), _SIZES, sizes("n_queries", (1,)), _paged),
    dtypes=("bfloat16", "float16"),
    gradients=(),
    options=("page_table",),
    selectable=False,  # its plan waits for the device if a batch's composition is new
    traceable=False,
    plan=plan,
)
