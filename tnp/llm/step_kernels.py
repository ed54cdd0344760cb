"""Defines the kernels of a decoding step beside its products: embedding, heads, the choice.

All of them are links of a chain of launches: see `tnp.ops._shared.few_rows`.
"""

import triton
import triton.language as tl

from tnp.ops._shared.few_rows import follow
from tnp.ops._shared.new_heads import angles, store_heads
from tnp.ops._shared.primitives import cast
from tnp.ops._shared.rows import load_rows


@triton.jit(do_not_specialize=["vocab", "longest"])
def embed_kernel(
    embedding_ptr, positions_ptr, ids_ptr, lengths_ptr, x_ptr, vocab, longest,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, POSITIONS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Writes the vector of a sequence's new token in each program, and counts the token.

    An id or a position out of range gives NaN.
    """
    b = tl.program_id(0)
    follow(CHAINED)
    token, place = tl.load(ids_ptr + b), tl.load(lengths_ptr + b)
    column = tl.arange(0, BLOCK)
    inside = (token >= 0) & (token < vocab) & (place >= 0) & (place < longest)
    mask = (column < WIDTH) & inside
    x = load_rows(embedding_ptr, token.to(tl.int64) * WIDTH + column, mask)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    if POSITIONS:
        x += load_rows(positions_ptr, place.to(tl.int64) * WIDTH + column, mask)
    x = tl.where(inside, x, float("nan"))
    tl.store(x_ptr + b.to(tl.int64) * WIDTH + column, cast(x, dtype), mask=column < WIDTH)
    tl.store(lengths_ptr + b, place + 1)


@triton.jit(do_not_specialize=["capacity", "table_width", "n_pages"])
def heads_kernel(
    qkv_ptr, q_weight_ptr, k_weight_ptr, q_ptr, keys_ptr, values_ptr, table_ptr, cos_ptr, sin_ptr,
    lengths_ptr, n_out, stride_cb, stride_ch, stride_ct, capacity, table_width, n_pages, eps,
    HALF: tl.constexpr, BLOCK: tl.constexpr, N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr,
    NORM: tl.constexpr, ROTATES: tl.constexpr, PAGE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Takes a head of a row of [q, k, v] in each program, and writes it where it belongs.

    NORM: heads of q and of k are normalized first (RMSNorm), each with its weight.
    """
    b, head = tl.program_id(0), tl.program_id(1)
    i = tl.arange(0, BLOCK)
    follow(CHAINED)
    mask = i < HALF
    of_head = b.to(tl.int64) * n_out + head * 2 * HALF
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    one = load_rows(qkv_ptr, of_head + i, mask)
    two = load_rows(qkv_ptr, of_head + HALF + i, mask)
    if NORM and head < N_HEADS + N_KV_HEADS:
        scale = 1.0 / tl.sqrt_rn((tl.sum(one * one, 0) + tl.sum(two * two, 0)) / (2 * HALF) + eps)
        weight_ptr = q_weight_ptr if head < N_HEADS else k_weight_ptr
        one = one * scale * load_rows(weight_ptr, i, mask)
        two = two * scale * load_rows(weight_ptr, HALF + i, mask)
    rows = b + tl.arange(0, 1)
    low = tl.where(mask, head * 2 * HALF + i, n_out)
    place, cos, sin = angles(
        cos_ptr, sin_ptr, lengths_ptr, low, rows, rows >= 0, capacity, HALF, N_HEADS + N_KV_HEADS,
        ROTATES,
    )  # fmt: skip
    store_heads(
        q_ptr, keys_ptr, values_ptr, table_ptr, one[:, None], two[:, None], place, cos, sin, low,
        n_out, rows, rows >= 0, stride_cb, stride_ch, stride_ct, capacity, table_width, n_pages,
        dtype, HALF, N_HEADS, N_KV_HEADS, ROTATES, PAGE,
    )  # fmt: skip


@triton.jit
def largest_kernel(
    logits_ptr, best_ptr, best_id_ptr, vocab, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):  # fmt: skip
    """Finds the largest of BLOCK logits of a row in each program, the lowest id of equal ones.

    NaN counts as infinity. The grid is [parts, rows], and so are the results `choice_kernel` reads.
    """
    part, b = tl.program_id(0), tl.program_id(1)
    id_ = part * BLOCK + tl.arange(0, BLOCK)
    inside = id_ < vocab
    follow(CHAINED)
    row = logits_ptr + b.to(tl.int64) * vocab
    x = tl.load(row + id_, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    largest = tl.max(x, 0)
    first = tl.min(tl.where((x == largest) & inside, id_, 0x7FFFFFFF), 0)
    to = part * tl.num_programs(1) + b
    tl.store(best_ptr + to, largest)
    tl.store(best_id_ptr + to, first)


@triton.jit(do_not_specialize=["n_parts", "n_rows", "n_stops", "pad"])
def choice_kernel(
    best_ptr, best_id_ptr, ids_ptr, block_ptr, place_ptr, ended_ptr, stops_ptr, n_parts, n_rows,
    n_stops, pad, PARTS: tl.constexpr, STOPS: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Finds a row's largest logit in each program, the lowest id of equal ones.

    Writes the id as the sequence's last token and at its place in the block, or `pad` if the
    sequence has ended.
    """
    b = tl.program_id(0)
    follow(CHAINED)
    best = tl.full([PARTS], float("-inf"), tl.float32)
    best_id = tl.full([PARTS], 0x7FFFFFFF, tl.int32)
    for start in tl.range(0, n_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        there = part < n_parts
        some = tl.load(best_ptr + part * n_rows + b, mask=there, other=float("-inf"))
        some_id = tl.load(best_id_ptr + part * n_rows + b, mask=there, other=0x7FFFFFFF)
        takes = (some > best) | ((some == best) & (some_id < best_id))
        best, best_id = tl.where(takes, some, best), tl.where(takes, some_id, best_id)
    token = tl.min(tl.where(best == tl.max(best, 0), best_id, 0x7FFFFFFF), 0).to(tl.int64)
    if STOPS > 0:
        ended = tl.load(ended_ptr + b) != 0
        token = tl.where(ended, pad, token)
        i = tl.arange(0, STOPS)
        stops = tl.load(stops_ptr + i, mask=i < n_stops, other=-1)
        ends = tl.max((stops == token).to(tl.int32), 0) > 0
        tl.store(ended_ptr + b, (ended | ends).to(tl.int8))
    place = tl.load(place_ptr + b)
    tl.store(ids_ptr + b, token)
    tl.store(block_ptr + place * n_rows + b, token)
    tl.store(place_ptr + b, place + 1)
