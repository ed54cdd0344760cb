"""Streams a weight past a few rows: y = x wᵀ for up to 16 rows, at the speed of memory.

    x' = x + update             the residual sum, written by the first program of its rows
    x̂ = norm(x')                RMSNorm or LayerNorm
    y = x̂ wᵀ + bias             w in 16 bits, or codes of 8 or 4 bits with a scale for each group
    then SiLU, SwiGLU or GELU, or heads to a cache, or the largest of y

A program computes tiles of 16 outputs of all rows, or of eight rows where the weight is small. The
weight is the left operand of the product, so a few rows are the narrow side of the tensor core's
instruction (m16n8k16). A thread loads 16 bytes of a row at a time, straight into the registers from
which it multiplies: the order of the inner dimension is free in a sum, so x is reordered instead of
the weight (`_inner_last`). The warps share the inner dimension, and add up their sums at the end in
a fixed order.

Codes are integers that both 16-bit formats hold exactly. The scale of a group multiplies its
float32 sum. So the kernel adds no error of its own to the rounding of the codes.

Like all kernels for a few rows, on compute capability 9.0 and newer it starts while the kernel
before it still runs (`tnp.ops._shared.few_rows`). `CONSTANT` says that no earlier launch of the
stream writes the weight. Only then is the weight read before the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
from tnp.ops._shared.few_rows import chained, follow, prefetch_rows
from tnp.ops._shared.new_heads import angles, store_heads
from tnp.ops._shared.primitives import INTERPRETED, KernelConfig, add_dot, cast
from tnp.ops._shared.ready_weights import is_ready
from tnp.ops._shared.rows import RowLayout, load_rows, row_offsets
from tnp.ops._shared.triton_matmul import silu

LEAST = tl.constexpr(8)  # rows of the tensor core's instruction
LOAD = 16  # bytes that a thread loads at once
SQRT_2_OVER_PI = tl.constexpr(0.7978845608028654)


@dataclass(frozen=True)
class Config(KernelConfig):
    """Sets how a product is launched.

    rows: rows of a program, a power of 2: all, or 8.
    blocks: 16 · blocks outputs are a tile.
    tiles: tiles of a program, one after another. A tile's weight is loaded ahead.
    columns: of the weight that a program loads at once.
    num_warps: warps of a program.
    """

    rows: int
    blocks: int
    tiles: int
    columns: int
    num_warps: int


# A code is split into its low seven bits and its sign. Both become bfloat16; one fma joins them.
_INT8_BFLOAT16 = tl.constexpr("""{
.reg .b32 a, b, s, t, one;
mov.b32 one, 0xBF80BF80;
prmt.b32 a, $2, 0x43434343, 0x4140;
prmt.b32 b, $2, 0x43434343, 0x4342;
and.b32 s, a, 0xFF80FF80;
and.b32 t, b, 0xFF80FF80;
and.b32 a, a, 0xFF7FFF7F;
and.b32 b, b, 0xFF7FFF7F;
fma.rn.bf16x2 $0, s, one, a;
fma.rn.bf16x2 $1, t, one, b;
}""")
# A byte b becomes the float16 number 1,024 + b. Then 1,152 is subtracted.
_INT8_FLOAT16 = tl.constexpr("""{
.reg .b32 u, a, b, c;
mov.b32 c, 0x64806480;
xor.b32 u, $2, 0x80808080;
prmt.b32 a, u, 0x64646464, 0x4140;
prmt.b32 b, u, 0x64646464, 0x4342;
sub.rn.f16x2 $0, a, c;
sub.rn.f16x2 $1, b, c;
}""")
# A word of eight 4-bit codes is four pairs: 128 + code in bfloat16, or 1,024 + code in float16.
_INT4_BFLOAT16 = tl.constexpr("""{
.reg .b32 s, one, c;
mov.b32 one, 0x3F803F80;
mov.b32 c, 0xC308C308;
lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
shr.u32 s, $4, 4;
lop3.b32 $1, s, 0x000F000F, 0x43004300, 0xEA;
shr.u32 s, $4, 8;
lop3.b32 $2, s, 0x000F000F, 0x43004300, 0xEA;
shr.u32 s, $4, 12;
lop3.b32 $3, s, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, $0, one, c;
fma.rn.bf16x2 $1, $1, one, c;
fma.rn.bf16x2 $2, $2, one, c;
fma.rn.bf16x2 $3, $3, one, c;
}""")
_INT4_FLOAT16 = tl.constexpr("""{
.reg .b32 s, c;
mov.b32 c, 0x64086408;
lop3.b32 $0, $4, 0x000F000F, 0x64006400, 0xEA;
shr.u32 s, $4, 4;
lop3.b32 $1, s, 0x000F000F, 0x64006400, 0xEA;
shr.u32 s, $4, 8;
lop3.b32 $2, s, 0x000F000F, 0x64006400, 0xEA;
shr.u32 s, $4, 12;
lop3.b32 $3, s, 0x000F000F, 0x64006400, 0xEA;
sub.rn.f16x2 $0, $0, c;
sub.rn.f16x2 $1, $1, c;
sub.rn.f16x2 $2, $2, c;
sub.rn.f16x2 $3, $3, c;
}""")


@triton.jit
def _from_int8(w, dtype: tl.constexpr):
    """Returns int8 codes in a 16-bit dtype, exactly."""
    if INTERPRETED:
        return w.to(tl.float32).to(dtype)
    if dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _INT8_BFLOAT16, "=r,=r,r", [w], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            _INT8_FLOAT16, "=r,=r,r", [w], dtype=tl.float16, is_pure=True, pack=4
        )


@triton.jit
def _from_int4(w, dtype: tl.constexpr):
    """Returns the codes of bytes w [..., V], less 8, in a 16-bit dtype [..., V / 4, 2, 4]."""
    WORDS: tl.constexpr = w.shape[5] // 4
    SHAPE: tl.constexpr = [w.shape[0], 2, w.shape[2], w.shape[3], 8, WORDS, 4]
    if INTERPRETED:
        place = tl.arange(0, 4)
        parts = (tl.reshape(w, SHAPE).to(tl.int32) & 255) << (8 * place)
        word = tl.sum(parts, 6)[:, :, :, :, :, :, None, None]
        code = 4 * tl.arange(0, 2)[:, None] + place[None, :]
        shift = 4 * (code // 2) + 16 * (code % 2)
        return (((word >> shift) & 15) - 8).to(tl.float32).to(dtype)
    if dtype == tl.bfloat16:
        low, high = tl.inline_asm_elementwise(
            _INT4_BFLOAT16, "=r,=r,=r,=r,r", [w], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True,
            pack=4,
        )  # fmt: skip
    else:
        low, high = tl.inline_asm_elementwise(
            _INT4_FLOAT16, "=r,=r,=r,=r,r", [w], dtype=(tl.float16, tl.float16), is_pure=True,
            pack=4,
        )  # fmt: skip
    both = tl.join(tl.reshape(low, SHAPE), tl.reshape(high, SHAPE))
    return tl.permute(both, (0, 1, 2, 3, 4, 5, 7, 6))


@triton.jit
def _load_weight(
    weight_ptr, first_pair, start, n_out, K: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr,
    R: tl.constexpr, L: tl.constexpr, PARTS: tl.constexpr, V: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Loads [L, 2, R, PARTS, 8, 4 · V]: V elements of a thread, as they lie in memory.

    A pair of outputs lies HALF rows apart in the weight. This order of dimensions makes Triton give
    a quarter of a warp's lanes to a row, and parts to warps, as the product's operand wants it.
    """
    # An element is a byte for codes, so that four are a register's.
    WIDTH: tl.constexpr = K * BITS // 8 if BITS < 16 else K
    load = tl.arange(0, L)[:, None, None, None, None, None]
    half = tl.arange(0, 2)[None, :, None, None, None, None]
    r = tl.arange(0, R)[None, None, :, None, None, None]
    part = tl.arange(0, PARTS)[None, None, None, :, None, None]
    g = tl.arange(0, 8)[None, None, None, None, :, None]
    v = tl.arange(0, 4 * V)[None, None, None, None, None, :]
    pair = first_pair + r * 8 + g
    row = pair // HALF * (2 * HALF) + pair % HALF + half * HALF
    row = tl.minimum(row, n_out - 1).to(tl.int64)
    column = start + (part * L + load) * (4 * V) + v
    ptrs = tl.max_contiguous(weight_ptr + row * WIDTH + column, [1, 1, 1, 2, 4, 4 * V])
    if MASKED:
        return tl.load(ptrs, mask=column < WIDTH, other=0)
    return tl.load(ptrs)


