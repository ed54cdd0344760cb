"""The portable Triton kernels of `triton_backward`: delta, dk and dv, dq, and all in one launch."""

import triton
import triton.language as tl

from tnp.ops.attention.primitives import head_ptr, load_rows, store_rows
from tnp.ops.primitives import add_dot, cast, dot, key_count


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
    dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, start_m, n_q, stride_qm, stride_dom,
    scale_log2, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
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
    dv = add_dot(cast(p_t, do.dtype), do, dv)
    ds_t = p_t * (dot(v, tl.trans(do)) - delta[None, :])
    dk = add_dot(cast(ds_t, q.dtype), q, dk)
    return dk, dv


@triton.jit(do_not_specialize=["n_q", "n_k", "segment"])
def attention_bwd_dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dkb, stride_dkh, stride_dkn,
    stride_dks, n_heads, n_q, n_k, segment, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_N_KEYS: tl.constexpr,
):  # fmt: skip
    """dk and dv share strides; `segment` queries, a multiple of BLOCK_M, belong to a program."""
    n_blocks = tl.cdiv(n_k, BLOCK_N)
    pid_bh = tl.program_id(0) // n_blocks
    start_n = tl.program_id(0) % n_blocks * BLOCK_N
    offs_n = start_n + tl.arange(0, BLOCK_N)
    q_ptr = head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads)
    k_ptr = head_ptr(k_ptr, stride_kb, stride_kh, pid_bh, n_heads)
    v_ptr = head_ptr(v_ptr, stride_vb, stride_vh, pid_bh, n_heads)
    do_ptr = head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads)
    lse_ptr += pid_bh.to(tl.int64) * n_q
    delta_ptr += pid_bh.to(tl.int64) * n_q

    n_keys = key_count(n_keys_ptr, pid_bh // n_heads, n_k, HAS_N_KEYS)
    k = load_rows(k_ptr, offs_n, n_keys, stride_kn, HEAD_DIM, True)
    v = load_rows(v_ptr, offs_n, n_keys, stride_vn, HEAD_DIM, True)
    dk = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    dv = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
    begin = tl.program_id(1) * segment
    end = tl.minimum(begin + segment, n_q)
    if HAS_N_KEYS:
        end = tl.where(start_n < n_keys, end, begin)  # a tile of padding has nothing to add
    full_end = begin + (end - begin) // BLOCK_M * BLOCK_M
    for start_m in tl.range(begin, full_end, BLOCK_M):
        dk, dv = _dkdv_tile(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, start_m, n_q, stride_qm, stride_dom,
            scale_log2, BLOCK_M, HEAD_DIM, False,
        )  # fmt: skip
    if full_end < end:
        dk, dv = _dkdv_tile(
            dk, dv, k, v, q_ptr, do_ptr, lse_ptr, delta_ptr, full_end, n_q, stride_qm, stride_dom,
            scale_log2, BLOCK_M, HEAD_DIM, True,
        )  # fmt: skip
    partial = tl.program_id(1).to(tl.int64) * stride_dks
    dk_ptr = head_ptr(dk_ptr, stride_dkb, stride_dkh, pid_bh, n_heads) + partial
    dv_ptr = head_ptr(dv_ptr, stride_dkb, stride_dkh, pid_bh, n_heads) + partial
    store_rows(dv_ptr, dv, offs_n, n_keys, stride_dkn, HEAD_DIM)
    store_rows(dk_ptr, dk * scale, offs_n, n_keys, stride_dkn, HEAD_DIM)
    if HAS_N_KEYS:
        # Zeros to the padding alone: a `where` on dk and dv costs a register across the loop.
        padding = tl.where(offs_n < n_keys, n_k, offs_n)
        zeros = tl.zeros([BLOCK_N, HEAD_DIM], tl.float32)
        store_rows(dv_ptr, zeros, padding, n_k, stride_dkn, HEAD_DIM)
        store_rows(dk_ptr, zeros, padding, n_k, stride_dkn, HEAD_DIM)


@triton.jit
def _dq_tile(
    dq, q, do, lse, delta, k_ptr, v_ptr, start_n, n_keys, stride_kn, stride_vn, scale_log2,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Add what keys start_n … start_n + BLOCK_N contribute."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_rows(k_ptr, offs_n, n_keys, stride_kn, HEAD_DIM, MASKED)
    v = load_rows(v_ptr, offs_n, n_keys, stride_vn, HEAD_DIM, MASKED)
    p = tl.math.exp2(dot(q, tl.trans(k)) * scale_log2 - lse[:, None])
    if MASKED:
        # Keys past the end score 0, whose probability overflows where lse is very negative.
        p = tl.where(offs_n[None, :] < n_keys, p, 0.0)
    ds = p * (dot(do, tl.trans(v)) - delta[:, None])
    return add_dot(cast(ds, k.dtype), k, dq)


@triton.jit(do_not_specialize=["n_q", "n_k", "first_program"])
def attention_bwd_dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dqb, stride_dqh, stride_dqm,
    first_program, n_heads, n_q, n_k, scale, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_N_KEYS: tl.constexpr,
):  # fmt: skip
    """Programs from first_program on own a tile of queries each."""
    pid = tl.program_id(0) - first_program
    n_blocks = tl.cdiv(n_q, BLOCK_M)
    pid_bh = pid // n_blocks
    offs_m = pid % n_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    q_ptr = head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads)
    k_ptr = head_ptr(k_ptr, stride_kb, stride_kh, pid_bh, n_heads)
    v_ptr = head_ptr(v_ptr, stride_vb, stride_vh, pid_bh, n_heads)
    do_ptr = head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads)

    q = load_rows(q_ptr, offs_m, n_q, stride_qm, HEAD_DIM, True)
    do = load_rows(do_ptr, offs_m, n_q, stride_dom, HEAD_DIM, True)
    row_ptrs = pid_bh.to(tl.int64) * n_q + offs_m
    lse = tl.load(lse_ptr + row_ptrs, mask=offs_m < n_q, other=float("inf"))
    delta = tl.load(delta_ptr + row_ptrs, mask=offs_m < n_q, other=0.0)
    dq = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    n_keys = key_count(n_keys_ptr, pid_bh // n_heads, n_k, HAS_N_KEYS)
    n_full = n_keys // BLOCK_N * BLOCK_N
    for start_n in tl.range(0, n_full, BLOCK_N):
        dq = _dq_tile(
            dq, q, do, lse, delta, k_ptr, v_ptr, start_n, n_keys, stride_kn, stride_vn, scale_log2,
            BLOCK_N, HEAD_DIM, False,
        )  # fmt: skip
    if n_full < n_keys:
        dq = _dq_tile(
            dq, q, do, lse, delta, k_ptr, v_ptr, n_full, n_keys, stride_kn, stride_vn, scale_log2,
            BLOCK_N, HEAD_DIM, True,
        )  # fmt: skip
    dq_ptr = head_ptr(dq_ptr, stride_dqb, stride_dqh, pid_bh, n_heads)
    store_rows(dq_ptr, dq * scale, offs_m, n_q, stride_dqm, HEAD_DIM)


@triton.jit(do_not_specialize=["n_q", "n_k", "n_dkdv_programs"])
def attention_bwd_fused_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom,
    stride_dqb, stride_dqh, stride_dqm,
    stride_dkb, stride_dkh, stride_dkn,
    n_heads, n_q, n_k, n_dkdv_programs, scale, scale_log2,
    HEAD_DIM: tl.constexpr, DKDV_BLOCK_M: tl.constexpr, DKDV_BLOCK_N: tl.constexpr,
    DQ_BLOCK_M: tl.constexpr, DQ_BLOCK_N: tl.constexpr, HAS_N_KEYS: tl.constexpr,
):  # fmt: skip
    """The first programs own a tile of keys, the others a tile of queries."""
    if tl.program_id(0) < n_dkdv_programs:
        attention_bwd_dkdv_kernel(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, n_keys_ptr,
            stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
            stride_vb, stride_vh, stride_vn, stride_dob, stride_doh, stride_dom,
            stride_dkb, stride_dkh, stride_dkn, 0, n_heads, n_q, n_k, n_q, scale, scale_log2,
            HEAD_DIM, DKDV_BLOCK_M, DKDV_BLOCK_N, HAS_N_KEYS,
        )  # fmt: skip
    else:
        attention_bwd_dq_kernel(
            q_ptr, k_ptr, v_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, n_keys_ptr,
            stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn,
            stride_vb, stride_vh, stride_vn, stride_dob, stride_doh, stride_dom,
            stride_dqb, stride_dqh, stride_dqm, n_dkdv_programs, n_heads, n_q, n_k, scale,
            scale_log2, HEAD_DIM, DQ_BLOCK_M, DQ_BLOCK_N, HAS_N_KEYS,
        )  # fmt: skip
