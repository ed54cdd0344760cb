"""Computes attention of one token of each sequence to a short cache, in one launch.

    each part:  acc = Σ 2^(s − m) v    m = max s    l = Σ 2^(s − m)    s = scale · log2(e) q k
    all parts:  o = Σ 2^(m − max m) acc / Σ 2^(m − max m) l

A program has BLOCK_N keys of a kv head, and all heads of its group. For each sequence and kv head,
the last program to finish adds up the parts, in the order of keys. `decode_attention` does that in
a second launch, and serves any length.

Only the newest key and value are written by the launch before. All others are loaded ahead of the
wait, while that launch still runs. (Parts along the keys: Dao et al., Flash-Decoding, 2023.)
"""

import triton
import triton.language as tl

from tnp.ops._shared.few_rows import follow
from tnp.ops._shared.primitives import add_dot, cast, dot


@triton.jit(do_not_specialize=["batch", "capacity", "table_width", "n_pages"])
def attend_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, parts_ptr, counts_ptr, lengths_ptr, table_ptr,
    stride_cb, stride_ch, stride_ct, batch, capacity, table_width, n_pages, scale_log2,
    N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr, PAGE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Writes o [B, H · D] for q [B, H · D].

    parts are float32 [splits, B, H, D + 2]: acc, m and l. counts are zeros [B, H_kv], and zeros
    again at the end. A length outside of 1 … capacity, or a page that is not there, gives NaN.
    """
    b, h, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    GROUP: tl.constexpr = N_HEADS // N_KV_HEADS
    EACH: tl.constexpr = HEAD_DIM + 2
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    column, row = tl.arange(0, HEAD_DIM), tl.arange(0, ROWS)
    key = split * BLOCK_N + tl.arange(0, BLOCK_N)
    block, slot, wrong = b + 0 * key, key, 0 * key
    if PAGE > 0:
        block = tl.load(table_ptr + b * table_width + key // PAGE, mask=key < capacity, other=-1)
        slot, wrong = key % PAGE, ((block < 0) | (block >= n_pages)).to(tl.int32)
        block = tl.minimum(tl.maximum(block, 0), n_pages - 1)
    of_head = h.to(tl.int64) * stride_ch
    of = (block.to(tl.int64) * stride_cb + slot.to(tl.int64) * stride_ct + of_head)[:, None]
    inside = (key < capacity)[:, None]
    k = tl.load(k_ptr + of + column[None, :], mask=inside, other=0.0)
    v = tl.load(v_ptr + of + column[None, :], mask=inside, other=0.0)
    # The launch before writes no length, and all launches before that one are complete.
    length = tl.load(lengths_ptr + b)
    follow(CHAINED)
    of_q = b * (N_HEADS * HEAD_DIM) + (h * GROUP + row) * HEAD_DIM
    in_rows = row < GROUP
    q = tl.load(q_ptr + of_q[:, None] + column[None, :], mask=in_rows[:, None], other=0.0)
    newest = (key == length - 1) & (key < capacity)
    # The offset of the newest key, if it is one of these.
    at = tl.max(tl.where(newest[:, None], of, 0), 0) + column
    new_k, new_v = tl.load(k_ptr + at)[None, :], tl.load(v_ptr + at)[None, :]
    seen = key < length
    # Memory behind the length may hold anything.
    v = tl.where(newest[:, None], new_v, tl.where(seen[:, None], v, 0.0))
    s = dot(q, tl.trans(tl.where(newest[:, None], new_k, k))) * scale_log2
    s = tl.where(seen[None, :], s, float("-inf"))
    m = tl.max(s, 1)
    p = tl.math.exp2(s - tl.where(m == float("-inf"), 0.0, m)[:, None])
    acc = add_dot(cast(p, dtype), v, tl.zeros([ROWS, HEAD_DIM], tl.float32))
    is_wrong = (length < 1) | (length > capacity) | (tl.max(tl.where(seen, wrong, 0), 0) > 0)
    l = tl.where(is_wrong, float("nan"), tl.sum(p, 1))  # noqa: E741
    part = parts_ptr + (b * N_HEADS + h * GROUP + row) * EACH
    own = part + split * batch * N_HEADS * EACH
    tl.store(own[:, None] + column[None, :], acc, mask=in_rows[:, None])
    tl.store(own + HEAD_DIM, m, mask=in_rows)
    tl.store(own + HEAD_DIM + 1, l, mask=in_rows)

    tl.debug_barrier()  # all of this program's part is written before it counts
    count = counts_ptr + b * N_KV_HEADS + h
    if tl.atomic_add(count, 1) == SPLITS - 1:
        acc = tl.zeros([ROWS, HEAD_DIM], tl.float32)
        l_i, m_i = tl.zeros([ROWS], tl.float32), tl.full([ROWS], float("-inf"), tl.float32)
        for other in tl.static_range(SPLITS):
            one = part + other * batch * N_HEADS * EACH
            m = tl.load(one + HEAD_DIM, mask=in_rows, other=0.0, cache_modifier=".cg")
            l = tl.load(one + HEAD_DIM + 1, mask=in_rows, other=1.0, cache_modifier=".cg")  # noqa: E741
            part_acc = tl.load(
                one[:, None] + column[None, :], mask=in_rows[:, None], other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            m_new = tl.maximum(m_i, m)
            reference = tl.where(m_new == float("-inf"), 0.0, m_new)
            weight, alpha = tl.math.exp2(m - reference), tl.math.exp2(m_i - reference)
            acc = acc * alpha[:, None] + part_acc * weight[:, None]
            l_i, m_i = l_i * alpha + l * weight, m_new
        o = acc / l_i[:, None]
        tl.store(o_ptr + of_q[:, None] + column[None, :], cast(o, dtype), mask=in_rows[:, None])
        tl.store(count, 0)