@triton.jit
def _operand(w, dtype: tl.constexpr, BITS: tl.constexpr, C: tl.constexpr):
    """Returns loaded weights as the left operand [PARTS, 16 · R, EACH], C numbers of a thread.

    The inner dimension is reordered as a thread holds it: see `_inner_last`. No number moves.
    """
    L: tl.constexpr = w.shape[0]
    R: tl.constexpr = w.shape[2]
    PARTS: tl.constexpr = w.shape[3]
    if BITS == 4:
        w = _from_int4(w, dtype)
    elif BITS == 8:
        w = _from_int8(w, dtype)
    w = tl.reshape(w, [L, 2, R, PARTS, 8, 4, C * BITS // 32, 32 // BITS])
    w = tl.permute(w, (3, 2, 1, 4, 0, 6, 5, 7))
    return tl.reshape(w, [PARTS, 16 * R, L * 4 * C])


@triton.jit
def _inner_last(x, BITS: tl.constexpr, L: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr):
    """Returns rows x [BM, PARTS · EACH] as the right operand [PARTS, EACH, BM].

    Triton gives each of four threads 32 / BITS neighbouring columns of a row of such weights, and x
    gets the same order. With another order results would be the same, but the weight would pass
    through shared memory.
    """
    ROWS: tl.constexpr = x.shape[0]
    x = tl.reshape(x, [ROWS, PARTS, L, 4, C * BITS // 32, 32 // BITS])
    x = tl.reshape(tl.permute(x, (1, 2, 4, 3, 5, 0)), [PARTS, L * 4 * C, ROWS])
    if ROWS < LEAST:
        # The instruction takes at least eight rows. Repeated rows are not read again.
        x = tl.broadcast_to(x[:, :, None, :], [PARTS, L * 4 * C, LEAST // ROWS, ROWS])
        x = tl.reshape(x, [PARTS, L * 4 * C, LEAST])
    return x


@triton.jit
def _sum(
    x_ptr, update_ptr, of_x, of_update, offs_k, in_rows, dtype: tl.constexpr, K: tl.constexpr,
    UPDATE: tl.constexpr,
):  # fmt: skip
    """Returns columns of x, or of x + update rounded to its dtype, in float32."""
    mask = in_rows[:, None] & (offs_k < K)[None, :]
    x = load_rows(x_ptr, of_x[:, None] + offs_k[None, :], mask)
    if UPDATE:
        x += load_rows(update_ptr, of_update[:, None] + offs_k[None, :], mask)
        x = cast(x, dtype).to(tl.float32)
    return x


@triton.jit
def _gelu(z):
    """Returns GELU in its tanh form."""
    inner = SQRT_2_OVER_PI * (z + 0.044715 * z * z * z)
    return z * (1.0 - 1.0 / (1.0 + tl.exp(2.0 * inner)))


@triton.jit
def _right(
    x_ptr, update_ptr, sum_ptr, norm_weight_ptr, norm_bias_ptr, of_x, of_update, rows, in_rows, at,
    mean, rstd, eps, dtype: tl.constexpr, K: tl.constexpr, UPDATE: tl.constexpr,
    WRITES: tl.constexpr, NORM: tl.constexpr, WHOLE: tl.constexpr, BITS: tl.constexpr,
    L: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Returns columns `at` of the normalized rows as the right operand.

    WHOLE: these are all columns, from which the norm's statistics are computed here.
    WRITES: the first program of these rows writes the residual sum.
    """
    if NORM != "":
        # The norm's weight is loaded beside x, not after it.
        scale = load_rows(norm_weight_ptr, at, at < K)[None, :]
    x = _sum(x_ptr, update_ptr, of_x, of_update, at, in_rows, dtype, K, UPDATE)
    if WRITES:
        mask = in_rows[:, None] & (at < K)[None, :] & (tl.program_id(0) == 0)
        tl.store(sum_ptr + rows[:, None] * K + at[None, :], cast(x, dtype), mask=mask)
    if NORM != "":
        if WHOLE:
            if NORM == "layer":
                mean = tl.sum(x, 1) / K
            centred = tl.where((at < K)[None, :], x - mean[:, None], 0.0)
            rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 1) / K + eps)
        x = (x - mean[:, None]) * rstd[:, None] * scale
        if NORM == "layer":
            x += load_rows(norm_bias_ptr, at, at < K)[None, :]
    return _inner_last(cast(x, dtype), BITS, L, PARTS, C)


@triton.jit
def _statistics(
    x_ptr, update_ptr, of_x, of_update, in_rows, eps, dtype: tl.constexpr, K: tl.constexpr,
    UPDATE: tl.constexpr, NORM: tl.constexpr, XM: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Returns the mean (0 for RMSNorm) and 1 / deviation of rows that pass in chunks."""
    mean, squares = tl.zeros([XM], tl.float32), tl.zeros([XM], tl.float32)
    if NORM == "layer":
        for start in tl.range(0, K, CHUNK, num_stages=1):
            at = start + tl.arange(0, CHUNK)
            mean += tl.sum(
                _sum(x_ptr, update_ptr, of_x, of_update, at, in_rows, dtype, K, UPDATE), 1
            )
        mean = mean / K
    for start in tl.range(0, K, CHUNK, num_stages=1):
        at = start + tl.arange(0, CHUNK)
        x = _sum(x_ptr, update_ptr, of_x, of_update, at, in_rows, dtype, K, UPDATE)
        x = tl.where((at < K)[None, :], x - mean[:, None], 0.0)
        squares += tl.sum(x * x, 1)
    return mean, 1.0 / tl.sqrt_rn(squares / K + eps)


@triton.jit
def _outputs(first_pair, n_out, HALF: tl.constexpr, R: tl.constexpr):
    """Returns the outputs of a tile's rows, in the order of `_load_weight`, within bounds."""
    offs_n = tl.arange(0, 16 * R)
    pair = first_pair + offs_n // 16 * 8 + offs_n % 8
    return tl.minimum(pair // HALF * (2 * HALF) + pair % HALF + offs_n // 8 % 2 * HALF, n_out - 1)


@triton.jit(do_not_specialize=["n_rows", "capacity", "table_width", "n_pages"])
def streamed_kernel(
    x_ptr, update_ptr, norm_weight_ptr, norm_bias_ptr, weight_ptr, scales_ptr, zeros_ptr, bias_ptr,
    sum_ptr, y_ptr, keys_ptr, values_ptr, table_ptr, cos_ptr, sin_ptr, lengths_ptr, best_ptr,
    best_id_ptr,
    stride_xb, stride_xl, stride_ub, stride_ul, n_rows, inner_x, inner_update, n_out,
    stride_cb, stride_ch, stride_ct, capacity, table_width, n_pages, eps,
    K: tl.constexpr, HALF: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
    ZEROS: tl.constexpr, BIAS: tl.constexpr, UPDATE: tl.constexpr, NORM: tl.constexpr,
    EPILOGUE: tl.constexpr, N_HEADS: tl.constexpr, N_KV_HEADS: tl.constexpr, PAGE: tl.constexpr,
    CONSTANT: tl.constexpr, CHAINED: tl.constexpr,
    TILES: tl.constexpr, R: tl.constexpr, L: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr,
    XM: tl.constexpr,
):  # fmt: skip
    """Computes TILES · 16 · R outputs of XM rows.

    K: the inner width. C: numbers of a thread's load. L: loads of a part, PARTS: parts at a time.
    HALF: the distance of a pair's outputs: of gate and up, of a rotated pair, or 8.
    """
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    EACH: tl.constexpr = L * 4 * C
    CHUNK: tl.constexpr = PARTS * EACH
    V: tl.constexpr = C * BITS // 8 if BITS < 16 else C
    STEP: tl.constexpr = CHUNK * BITS // 8 if BITS < 16 else CHUNK
    MASKED: tl.constexpr = K % CHUNK != 0
    WHOLE: tl.constexpr = K <= CHUNK
    ZERO: tl.constexpr = 8.0 if BITS == 4 else 128.0
    BM: tl.constexpr = XM if XM > 8 else 8
    POWER: tl.constexpr = triton.next_power_of_2(K)
    first = tl.program_id(0) * (TILES * 8 * R)
    rows, offs_k = tl.program_id(1) * XM + tl.arange(0, XM), tl.arange(0, CHUNK)
    in_rows = rows < n_rows
    if CONSTANT:
        w = _load_weight(weight_ptr, first, 0, n_out, K, HALF, BITS, R, L, PARTS, V, MASKED)
        # A narrower norm's weight is less than a sector.
        if NORM != "" and POWER >= 16 and tl.program_id(0) == 0:
            prefetch_rows(norm_weight_ptr, tl.arange(0, 1), 1, K, POWER, CHAINED)
    follow(CHAINED)
    if not CONSTANT:
        w = _load_weight(weight_ptr, first, 0, n_out, K, HALF, BITS, R, L, PARTS, V, MASKED)
    of_x = row_offsets(rows, inner_x, stride_xb, stride_xl)
    of_update = row_offsets(rows, inner_update, stride_ub, stride_ul)
    mean, rstd = tl.zeros([XM], tl.float32), tl.full([XM], 1.0, tl.float32)
    if WHOLE:
        right = _right(
            x_ptr, update_ptr, sum_ptr, norm_weight_ptr, norm_bias_ptr, of_x, of_update, rows,
            in_rows, offs_k, mean, rstd, eps, dtype, K, UPDATE, UPDATE, NORM, True, BITS, L, PARTS,
            C,
        )  # fmt: skip
    elif NORM != "":
        mean, rstd = _statistics(
            x_ptr, update_ptr, of_x, of_update, in_rows, eps, dtype, K, UPDATE, NORM, XM, CHUNK
        )
    best = tl.full([BM], float("-inf"), tl.float32)
    best_id = tl.zeros([BM], tl.int32)
    of_y = tl.program_id(1) * XM + tl.arange(0, BM)
    in_y = of_y < n_rows

    for tile in tl.static_range(TILES):
        first_pair = first + tile * 8 * R
        outputs = _outputs(first_pair, n_out, HALF, R)
        acc = tl.zeros([PARTS, 16 * R, BM], tl.float32)
        x_sum = tl.zeros([BM], tl.float32)
        pair = first_pair + tl.arange(0, 8 * R)
        low = pair // HALF * (2 * HALF) + pair % HALF
        if EPILOGUE == "heads" or EPILOGUE == "rotated heads":
            place, cos, sin = angles(
                cos_ptr, sin_ptr, lengths_ptr, low, of_y, in_y, capacity, HALF,
                N_HEADS + N_KV_HEADS, EPILOGUE == "rotated heads",
            )  # fmt: skip
        for start in tl.static_range(0, K, CHUNK):
            operand = _operand(w, dtype, BITS, C)
            if start + CHUNK < K:
                w = _load_weight(
                    weight_ptr, first_pair, (start // CHUNK + 1) * STEP, n_out, K, HALF, BITS, R,
                    L, PARTS, V, MASKED,
                )  # fmt: skip
            elif tile + 1 < TILES:
                w = _load_weight(
                    weight_ptr, first_pair + 8 * R, 0, n_out, K, HALF, BITS, R, L, PARTS, V, MASKED
                )
            if not WHOLE:
                right = _right(
                    x_ptr, update_ptr, sum_ptr, norm_weight_ptr, norm_bias_ptr, of_x, of_update,
                    rows, in_rows, start + offs_k, mean, rstd, eps, dtype, K, UPDATE,
                    UPDATE and tile == 0, NORM, False, BITS, L, PARTS, C,
                )  # fmt: skip
            if ZEROS:
                of_parts = tl.sum(right.to(tl.float32), 1)
                x_sum += tl.sum(of_parts, 0)
            if GROUP == 0 or GROUP == K:
                acc = add_dot(operand, right, acc)
            else:
                # A part lies in one group of columns.
                group = (start + tl.arange(0, PARTS) * EACH) // GROUP
                of_group = (outputs * (K // GROUP))[None, :, None] + group[:, None, None]
                there = (group < K // GROUP)[:, None, None]
                scale = tl.load(scales_ptr + of_group, mask=there, other=0.0).to(tl.float32)
                some = add_dot(operand, right, tl.zeros([PARTS, 16 * R, BM], tl.float32))
                if ZEROS:
                    zero = tl.load(zeros_ptr + of_group, mask=there, other=0).to(tl.float32)
                    some -= (zero - ZERO) * of_parts[:, None, :]
                acc += some * scale
        y = tl.sum(acc, 0)
        if GROUP == K:
            if ZEROS:
                offset = tl.load(zeros_ptr + outputs).to(tl.float32) - ZERO
                y -= offset[:, None] * x_sum[None, :]
            y *= tl.load(scales_ptr + outputs).to(tl.float32)[:, None]
        if BIAS:
            y += tl.load(bias_ptr + outputs).to(tl.float32)[:, None]

        if EPILOGUE == "best":
            # The first of equal ones is the best, as in PyTorch. NaN counts as infinity.
            # Logits are rounded first, so that the choice is that of stored logits.
            y = cast(y, dtype).to(tl.float32)
            y = tl.where(y == y, y, float("inf"))
            largest = tl.max(y, 0)
            at = tl.min(tl.where(y == largest[None, :], outputs[:, None], 0x7FFFFFFF), 0)
            takes = (largest > best) | ((largest == best) & (at < best_id)) | (tile == 0)
            best, best_id = tl.where(takes, largest, best), tl.where(takes, at, best_id)
        else:
            # A pair's two outputs lie side by side in registers.
            y = tl.permute(tl.reshape(y, [R, 2, 8, BM]), (0, 2, 3, 1))
            one, two = tl.split(tl.reshape(y, [8 * R, BM, 2]))
            if EPILOGUE == "swiglu":
                to = y_ptr + of_y[None, :] * (n_out // 2) + pair[:, None]
                mask = (pair < n_out // 2)[:, None] & in_y[None, :]
                # Gate and up are rounded first, as two products in this dtype would be.
                gate, up = cast(one, dtype).to(tl.float32), cast(two, dtype).to(tl.float32)
                tl.store(to, cast(silu(gate, dtype) * up, dtype), mask=mask)
            elif EPILOGUE == "heads" or EPILOGUE == "rotated heads":
                store_heads(
                    y_ptr, keys_ptr, values_ptr, table_ptr, one, two, place, cos, sin, low, n_out,
                    of_y, in_y, stride_cb, stride_ch, stride_ct, capacity, table_width, n_pages,
                    dtype, HALF, N_HEADS, N_KV_HEADS, EPILOGUE == "rotated heads", PAGE,
                )  # fmt: skip
            else:
                to = y_ptr + of_y[None, :] * n_out + low[:, None]
                if EPILOGUE == "gelu":
                    one, two = _gelu(one), _gelu(two)
                elif EPILOGUE == "silu":
                    one, two = silu(one, dtype), silu(two, dtype)
                mask = (low < n_out)[:, None] & in_y[None, :]
                tl.store(to, cast(one, dtype), mask=mask)
                mask = (low + HALF < n_out)[:, None] & in_y[None, :]
                tl.store(to + HALF, cast(two, dtype), mask=mask)
    if EPILOGUE == "best":
        to = tl.program_id(0) * n_rows + of_y
        tl.store(best_ptr + to, best, mask=in_y)
        tl.store(best_id_ptr + to, best_id, mask=in_y)


@dataclass(frozen=True)
class Product:
    """Describes a product for `launch_of`.

    n_rows: rows of x, up to 16.
    n_in, n_out: sizes of the weight.
    bits: 16, or of a code. group: columns that share a scale, or 0 without scales.
    half: how far apart a pair's outputs are: see `streamed_kernel`.
    """

    n_rows: int
    n_in: int
    n_out: int
    bits: int = 16
    group: int = 0
    zeros: bool = False
    bias: bool = False
    update: bool = False
    norm: str = ""
    epilogue: str = ""
    half: int = 8
    n_heads: int = 1
    n_kv_heads: int = 1
    page: int = 0

    @property
    def n_pairs(self) -> int:
        """Returns the number of pairs of outputs."""
        if self.half == 8:
            return triton.cdiv(self.n_out, 16) * 8
        return self.n_out // 2


# A weight of at most so many bytes takes no longer than a launch: see `config_of`.
SMALL = 4 * 2**20
MOST_WIDTH = 32_768  # a program's code grows with the parts in which it takes the inner dimension


def config_of(product: Product, target: Target) -> Config:
    """Returns how a product is launched: each program has many bytes in flight."""
    rows = triton.next_power_of_2(product.n_rows)
    if rows <= 2:
        return Config(rows, 1, 1, 2048, 4 if product.n_in <= 2048 else 8)
    # Every program reads and normalizes all its rows, which takes longer than one tile.
    tiles = min(8, triton.cdiv(triton.cdiv(product.n_pairs, 8), max(1, target.multiprocessors)))
    is_small = product.n_out * product.n_in * product.bits // 8 <= SMALL
    if tiles == 1 and is_small and product.n_in <= 2048:  # rows 9 to 16 go to a second program
        return Config(min(8, rows), 1, 1, 2048, 4)
    # Where a row is loaded in parts, 16 rows or a norm leave fewer registers for them.
    parts = (1 + (rows > 8)) * (1 + bool(product.norm)) if product.n_in > 2048 else 1
    return Config(rows, 1, tiles, 2048 // parts, 8)


def launch_of(
    product: Product, config: Config, target: Target, constant: bool
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Returns the grid of a launch, and the kernel's constants.

    Args:
        product, config, target: what is computed, how, and where.
        constant: whether no earlier launch of the stream may write the weight.
    """
    per_load = LOAD * 8 // product.bits  # numbers
    grouped = 0 < product.group < product.n_in
    if grouped:
        per_load = min(per_load, product.group // 4)
        loads = product.group // (4 * per_load)
        groups = triton.next_power_of_2(triton.cdiv(product.n_in, product.group))
        parts = min(max(config.num_warps, config.columns // product.group), groups)
    else:
        parts = config.num_warps
        needed = triton.next_power_of_2(triton.cdiv(product.n_in, 4 * per_load * parts))
        loads = max(1, min(config.columns // (4 * per_load * parts), needed))
    programs = triton.cdiv(product.n_pairs, 8 * config.blocks * config.tiles)
    return (programs, triton.cdiv(product.n_rows, config.rows)), {
        "K": product.n_in, "HALF": product.half, "BITS": product.bits, "GROUP": product.group,
        "ZEROS": product.zeros, "BIAS": product.bias, "UPDATE": product.update,
        "NORM": product.norm, "EPILOGUE": product.epilogue, "N_HEADS": product.n_heads,
        "N_KV_HEADS": product.n_kv_heads, "PAGE": product.page, "CONSTANT": constant,
        "TILES": config.tiles, "R": config.blocks, "L": loads, "PARTS": parts, "C": per_load,
        "XM": config.rows, "num_warps": config.num_warps,
        "num_stages": 1, **chained(target),
    }  # fmt: skip


def bound(
    product: Product,
    config: Config,
    target: Target,
    of_x: RowLayout,
    of_update: RowLayout | None = None,
) -> Callable[..., None]:
    """Returns the launch of a product with RMSNorm or none, and with SiLU or none.

    Call it with x, weight and y, and with the tensors that `product` names. `total` is x + update.
    The first part of a weight that `is_ready` is read before the wait.
    """
    if product.norm not in ("", "rms") or product.epilogue not in ("", "silu"):
        raise ValueError(f"{product}: it must have norm '' or 'rms', and epilogue '' or 'silu'")
    of_both = *of_x.strides, *(of_update or of_x).strides
    sizes = *of_both, product.n_rows, of_x.n_inner, (of_update or of_x).n_inner, product.n_out
    bounds = []
    for constant in (False, True):
        grid, constants = launch_of(product, config, target, constant)
        bounds.append(Bound(streamed_kernel, grid, *sizes, 0, 0, 0, 0, 0, 0, **constants))

    def launch(
        x: Tensor,
        weight: Tensor,
        y: Tensor,
        *,
        update: Tensor | None = None,
        total: Tensor | None = None,
        norm_weight: Tensor | None = None,
        scales: Tensor | None = None,
        zeros: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1.0,
    ) -> None:
        named = update, norm_weight, None, weight, scales, zeros, bias, total
        tensors = (x if one is None else one for one in named)
        bounds[is_ready(weight)](x, *tensors, y, y, y, x, x, x, x, x, x, eps)

    return launch
