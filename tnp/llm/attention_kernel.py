"""Computes attention of one token of each sequence to a short cache, in parts.

    of some keys: acc = Σ 2^(s − m) v    m = max s    l = Σ 2^(s − m)    s = scale · log2(e) q k

A program has up to BLOCK_N keys of a kv head, and all heads of its group. The product that follows
adds the parts up (`tnp.ops._shared.streamed`), so no launch does only that.

Only the newest key and value are written by the launch before. All others are loaded ahead of the
wait, while that launch still runs. (Parts along the keys: Dao et al., Flash-Decoding, 2023.)
"""

import triton
import triton.language as tl

from tnp.ops._shared.few_rows import follow
from tnp.ops._shared.primitives import add_dot, cast, dot


@triton.jit(do_not_specialize=["batch", "capacity", "table_width", "n_pages"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, parts_ptr, beside_ptr, lengths_ptr, table_ptr, stride_cb, stride_ch,
    batch, capacity, table_width, n_pages, scale_log2,
    N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, PAGE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Writes a part of a kv head's group: acc to parts [splits, B, H · D], m and l beside it.

    q is [B, H · D]. A length outside of 1 … capacity, or a page that is not there, gives NaN.
    """
    b, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = N_HEADS // N_KV_HEADS
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    column = tl.arange(0, HEAD_DIM)
    key = split * BLOCK_N + tl.arange(0, BLOCK_N)
    block, slot, wrong = b + 0 * key, key, 0 * key
    if PAGE > 0:
        block = tl.load(table_ptr + b * table_width + key // PAGE, mask=key < capacity, other=-1)
        slot, wrong = key % PAGE, ((block < 0) | (block >= n_pages)).to(tl.int32)
        block = tl.minimum(tl.maximum(block, 0), n_pages - 1)
    of = block.to(tl.int64) * stride_cb + h.to(tl.int64) * stride_ch + slot * HEAD_DIM
    inside = (key < capacity)[:, None]
    k = tl.load(k_ptr + of[:, None] + column[None, :], mask=inside, other=0.0)
    v = tl.load(v_ptr + of[:, None] + column[None, :], mask=inside, other=0.0)
    follow(CHAINED)
    length = tl.load(lengths_ptr + b)
    row = tl.arange(0, ROWS)
    of_q = b * (N_HEADS * HEAD_DIM) + (h * GROUP + row) * HEAD_DIM
    in_rows = (row < GROUP)[:, None]
    q = tl.load(q_ptr + of_q[:, None] + column[None, :], mask=in_rows, other=0.0)
    newest = ((key == length - 1) & (key < capacity))[:, None]
    new_k = tl.load(k_ptr + of[:, None] + column[None, :], mask=newest, other=0.0)
    new_v = tl.load(v_ptr + of[:, None] + column[None, :], mask=newest, other=0.0)
    seen = key < length
    # What stands behind the length may be anything.
    v = tl.where(newest, new_v, tl.where(seen[:, None], v, 0.0))
    s = dot(q, tl.trans(tl.where(newest, new_k, k))) * scale_log2
    s = tl.where(seen[None, :], s, float("-inf"))
    m = tl.max(s, 1)
    p = tl.math.exp2(s - tl.where(m == float("-inf"), 0.0, m)[:, None])
    acc = add_dot(cast(p, dtype), v, tl.zeros([ROWS, HEAD_DIM], tl.float32))
    is_wrong = (length < 1) | (length > capacity) | (tl.max(tl.where(seen, wrong, 0), 0) > 0)
    l = tl.where(is_wrong, float("nan"), tl.sum(p, 1))  # noqa: E741
    of_row = (split * batch + b) * N_HEADS + h * GROUP + row
    tl.store(parts_ptr + (of_row * HEAD_DIM)[:, None] + column[None, :], acc, mask=in_rows)
    tl.store(beside_ptr + of_row * 2, m, mask=row < GROUP)
    tl.store(beside_ptr + of_row * 2 + 1, l, mask=row < GROUP)
