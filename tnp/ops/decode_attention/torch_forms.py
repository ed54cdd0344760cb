"""Computes decode attention in PyTorch: by the formula, and by SDPA under a mask.

Functions import torch when they run: the declaration names them, and planning reads it without
torch.
"""

from tnp.ops.attention.layouts import grouped, ungrouped


def gathered(cache, page_table):
    """Returns each sequence's pages in their order: [n_pages, H_kv, page, D] → [B, H_kv, S, D].

    A number that names no page, as past a sequence's end, is taken as the nearest one that does.
    """
    pages = page_table.long().clamp(0, cache.shape[0] - 1)
    return cache[pages].transpose(1, 2).flatten(2, 3)


def whole(cache, page_table, descale, dtype):
    """Returns keys or values [B, H_kv, S, D] in `dtype`, multiplied by their descale."""
    if page_table is not None:
        cache = gathered(cache, page_table)
    if descale is not None:
        cache = cache.to(descale.dtype) * descale[..., None, None]
    return cache.to(dtype)


def seen(lengths, n_queries, n_keys, full, ahead=0):
    """Returns whether a query sees a key: bool [B, T, S], or [B, 1, S] if `full`.

    Each query sees `ahead` keys more than it should.
    """
    import torch

    key = torch.arange(n_keys, device=lengths.device)
    token = torch.arange(n_queries, device=lengths.device)[:, None]
    n_seen = lengths.clamp(0, n_keys)[:, None, None]
    if not full:
        n_seen = n_seen - n_queries + 1 + token
    return key < n_seen + ahead


def out_of_range(k, lengths, page_table):
    """Returns whether a sequence's results must be NaN: bool [B, 1, 1, 1].

    Either its length is out of range, or a page that its length reaches does not exist.
    """
    import torch

    page, capacity = k.shape[2], k.shape[2]
    wrong = lengths < 0
    if page_table is not None:
        begins = torch.arange(page_table.shape[1], device=lengths.device) * page
        no_page = (page_table < 0) | (page_table >= len(k))
        wrong |= (no_page & (begins < lengths[:, None])).any(1)
        capacity *= page_table.shape[1]
    return (wrong | (lengths > capacity))[:, None, None, None]


def reference(
    q, k, v, lengths, page_table, k_descale, v_descale, scale, cache=False, full=False, ahead=0
):  # fmt: skip
    """Returns softmax(scale · q kᵀ) v over the keys that each query sees.

    It is 0 if a query sees none, and NaN in sequences that are `out_of_range`.

    Args:
        q, k, v, lengths, page_table, k_descale, v_descale: as for
            `tnp.ops.decode_attention.decode_attention`; in any float dtype.
        scale: a number.
        cache: the cache's number format, which its dtype shows too.
        full: whether every query sees all keys of its sequence.
        ahead: how many keys each query sees more than it should, for a control of the gate.
    """
    import torch

    wrong = out_of_range(k, lengths, page_table)
    k = whole(k, page_table, k_descale, q.dtype).unsqueeze(2)
    v = whole(v, page_table, v_descale, q.dtype).unsqueeze(2)
    s = scale * (grouped(q, k.shape[1]) @ k.mT)
    mask = seen(lengths, q.shape[2], k.shape[3], full, ahead)[:, None, None]
    p = torch.softmax(s.masked_fill(~mask, float("-inf")), -1)
    return ungrouped(p.masked_fill(~mask, 0.0) @ v).masked_fill(wrong, float("nan"))


def sdpa(
    q, k, v, lengths, page_table, k_descale, v_descale, scale, cache=False, full=False
):  # fmt: skip
    """Calls scaled_dot_product_attention with a mask. A paged or 8-bit cache is copied first."""
    from torch.nn.functional import scaled_dot_product_attention

    wrong = out_of_range(k, lengths, page_table)
    k, v = whole(k, page_table, k_descale, q.dtype), whole(v, page_table, v_descale, q.dtype)
    mask = seen(lengths, q.shape[2], k.shape[2], full)[:, None]
    o = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)
    return o.masked_fill(~mask.any(-1, keepdim=True), 0.0).masked_fill(wrong, float("nan"))
