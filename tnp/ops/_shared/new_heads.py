"""Writes new heads: queries to a tensor, keys and values to their place in a cache."""

import triton
import triton.language as tl

from tnp.ops._shared.primitives import cast


@triton.jit
def angles(
    cos_ptr, sin_ptr, lengths_ptr, low, rows, in_rows, capacity, HALF: tl.constexpr,
    N_TURNING: tl.constexpr, ROTATES: tl.constexpr,
):  # fmt: skip
    """Returns the rows' positions [B], and cosine and sine for outputs `low` [P, B].

    A row's position is its length less one. N_TURNING heads rotate. A product calls this before it
    multiplies, because these loads depend on one another and take long.
    """
    D: tl.constexpr = 2 * HALF
    place = tl.load(lengths_ptr + rows, mask=in_rows, other=0) - 1
    cos, sin = 1.0, 0.0
    if ROTATES:
        inside = in_rows & (place >= 0) & (place < capacity)
        turns = (low // D < N_TURNING)[:, None] & inside[None, :]
        angle = place.to(tl.int64)[None, :] * HALF + (low % D)[:, None]
        cos = tl.load(cos_ptr + angle, mask=turns, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=turns, other=0.0)
    return place, cos, sin


@triton.jit
def store_heads(
    q_ptr, keys_ptr, values_ptr, table_ptr, one, two, place, cos, sin, low, n_out, rows, in_rows,
    stride_cb, stride_ch, stride_ct, capacity, table_width, n_pages, dtype: tl.constexpr,
    HALF: tl.constexpr, N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, ROTATES: tl.constexpr,
    PAGE: tl.constexpr,
):  # fmt: skip
    """Rotates pairs [P, B] of q and k by their row's position, and writes q, k and v.

    `one` and `two` are outputs `low` and `low` + HALF of rows `rows`, of [q, k, v]. `angles` gives
    `place`, `cos` and `sin`. A row whose position is not in 0 … capacity − 1 writes no key and no
    value.
    PAGE: keys of a page, or 0 for a contiguous cache, which has a row for each of `rows`. Nothing
    is written to a page below 0 or from `n_pages` on. The strides are of a row or page, of a
    head, and of a key.
    """
    D: tl.constexpr = 2 * HALF
    inside = in_rows & (place >= 0) & (place < capacity)
    head, i = low // D, low % D
    if ROTATES:
        one, two = one * cos - two * sin, two * cos + one * sin
    one, two = cast(one, dtype), cast(two, dtype)
    there = (low < n_out)[:, None] & in_rows[None, :]
    is_q = there & (head < N_HEADS)[:, None]
    to = q_ptr + rows[None, :] * (N_HEADS * D) + low[:, None]
    tl.store(to, one, mask=is_q)
    tl.store(to + HALF, two, mask=is_q)

    block, slot = rows, place
    if PAGE > 0:
        page_of = table_ptr + rows * table_width + place // PAGE
        block, slot = tl.load(page_of, mask=inside, other=-1), place % PAGE
        inside &= (block >= 0) & (block < n_pages)
    of_head = (head - N_HEADS) % N_KV_HEADS
    to = block.to(tl.int64)[None, :] * stride_cb + slot.to(tl.int64)[None, :] * stride_ct
    to += (of_head.to(tl.int64) * stride_ch + i)[:, None]
    there &= inside[None, :]
    is_k = there & ((head >= N_HEADS) & (head < N_HEADS + N_KV_HEADS))[:, None]
    is_v = there & (head >= N_HEADS + N_KV_HEADS)[:, None]
    tl.store(keys_ptr + to, one, mask=is_k)
    tl.store(keys_ptr + to + HALF, two, mask=is_k)
    tl.store(values_ptr + to, one, mask=is_v)
    tl.store(values_ptr + to + HALF, two, mask=is_v)
