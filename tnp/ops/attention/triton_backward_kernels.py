"""The portable Triton kernels of `triton_backward`: delta, dk and dv, dq, and all in one launch."""

import triton
import triton.language as tl

from tnp.ops._shared.primitives import add_dot, cast, dot
from tnp.ops.attention.keys import key_range, place, query_range, seen, whole_blocks
from tnp.ops.attention.primitives import head_ptr, load_rows, row_ptr, store_rows, tile_width


@triton.jit(do_not_specialize=["n_q"])
def delta_kernel(
    o_ptr, do_ptr, delta_ptr,
    stride_ob, stride_oh, stride_om,
    stride_dob, stride_doh, stride_dom,
    n_heads, n_q,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    n_blocks = tl.cdiv(n_q, BLOCK_M)
    pid_bh = tl.program_id(0) // n_blocks
    offs_m = (tl.program_id(0) % n_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
    o_ptr = head_ptr(o_ptr, stride_ob, stride_oh, pid_bh, n_heads)
    do_ptr = head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads)
    o = load_rows(o_ptr, offs_m, n_q, stride_om, HEAD_DIM, True).to(tl.float32)
    do = load_rows(do_ptr, offs_m, n_q, stride_dom, HEAD_DIM, True).to(tl.float32)
    tl.store(delta_ptr + pid_bh.to(tl.int64) * n_q + offs_m, tl.sum(o * do, 1), mask=offs_m < n_q)


@triton.jit
def _dkdv_tile(
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, offs_n, start_m, n_q, n_keys, stride_qm,
    stride_dom, left, right, scale_log2, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
    MASKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Add what queries start_m … start_m + BLOCK_M contribute."""
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_rows(q_ptr, offs_m, n_q, stride_qm, HEAD_DIM, MASKED)
    do = load_rows(do_ptr, offs_m, n_q, stride_dom, HEAD_DIM, MASKED)
    if MASKED:
        # An lse of +inf makes p zero on the rows past the end.
        lse = tl.load(lse_ptr + offs_m, mask=offs_m < n_q, other=float("inf"))
        delta = tl.load(delta_ptr + offs_m, mask=offs_m < n_q, other=0.0)
    else:
        lse = tl.load(lse_ptr + offs_m)
        delta = tl.load(delta_ptr + offs_m)
    p_t = tl.math.exp2(dot(k, tl.trans(q)) * scale_log2 - lse[None, :])
    if MASKED and (LEFT or RIGHT):
        visible = seen(offs_m[None, :], offs_n[:, None], n_q, n_keys, left, right, LEFT, RIGHT)
        p_t = tl.where(visible, p_t, 0.0)
    dv = add_dot(cast(p_t, do.dtype), do, dv)
    ds_t = p_t * (dot(v, tl.trans(do)) - delta[None, :])
    dk = add_dot(cast(ds_t, q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["n_q", "n_k", "segment", "n_tiles", "left", "right"])
def attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
    tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dkb, stride_dkh, stride_dkn,
    stride_dks, n_heads, n_q, n_k, segment, n_tiles, left, right, scale, scale_log2,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_N_KEYS: tl.constexpr, PACKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """dk and dv share strides; `segment` queries, a multiple of BLOCK_M, belong to a program.

    Of grouped heads a program walks the queries of all that share its keys, one after the other.
    """
    n_kv_heads = n_heads // GROUP
    pid_kv = tl.program_id(0) // n_tiles
    start_n, first_q, n_rows, first_k, n_keys = place(
        tl.program_id(0) % n_tiles, pid_kv // n_kv_heads, tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
        n_q, n_k, BLOCK_N, PACKED, HAS_N_KEYS,
    )  # fmt: skip
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k_ptr = row_ptr(head_ptr(k_ptr, stride_kb, stride_kh, pid_kv, n_kv_heads), first_k, stride_kn)
    v_ptr = row_ptr(head_ptr(v_ptr, stride_vb, stride_vh, pid_kv, n_kv_heads), first_k, stride_vn)
    k = load_rows(k_ptr, offs_n, n_keys, stride_kn, HEAD_DIM, True)
    v = load_rows(v_ptr, offs_n, n_keys, stride_vn, HEAD_DIM, True)
    dk = tl.zeros([BLOCK_N, tile_width(HEAD_DIM)], tl.float32)
    dv = tl.zeros([BLOCK_N, tile_width(HEAD_DIM)], tl.float32)
    begin, full_begin, full_end, end = query_range(
        start_n, n_rows, n_keys, left, right, BLOCK_N, LEFT, RIGHT
    )
    first, full_first, full_last = whole_blocks(begin, full_begin, full_end, end, BLOCK_M)
    if not (LEFT or RIGHT):  # else all queries belong to one program
        first = tl.program_id(1) * segment
        end = tl.where(end > 0, tl.minimum(first + segment, n_rows), first)
        full_first = first
        full_last = first + (end - first) // BLOCK_M * BLOCK_M
    for member in tl.range(GROUP):
        pid_bh = pid_kv * GROUP + member
        of_q = row_ptr(head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads), first_q, stride_qm)
        of_do = row_ptr(
            head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads), first_q, stride_dom
        )
        of_lse = lse_ptr + pid_bh.to(tl.int64) * n_q + first_q
        of_delta = delta_ptr + pid_bh.to(tl.int64) * n_q + first_q
        if RIGHT:
            for start_m in tl.range(first, full_first, BLOCK_M):
                dk, dv = _dkdv_tile(
                    dk, dv, k, v, of_q, of_do, of_lse, of_delta, offs_n, start_m, n_rows, n_keys,
                    stride_qm, stride_dom, left, right, scale_log2, BLOCK_M, HEAD_DIM, True, LEFT,
                    RIGHT,
                )  # fmt: skip
        for start_m in tl.range(full_first, full_last, BLOCK_M):
            dk, dv = _dkdv_tile(
                dk, dv, k, v, of_q, of_do, of_lse, of_delta, offs_n, start_m, n_rows, n_keys,
                stride_qm, stride_dom, left, right, scale_log2, BLOCK_M, HEAD_DIM, False, LEFT,
                RIGHT,
            )  # fmt: skip
        for start_m in tl.range(full_last, end, BLOCK_M):
            dk, dv = _dkdv_tile(
                dk, dv, k, v, of_q, of_do, of_lse, of_delta, offs_n, start_m, n_rows, n_keys,
                stride_qm, stride_dom, left, right, scale_log2, BLOCK_M, HEAD_DIM, True, LEFT,
                RIGHT,
            )  # fmt: skip
    partial = tl.program_id(1).to(tl.int64) * stride_dks
    dk_ptr = head_ptr(dk_ptr, stride_dkb, stride_dkh, pid_kv, n_kv_heads) + partial
    dv_ptr = head_ptr(dv_ptr, stride_dkb, stride_dkh, pid_kv, n_kv_heads) + partial
    dk_ptr = row_ptr(dk_ptr, first_k, stride_dkn)
    dv_ptr = row_ptr(dv_ptr, first_k, stride_dkn)
    store_rows(dv_ptr, dv, offs_n, n_keys, stride_dkn, HEAD_DIM)
    store_rows(dk_ptr, dk * scale, offs_n, n_keys, stride_dkn, HEAD_DIM)
    if HAS_N_KEYS:
        # Zeros to the padding alone: a `where` on dk and dv costs a register across the loop.
        padding = tl.where(offs_n < n_keys, n_k, offs_n)
        zeros = tl.zeros([BLOCK_N, tile_width(HEAD_DIM)], tl.float32)
        store_rows(dv_ptr, zeros, padding, n_k, stride_dkn, HEAD_DIM)
        store_rows(dk_ptr, zeros, padding, n_k, stride_dkn, HEAD_DIM)


@triton.jit
def _dq_tile(
    dq, q, do, lse, delta, k_ptr, v_ptr, offs_m, start_n, n_q, n_keys, stride_kn, stride_vn, left,
    right, scale_log2, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Add what keys start_n … start_n + BLOCK_N contribute."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, offs_n, n_keys, stride_kn, HEAD_DIM, MASKED)
    v = load_rows(v_ptr, offs_n, n_keys, stride_vn, HEAD_DIM, MASKED)
    p = tl.math.exp2(dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
    if MASKED:
        # Keys past the end score 0, whose probability overflows where lse is very negative.
        visible = seen(offs_m[:, None], offs_n[None, :], n_q, n_keys, left, right, LEFT, RIGHT)
        p = tl.where(visible, p, 0.0)
    ds = p * (dot(do, tl.trans(v)) - delta[:, None])
    return add_dot(cast(ds, k.dtype), k, dq)


@triton.jit(do_not_specialize=["n_q", "n_k", "first_program", "n_tiles", "left", "right"])
def attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dqb, stride_dqh, stride_dqm,
    first_program, n_heads, n_q, n_k, n_tiles, left, right, scale, scale_log2,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_N_KEYS: tl.constexpr, PACKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Programs from first_program on own a tile of queries each."""
    pid = tl.program_id(0) - first_program
    pid_bh = pid // n_tiles
    tile = pid % n_tiles
    if RIGHT:
        tile = n_tiles - 1 - tile
    start_m, first_q, n_rows, first_k, n_keys = place(
        tile, pid_bh // n_heads, tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr, n_q, n_k, BLOCK_M,
        PACKED, HAS_N_KEYS,
    )  # fmt: skip
    offs_m = start_m + tl.arange(0, BLOCK_M)
    pid_kv, n_kv_heads = pid_bh // GROUP, n_heads // GROUP
    q_ptr = row_ptr(head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads), first_q, stride_qm)
    k_ptr = row_ptr(head_ptr(k_ptr, stride_kb, stride_kh, pid_kv, n_kv_heads), first_k, stride_kn)
    v_ptr = row_ptr(head_ptr(v_ptr, stride_vb, stride_vh, pid_kv, n_kv_heads), first_k, stride_vn)
    do_ptr = row_ptr(head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads), first_q, stride_dom)

    q = load_rows(q_ptr, offs_m, n_rows, stride_qm, HEAD_DIM, True)
    do = load_rows(do_ptr, offs_m, n_rows, stride_dom, HEAD_DIM, True)
    row_ptrs = pid_bh.to(tl.int64) * n_q + first_q + offs_m
    lse = tl.load(lse_ptr + row_ptrs, mask=offs_m < n_rows, other=float("inf"))
    delta = tl.load(delta_ptr + row_ptrs, mask=offs_m < n_rows, other=0.0)
    dq = tl.zeros([BLOCK_M, tile_width(HEAD_DIM)], tl.float32)
    begin, full_begin, full_end, end = key_range(
        start_m, n_rows, n_keys, left, right, BLOCK_M, LEFT, RIGHT
    )
    first, full_first, full_last = whole_blocks(begin, full_begin, full_end, end, BLOCK_N)
    if LEFT:
        for start_n in tl.range(first, full_first, BLOCK_N):
            dq = _dq_tile(
                dq, q, do, lse, delta, k_ptr, v_ptr, offs_m, start_n, n_rows, n_keys, stride_kn,
                stride_vn, left, right, scale_log2, BLOCK_N, HEAD_DIM, True, LEFT, RIGHT,
            )  # fmt: skip
    for start_n in tl.range(full_first, full_last, BLOCK_N):
        dq = _dq_tile(
            dq, q, do, lse, delta, k_ptr, v_ptr, offs_m, start_n, n_rows, n_keys, stride_kn,
            stride_vn, left, right, scale_log2, BLOCK_N, HEAD_DIM, False, LEFT, RIGHT,
        )  # fmt: skip
    for start_n in tl.range(full_last, end, BLOCK_N):
        dq = _dq_tile(
            dq, q, do, lse, delta, k_ptr, v_ptr, offs_m, start_n, n_rows, n_keys, stride_kn,
            stride_vn, left, right, scale_log2, BLOCK_N, HEAD_DIM, True, LEFT, RIGHT,
        )  # fmt: skip
    dq_ptr = row_ptr(head_ptr(dq_ptr, stride_dqb, stride_dqh, pid_bh, n_heads), first_q, stride_dqm)
    store_rows(dq_ptr, dq * scale, offs_m, n_rows, stride_dqm, HEAD_DIM)


