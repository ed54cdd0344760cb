"""Quantizes q, k and v to 8 bits (e4m3) for attention forward, in one launch of Triton.

Keys and values are centred first. Softmax does not change if one vector is subtracted from all
keys. A row's scores all lose q·vector, which is added to lse in float32. The vector that is
subtracted from all values is added to the output in float32. Any vector is right, so the mean of at
most 128 rows serves.

The rest is scaled by powers of two, so that the largest element lies between half of e4m3's range
and all of it. Each row of q, block of 128 keys and block of 128 values has a scale of its own.

Hopper multiplies 8-bit operands only if both are contiguous along the summed dimension. It holds
the left one, p, in registers, as the product before leaves it. So values are stored transposed in
tiles of 64 keys, in the order of `key_at`. Threads then exchange nothing of p.

A row or a block with an infinity becomes NaN, because its scale would hide it. NaN stays NaN.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call
from tnp.ops._shared.operands import dense
from tnp.ops._shared.primitives import cast, exponent, inverse, key_count, nan_outside, power
from tnp.ops.attention import eight_bit
from tnp.ops.attention.primitives import head_ptr, load_rows, row_strides

E4M3 = torch.float8_e4m3fn
BLOCK = tl.constexpr(eight_bit.BLOCK)
LEAST = tl.constexpr(eight_bit.LEAST)
GROUP = tl.constexpr(64)  # keys of a transposed tile
BLOCKS = 4  # blocks of rows that a program quantizes; each program computes the means again
NUM_WARPS = 8


@triton.jit
def key_at(position):
    """Returns the key at a position. Column 8a + 2t + b of a sum is 4t + 2a + b of an operand."""
    a = position // 2 % 2
    t = position // 4 % 4
    return position // 16 * 16 + 8 * a + 2 * t + position % 2


@triton.jit
def value_offsets(block, positions, offs_d, HEAD_DIM: tl.constexpr):
    """Returns where a block's values lie from the start of their head. The indices broadcast."""
    groups = block * (BLOCK // GROUP) + positions.to(tl.int64) // GROUP
    return (groups * HEAD_DIM + offs_d) * GROUP + positions % GROUP


@triton.jit
def _mean(ptr, n_keys, stride_n, HEAD_DIM: tl.constexpr):
    """Returns the mean [D], float32, of at most BLOCK rows spread evenly over a sample."""
    n = tl.minimum(n_keys, BLOCK)
    i = tl.arange(0, BLOCK)
    rows = tl.where(i < n, i.to(tl.int64) * n_keys // n, n_keys)
    total = tl.sum(load_rows(ptr, rows, n_keys, stride_n, HEAD_DIM, True).to(tl.float32), 0)
    return tl.math.div_rn(total, tl.zeros([HEAD_DIM], tl.float32) + n)


@triton.jit
def _centred(ptr, vector, offs_n, n_keys, stride_n, HEAD_DIM: tl.constexpr):
    """Returns rows minus the vector, zeros past the end, their largest element and exponent."""
    x = load_rows(ptr, offs_n, n_keys, stride_n, HEAD_DIM, True).to(tl.float32)
    x = tl.where(offs_n[:, None] < n_keys, x - vector[None, :], 0.0)
    largest = tl.max(tl.max(tl.abs(x), 1), 0)
    return x, largest, exponent(largest, LEAST)


@triton.jit(do_not_specialize=["n_q", "n_k"])
def _quantize_kernel(
    q_ptr, k_ptr, v_ptr, q8_ptr, k8_ptr, v8_ptr, q_scale_ptr, q_vector_ptr, scales_ptr, vector_ptr,
    n_keys_ptr,
    stride_qb, stride_qh, stride_qm,
    stride_kb, stride_kh, stride_kn,
    stride_vb, stride_vh, stride_vn,
    n_heads, n_q, n_k, n_key_programs,
    HEAD_DIM: tl.constexpr, BLOCKS: tl.constexpr, HAS_N_KEYS: tl.constexpr,
):  # fmt: skip
    """Writes the 8-bit operands and their scales.

    Programs below `n_key_programs` take BLOCKS blocks of keys and values, the others take BLOCKS
    blocks of queries.
    """
    program = tl.program_id(0)
    of_keys = program < n_key_programs
    n_rows = tl.where(of_keys, n_k, n_q)
    program -= tl.where(of_keys, 0, n_key_programs)
    n_chunks = tl.cdiv(tl.cdiv(n_rows, BLOCK), BLOCKS)
    pid_bh = program // n_chunks
    first = program % n_chunks * BLOCKS
    offs_d = tl.arange(0, HEAD_DIM)
    positions = tl.arange(0, BLOCK)
    n_keys = key_count(n_keys_ptr, pid_bh // n_heads, n_k, HAS_N_KEYS)
    k_ptr = head_ptr(k_ptr, stride_kb, stride_kh, pid_bh, n_heads)
    key_vector = _mean(k_ptr, n_keys, stride_kn, HEAD_DIM)
    if of_keys:
        n_blocks = tl.cdiv(n_k, BLOCK)
        v_ptr = head_ptr(v_ptr, stride_vb, stride_vh, pid_bh, n_heads)
        k8_ptr += pid_bh.to(tl.int64) * n_k * HEAD_DIM
        v8_ptr += pid_bh.to(tl.int64) * n_blocks * BLOCK * HEAD_DIM
        scales_ptr += pid_bh.to(tl.int64) * n_blocks * 2
        value_vector = _mean(v_ptr, n_keys, stride_vn, HEAD_DIM)
        if first == 0:
            # It is added to the output, which so becomes NaN if n_keys is out of range.
            vector = nan_outside(value_vector, n_keys_ptr, pid_bh // n_heads, n_k, HAS_N_KEYS)
            tl.store(vector_ptr + pid_bh * HEAD_DIM + offs_d, vector)
        last = tl.minimum(first + BLOCKS, tl.cdiv(n_keys, BLOCK))
        for block in tl.range(first, last):
            keys = block * BLOCK + positions
            k, largest, e = _centred(k_ptr, key_vector, keys, n_keys, stride_kn, HEAD_DIM)
            k8 = cast(k * inverse(largest, e), k8_ptr.dtype.element_ty)
            k8_ptrs = k8_ptr + keys.to(tl.int64)[:, None] * HEAD_DIM + offs_d[None, :]
            tl.store(k8_ptrs, k8, mask=keys[:, None] < n_k)
            tl.store(scales_ptr + 2 * block, power(e))
            keys = block * BLOCK + key_at(positions)
            v, largest, e = _centred(v_ptr, value_vector, keys, n_keys, stride_vn, HEAD_DIM)
            v8 = cast(v * inverse(largest, e), v8_ptr.dtype.element_ty)
            offsets = value_offsets(block, positions[:, None], offs_d[None, :], HEAD_DIM)
            tl.store(v8_ptr + offsets, v8)
            tl.store(scales_ptr + 2 * block + 1, e.to(tl.float32))
    else:
        # It is added to lse, which so becomes NaN if n_keys is out of range.
        key_vector = nan_outside(key_vector, n_keys_ptr, pid_bh // n_heads, n_k, HAS_N_KEYS)
        q_ptr = head_ptr(q_ptr, stride_qb, stride_qh, pid_bh, n_heads)
        first_row = pid_bh.to(tl.int64) * n_q
        last = tl.minimum(first + BLOCKS, tl.cdiv(n_q, BLOCK))
        for block in tl.range(first, last):
            rows = block * BLOCK + positions
            q = load_rows(q_ptr, rows, n_q, stride_qm, HEAD_DIM, True).to(tl.float32)
            largest = tl.max(tl.abs(q), 1)
            e = exponent(largest, LEAST)
            q8 = cast(q * inverse(largest, e)[:, None], q8_ptr.dtype.element_ty)
            q8_ptrs = q8_ptr + (first_row + rows)[:, None] * HEAD_DIM + offs_d[None, :]
            tl.store(q8_ptrs, q8, mask=rows[:, None] < n_q)
            tl.store(q_scale_ptr + first_row + rows, power(e), mask=rows < n_q)
            q_vector = tl.sum(q * key_vector[None, :], 1)
            tl.store(q_vector_ptr + first_row + rows, q_vector, mask=rows < n_q)


@dataclass(frozen=True)
class Quantized:
    """Holds the operands of attention in 8 bits.

    q: [B, H, n_q, D] e4m3, in units of q_scale, [B, H, n_q] float32.
    k: [B, H, n_k, D] e4m3, minus a vector, in units of scales[…, 0].
    v: [B, H, n_k padded to 128, D] e4m3, minus `vector`, in units of 2^scales[…, 1]. Each 64 keys
        are a transposed tile, in the order of `key_at`.
    q_vector: [B, H, n_q] float32, the product of q and the vector that keys lack.
    scales: [B, H, blocks of 128 keys, 2] float32.
    vector: [B, H, D] float32, to be added to the output.

    With n_keys, blocks past a sample's last key are not written. In its last block, elements past
    the last key are zero.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    q_scale: Tensor
    q_vector: Tensor
    scales: Tensor
    vector: Tensor


def quantizer(call: Call, inputs: tuple) -> Callable[[tuple], Quantized]:
    """Returns a function that quantizes inputs (q, k, v, n_keys or None), like `inputs`.

    The last dimension of each must be contiguous. The other strides may be any.
    """
    q, k, v, n_keys = inputs[:4]
    batch, n_heads, n_q, head_dim = q.shape
    n_k = k.shape[2]
    blocks = triton.cdiv(n_k, BLOCK.value)
    key_programs = batch * n_heads * triton.cdiv(blocks, BLOCKS)
    q_programs = batch * n_heads * triton.cdiv(triton.cdiv(n_q, BLOCK.value), BLOCKS)
    in_8_bits = (
        dense(batch, n_heads, n_q, head_dim),
        dense(batch, n_heads, n_k, head_dim),
        dense(batch, n_heads, blocks * BLOCK.value, head_dim),
    )
    in_float32 = (
        dense(batch, n_heads, n_q),
        dense(batch, n_heads, n_q),
        dense(batch, n_heads, blocks, 2),
        dense(batch, n_heads, head_dim),
    )
    kernel = Bound(
        _quantize_kernel, (key_programs + q_programs,),
        *row_strides(q), *row_strides(k), *row_strides(v), n_heads, n_q, n_k, key_programs,
        HEAD_DIM=head_dim, BLOCKS=BLOCKS, HAS_N_KEYS=n_keys is not None, num_warps=NUM_WARPS,
    )  # fmt: skip

    def quantize(inputs: tuple) -> Quantized:
        q, k, v, n_keys = inputs[:4]
        made = [q.new_empty_strided(*one, dtype=E4M3) for one in in_8_bits]
        made += [q.new_empty_strided(*one, dtype=torch.float32) for one in in_float32]
        kernel(q, k, v, *made, q if n_keys is None else n_keys)
        return Quantized(*made)

    return quantize