@triton.jit(
    do_not_specialize=["n_q", "n_k", "n_dkdv_programs", "n_key_tiles", "n_q_tiles", "left", "right"]
)
def attention_bwd_fused_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr,
    key_tiles_ptr, q_tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dqb, stride_dqh, stride_dqm,
    stride_dkb, stride_dkh, stride_dkn,
    n_heads, n_q, n_k, n_dkdv_programs, n_key_tiles, n_q_tiles, left, right, scale, scale_log2,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr,
    DKDV_BLOCK_M: tl.constexpr, DKDV_BLOCK_N: tl.constexpr,
    DQ_BLOCK_M: tl.constexpr, DQ_BLOCK_N: tl.constexpr,
    HAS_N_KEYS: tl.constexpr, PACKED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """The first programs own a tile of keys, the others a tile of queries."""
    if tl.program_id(0) < n_dkdv_programs:
        attention_bwd_dkdv_kernel(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr,
            key_tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
            stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
            stride_vb, stride_vh, stride_vn, stride_dob, stride_doh, stride_dom,
            stride_dkb, stride_dkh, stride_dkn, 0, n_heads, n_q, n_k, n_q, n_key_tiles, left, right,
            scale, scale_log2, HEAD_DIM, GROUP, DKDV_BLOCK_M, DKDV_BLOCK_N, HAS_N_KEYS, PACKED,
            LEFT, RIGHT,
        )  # fmt: skip
    else:
        attention_bwd_dq_kernel(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
            q_tiles_ptr, cu_q_ptr, cu_k_ptr, n_keys_ptr,
            stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
            stride_vb, stride_vh, stride_vn, stride_dob, stride_doh, stride_dom,
            stride_dqb, stride_dqh, stride_dqm, n_dkdv_programs, n_heads, n_q, n_k, n_q_tiles, left,
            right, scale, scale_log2, HEAD_DIM, GROUP, DQ_BLOCK_M, DQ_BLOCK_N, HAS_N_KEYS, PACKED,
            LEFT, RIGHT,
        )  # fmt: skip
