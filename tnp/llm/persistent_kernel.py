"""Computes a decoding step on Hopper in one launch: all layers, and the largest logit.

A program keeps one multiprocessor. A warp of its own streams the weights of all layers, one matrix
after another, through a ring in shared memory by TMA. It waits for nothing but free places: weights
are constant. Eight warps multiply a few rows by what arrives. Between two products all programs
meet at a counter in memory, and read what others wrote. Meanwhile the ring fills, so that memory is
not idle. (One launch for a whole model: Spector et al., "Look Ma, No Bubbles!", 2025.)

    qkv        sum, norm, product; to a buffer in float32
    attention  norm of heads, rotation, the new key and value to the cache; parts of a cache, which
               the last program to finish adds up
    out        product
    up         sum, norm, product, SwiGLU or GELU
    down       product
    head       sum, norm, product; the largest logits of each program

A tile is 16 outputs of all rows, and a chunk is eight parts of its inner width, one a warp. The
weight is the left operand of m16n8k16. Codes are multiplied as integers: see
`tnp.ops._shared.streamed`.
"""

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from tnp.ops._shared.hopper_primitives import barriers, structure
from tnp.ops._shared.primitives import cast
from tnp.ops._shared.rows import load_rows
from tnp.ops._shared.streamed import (
    INT4_BFLOAT16,
    INT4_FLOAT16,
    INT8_BFLOAT16,
    INT8_FLOAT16,
    gelu,
)
from tnp.ops._shared.triton_matmul import silu

WARPS = gl.constexpr(8)
PARTS = gl.constexpr(8)  # of a chunk: each is a warp's
COLUMNS = gl.constexpr(8)  # of the right operand, in the tensor core's instruction
NEXT = gl.constexpr(8)  # neighbours of a row that a thread multiplies together (Triton's kWidth)
KEYS = gl.constexpr(128)  # of a part of a cache
MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, MMA, 8))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, MMA, 8))
# A thread adds up all parts of a pair of outputs, [PARTS, 2, 8, B].
BY_PART = gl.constexpr(
    gl.BlockedLayout([8, 2, 1, 1], [1, 1, 8, 4], [1, 1, 1, 8], [3, 2, 1, 0])
)
RESULT = gl.constexpr(gl.SliceLayout(0, BY_PART))
OF_Y = gl.constexpr(gl.SliceLayout(0, gl.SliceLayout(1, RESULT)))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
IN_ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 1, 4, 2, 0]))
IN_SUMS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


@structure
class Ring:
    """Holds the places through which weights pass, and their barriers."""

    weight: gl.shared_memory_descriptor  # [slots · 2, PARTS, 8, 4 V]
    boxes: gl.shared_memory_descriptor  # of scales, [slots · 2, 8, PARTS]
    scales: gl.shared_memory_descriptor  # the same as [slots, 16, PARTS]
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    SLOTS: gl.constexpr
    BITS: gl.constexpr
    GROUPED: gl.constexpr

    @gluon.jit
    def left(self, slot, dtype: gl.constexpr):
        """Returns a slot's numbers as the left operand [PARTS, 16, numbers of a part]."""
        one, two = self.weight.index(2 * slot), self.weight.index(2 * slot + 1)
        S: gl.constexpr = one.shape
        W: gl.constexpr = gl.BlockedLayout([1, 1, S[2] // 4], [1, 8, 4], [WARPS, 1, 1], [2, 1, 0])
        w = gl.join(
            _numbers(one.load(W), dtype, self.BITS), _numbers(two.load(W), dtype, self.BITS)
        )
        N: gl.constexpr = w.shape
        w = gl.reshape(gl.permute(w, (0, 3, 1, 2)), [PARTS, 16, 4, N[2] // (4 * NEXT), NEXT])
        # The instruction's order: a thread has NEXT neighbours, then its next ones.
        w = gl.reshape(gl.permute(w, (0, 1, 3, 2, 4)), [PARTS, 16, N[2]])
        return gl.convert_layout(w, LEFT)

    @gluon.jit
    def scale(self, slot):
        """Returns a slot's scales in float32, [PARTS, 16, 1]."""
        scales = self.scales.index(slot).permute((1, 0)).load(gl.SliceLayout(2, MMA))
        return scales.to(gl.float32)[:, :, None]


@gluon.jit
def _numbers(w, dtype: gl.constexpr, BITS: gl.constexpr):
    """Returns loaded weights [PARTS, 8, 4 V] as numbers [PARTS, 8, 4 C]."""
    if BITS == 8:
        if dtype == gl.bfloat16:
            return gl.inline_asm_elementwise(
                INT8_BFLOAT16, "=r,=r,r", [w], dtype=gl.bfloat16, is_pure=True, pack=4
            )
        else:
            return gl.inline_asm_elementwise(
                INT8_FLOAT16, "=r,=r,r", [w], dtype=gl.float16, is_pure=True, pack=4
            )
    elif BITS == 4:
        S: gl.constexpr = w.shape
        if dtype == gl.bfloat16:
            low, high = gl.inline_asm_elementwise(
                INT4_BFLOAT16, "=r,=r,=r,=r,r", [w], dtype=(gl.bfloat16, gl.bfloat16),
                is_pure=True, pack=4,
            )  # fmt: skip
        else:
            low, high = gl.inline_asm_elementwise(
                INT4_FLOAT16, "=r,=r,=r,=r,r", [w], dtype=(gl.float16, gl.float16), is_pure=True,
                pack=4,
            )  # fmt: skip
        low = gl.reshape(low, [S[0], S[1], S[2] // 4, 4])
        high = gl.reshape(high, [S[0], S[1], S[2] // 4, 4])
        return gl.reshape(gl.permute(gl.join(low, high), (0, 1, 2, 4, 3)), [S[0], S[1], S[2] * 2])
    else:
        return w


@gluon.jit
def _meet(arrived_ptr, meeting, n_meetings):
    """Waits until all programs have arrived: what they wrote before can then be read.

    Each meeting has a counter. It is zero again after the next meeting.
    """
    tl.debug_barrier()  # all of this program's results are written before it arrives
    gl.atomic_add(arrived_ptr + meeting, 1, sem="release", scope="gpu")
    seen = 0
    while seen < gl.num_programs(0):
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [(arrived_ptr + meeting).to(gl.int64)],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    if gl.program_id(0) == 0:
        before = gl.where(meeting == 0, n_meetings - 1, meeting - 1)
        gl.store(arrived_ptr + before, 0)
    return meeting + 1


@gluon.jit
def _stream(
    ring, weight_desc, scales_desc, slot, phase, first_row, n_out, CHUNKS: gl.constexpr,
    HALF: gl.constexpr,
):  # fmt: skip
    """Streams a program's tiles of one matrix through the ring."""
    BYTES: gl.constexpr = weight_desc.block_type.nbytes
    MORE: gl.constexpr = scales_desc.block_type.nbytes if ring.GROUPED else 0
    n_tiles = gl.cdiv(n_out, 16)
    for tile in range(gl.program_id(0), n_tiles, gl.num_programs(0)):
        pair = tile * 8
        row = first_row + pair // HALF * (2 * HALF) + pair % HALF
        for chunk in range(CHUNKS):
            mbarrier.wait(ring.empty.index(slot), phase)
            full = ring.full.index(slot)
            mbarrier.expect(full, 2 * (BYTES + MORE))
            for i in gl.static_range(2):
                tma.async_copy_global_to_shared(
                    weight_desc, [chunk * PARTS, row + i * HALF, 0], full,
                    ring.weight.index(2 * slot + i),
                )  # fmt: skip
                if ring.GROUPED:
                    tma.async_copy_global_to_shared(
                        scales_desc, [row + i * HALF, chunk * PARTS], full,
                        ring.boxes.index(2 * slot + i),
                    )  # fmt: skip
            slot += 1
            if slot == ring.SLOTS:
                slot, phase = 0, phase ^ 1
    return slot, phase


@gluon.jit
def _produce(
    ring, qkv_desc, out_desc, up_desc, down_desc, head_desc, qkv_scales, out_scales, up_scales,
    down_scales, head_scales, n_layers, vocab, QKV: gl.constexpr, WIDTH: gl.constexpr,
    HEADS: gl.constexpr, UP: gl.constexpr, INNER: gl.constexpr, GATED: gl.constexpr,
    CHUNK: gl.constexpr,
):  # fmt: skip
    """Streams all matrices in the order of their products, in a warp of its own."""
    slot, phase = 0, 1
    HALF: gl.constexpr = INNER if GATED else 8
    OF_WIDTH: gl.constexpr = (WIDTH + CHUNK - 1) // CHUNK
    OF_HEADS: gl.constexpr = (HEADS + CHUNK - 1) // CHUNK
    OF_INNER: gl.constexpr = (INNER + CHUNK - 1) // CHUNK
    for layer in range(n_layers):
        slot, phase = _stream(
            ring, qkv_desc, qkv_scales, slot, phase, layer * QKV, QKV, OF_WIDTH, 8
        )
        slot, phase = _stream(
            ring, out_desc, out_scales, slot, phase, layer * WIDTH, WIDTH, OF_HEADS, 8
        )
        slot, phase = _stream(
            ring, up_desc, up_scales, slot, phase, layer * UP, UP, OF_WIDTH, HALF
        )
        slot, phase = _stream(
            ring, down_desc, down_scales, slot, phase, layer * WIDTH, WIDTH, OF_INNER, 8
        )
    _stream(ring, head_desc, head_scales, slot, phase, 0, vocab, OF_WIDTH, 8)


@gluon.constexpr_function
def _of_rows(n_rows):
    """Returns the layout of rows: eight at a time, each by a warp, or one by all."""
    at_once = 8 if n_rows >= 8 else 1
    return gl.BlockedLayout([1, 8], [1, 32], [at_once, 8 // at_once], [1, 0])


@gluon.constexpr_function
def _power(n):
    """Returns the least power of two from n on."""
    return 1 << (n - 1).bit_length()


@gluon.jit
def _put(
    rows, x_ptr, update_ptr, sum_ptr, norm_ptr, norm_bias_ptr, has_update, n_rows, eps,
    dtype: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr, UPDATE: gl.constexpr,
    NORM: gl.constexpr, XM: gl.constexpr,
):  # fmt: skip
    """Puts normalized rows in shared memory. Returns [chunks, PARTS, 4, C / 8, 8, XM].

    The first program writes x + update. Rows without a norm pass in pieces.
    """
    ROWS: gl.constexpr = 8 if XM >= 8 else 1
    X: gl.constexpr = _of_rows(XM)
    WHOLE: gl.constexpr = _power(K)
    MOST: gl.constexpr = WHOLE if NORM != "" else (8192 if XM == 1 else 2048)
    PIECE: gl.constexpr = max(CHUNK, min(WHOLE, MOST))
    PIECES: gl.constexpr = (K + PIECE - 1) // PIECE
    C8: gl.constexpr = CHUNK // 256  # eights of a thread's numbers in a part
    pieces = rows._reinterpret(dtype, [PIECES, PIECE // CHUNK * PARTS, 4, C8, 8, XM], IN_ROWS)
    for piece in gl.static_range(PIECES):
        at = piece * PIECE + gl.arange(0, PIECE, gl.SliceLayout(0, X))
        if NORM != "":
            scale = load_rows(norm_ptr, at, at < K)[None, :]
        if NORM == "layer":
            shift = load_rows(norm_bias_ptr, at, at < K)[None, :]
        for first in gl.static_range(0, XM, ROWS):
            row = first + gl.arange(0, ROWS, gl.SliceLayout(1, X))
            mask = (row < n_rows)[:, None] & (at < K)[None, :]
            of = row[:, None] * K + at[None, :]
            # Others wrote these rows in this launch, so they are read past L1.
            x = gl.load(x_ptr + of, mask=mask, other=0.0, cache_modifier=".cg").to(gl.float32)
            if UPDATE:
                update = gl.load(
                    update_ptr + of, mask=mask & has_update, other=0.0, cache_modifier=".cg"
                )
                x = cast(x + update.to(gl.float32), dtype).to(gl.float32)
                gl.store(sum_ptr + of, cast(x, dtype), mask=mask & (gl.program_id(0) == 0))
            if NORM == "layer":
                mean = gl.sum(x, 1) / K
                x = gl.where((at < K)[None, :], x - mean[:, None], 0.0)
            if NORM != "":
                x = x * (1.0 / gl.sqrt_rn(gl.sum(x * x, 1) / K + eps))[:, None] * scale
            if NORM == "layer":
                x += shift
            x = gl.reshape(cast(x, dtype), [ROWS, PIECE // CHUNK * PARTS, 4, C8, 8])
            some = pieces.index(piece).slice(first, ROWS, dim=4)
            some.store(gl.permute(x, (1, 2, 3, 4, 0)))
    return rows._reinterpret(
        dtype, [PIECES * PIECE // CHUNK, PARTS, 4, C8, 8, XM], IN_ROWS
    )


@gluon.jit
def _right(rows):
    """Returns a chunk of the rows [PARTS, 4, C / 8, 8, XM] as the right operand."""
    S: gl.constexpr = rows.shape
    X: gl.constexpr = gl.BlockedLayout(
        [1, 1, S[2], 8, 1], [1, 4, 1, 1, 8], [WARPS, 1, 1, 1, 1], [3, 1, 4, 2, 0]
    )
    BM: gl.constexpr = S[4] if S[4] > COLUMNS else COLUMNS
    # One row fills all columns of the instruction.
    x, _ = gl.broadcast(rows.load(X), gl.zeros([1, 1, 1, 1, BM], rows.dtype, X))
    x = gl.reshape(gl.permute(x, (0, 2, 1, 3, 4)), [PARTS, 32 * S[2], BM])
    return gl.convert_layout(x, RIGHT)


@gluon.jit
def _tile(ring, chunks, sums, slot, phase, dtype: gl.constexpr, CHUNKS: gl.constexpr):
    """Returns the product of a tile, [2, 8, XM] in layout RESULT."""
    S: gl.constexpr = chunks.shape
    XM: gl.constexpr = S[5]
    BM: gl.constexpr = XM if XM > COLUMNS else COLUMNS
    acc = gl.zeros([PARTS, 16, BM], gl.float32, MMA)
    for now in range(CHUNKS):
        mbarrier.wait(ring.full.index(slot), phase)
        left = ring.left(slot, dtype)
        if ring.GROUPED:
            scale = ring.scale(slot)
            mbarrier.arrive(ring.empty.index(slot), count=1)
            some = mma_v2(
                left, _right(chunks.index(now)), gl.zeros([PARTS, 16, BM], gl.float32, MMA)
            )
            acc += some * scale
        else:
            mbarrier.arrive(ring.empty.index(slot), count=1)
            acc = mma_v2(left, _right(chunks.index(now)), acc)
        slot += 1
        if slot == ring.SLOTS:
            slot, phase = 0, phase ^ 1
    sums.store(acc)
    by_part = sums.reshape([PARTS, 2, 8, BM]).slice(0, XM, dim=3).load(BY_PART)
    return gl.sum(by_part, 0), slot, phase


@gluon.jit
def _product(
    ring, chunks, sums, slot, phase, scales_ptr, bias_ptr, y_ptr, n_rows, n_out,
    dtype: gl.constexpr, K: gl.constexpr, HALF: gl.constexpr, CHUNK: gl.constexpr,
    SCALED: gl.constexpr, BIAS: gl.constexpr, EPILOGUE: gl.constexpr,
):  # fmt: skip
    """Multiplies a program's tiles of one matrix, and writes the results [n_rows, n_out].

    SCALED: a row of the weight has one scale.
    """
    S: gl.constexpr = chunks.shape
    XM: gl.constexpr = S[5]
    half, eight = gl.arange(0, 2, _only(0)), gl.arange(0, 8, _only(1))
    of_y = gl.arange(0, XM, OF_Y)
    for tile in range(gl.program_id(0), gl.cdiv(n_out, 16), gl.num_programs(0)):
        pair = tile * 8 + eight
        output = pair // HALF * (2 * HALF) + pair % HALF
        output = half[:, None, None] * HALF + output[None, :, None]
        if SCALED:
            scale = gl.load(scales_ptr + output).to(gl.float32)
        if BIAS:
            bias = gl.load(bias_ptr + output).to(gl.float32)
        y, slot, phase = _tile(ring, chunks, sums, slot, phase, dtype, (K + CHUNK - 1) // CHUNK)
        if SCALED:
            y *= scale
        if BIAS:
            y += bias
        if EPILOGUE == "gelu":
            y = gelu(y)
        if EPILOGUE == "swiglu":
            gate, up = gl.split(gl.permute(y, (1, 2, 0)))
            # Gate and up are rounded first, as two products in this dtype would be.
            gate, up = cast(gate, dtype).to(gl.float32), cast(up, dtype).to(gl.float32)
            y = silu(gate, dtype) * up
            LAYOUT: gl.constexpr = y.type.layout
            row = gl.arange(0, XM, gl.SliceLayout(0, LAYOUT))[None, :]
            column = tile * 8 + gl.arange(0, 8, gl.SliceLayout(1, LAYOUT))[:, None]
            gl.store(y_ptr + row * (n_out // 2) + column, cast(y, dtype), mask=row < n_rows)
        else:
            row = of_y[None, None, :]
            y = cast(y, y_ptr.dtype.element_ty)
            gl.store(y_ptr + row * n_out + output, y, mask=(row < n_rows) & (output < n_out))
    return slot, phase


@gluon.constexpr_function
def _only(axis):
    """Returns the layout of axis 0 (halves) or 1 (eights) of a tile's results."""
    layout = RESULT.value if hasattr(RESULT, "value") else RESULT
    for other in (2, 1, 0):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _best(
    ring, chunks, sums, slot, phase, scales_ptr, best_ptr, best_id_ptr, n_rows, n_out,
    dtype: gl.constexpr, K: gl.constexpr, CHUNK: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """Finds the largest logits of a program's tiles, the first of equal ones."""
    S: gl.constexpr = chunks.shape
    XM: gl.constexpr = S[5]
    half, eight = gl.arange(0, 2, _only(0)), gl.arange(0, 8, _only(1))
    best = gl.full([XM], float("-inf"), gl.float32, OF_Y)
    best_id = gl.full([XM], 0x7FFFFFFF, gl.int32, OF_Y)
    for tile in range(gl.program_id(0), gl.cdiv(n_out, 16), gl.num_programs(0)):
        output = half[:, None, None] * 8 + (tile * 16 + eight)[None, :, None]
        there = output < n_out
        if SCALED:
            scale = gl.load(scales_ptr + output, mask=there, other=0.0).to(gl.float32)
        y, slot, phase = _tile(ring, chunks, sums, slot, phase, dtype, (K + CHUNK - 1) // CHUNK)
        if SCALED:
            y *= scale
        # Logits are rounded first, so that the choice is that of stored logits. NaN counts as
        # infinity.
        y = cast(y, dtype).to(gl.float32)
        y = gl.where(there, gl.where(y == y, y, float("inf")), float("-inf"))
        largest = gl.convert_layout(gl.max(gl.max(y, 0), 0), OF_Y)
        at = gl.where((y == largest[None, None, :]) & there, output, 0x7FFFFFFF)
        at = gl.convert_layout(gl.min(gl.min(at, 0), 0), OF_Y)
        takes = (largest > best) | ((largest == best) & (at < best_id))
        best, best_id = gl.where(takes, largest, best), gl.where(takes, at, best_id)
    of_y = gl.arange(0, XM, OF_Y)
    to = gl.program_id(0) * n_rows + of_y
    gl.store(best_ptr + to, best, mask=of_y < n_rows)
    gl.store(best_id_ptr + to, best_id, mask=of_y < n_rows)


@gluon.jit
def _head(ptr, norm_ptr, cos, sin, own, other, sign, mask, eps, NORM: gl.constexpr, D: gl.constexpr,
          AXIS: gl.constexpr, ROTATES: gl.constexpr):  # fmt: skip
    """Returns new heads in float32, normalized and rotated.

    `own` and `other` are offsets of elements and of those that they rotate with; of a norm's weight
    too, within a head.
    """
    x = gl.load(ptr + own, mask=mask, other=0.0, cache_modifier=".cg")
    if NORM or ROTATES:
        y = gl.load(ptr + other, mask=mask, other=0.0, cache_modifier=".cg")
    if NORM:
        rstd = 1.0 / gl.sqrt_rn(gl.sum(x * x, AXIS) / D + eps)
        if AXIS == 1:
            rstd = rstd[:, None]
        x = x * rstd * load_rows(norm_ptr, own % D, mask)
        y = y * rstd * load_rows(norm_ptr, other % D, mask)
    if ROTATES:
        x = x * cos + sign * y * sin
    return x


@gluon.jit
def _add_parts(
    parts_ptr, o_ptr, first, of_split, of_o, n_splits, dtype: gl.constexpr, G: gl.constexpr,
    D: gl.constexpr, SPLITS: gl.constexpr, L3: gl.constexpr,
):  # fmt: skip
    """Adds up the parts of G heads, in the order of keys, and writes their results."""
    EACH: gl.constexpr = D + 2
    split = gl.arange(0, SPLITS, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    g = gl.arange(0, G, gl.SliceLayout(1, gl.SliceLayout(2, L3)))
    d = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, L3)))
    of = first + (g * EACH)[:, None] + (split * of_split)[None, :]
    there = (split < n_splits)[None, :] & (of >= 0)
    m = gl.load(parts_ptr + of + D, mask=there, other=float("-inf"), cache_modifier=".cg")
    l = gl.load(parts_ptr + of + D + 1, mask=there, other=0.0, cache_modifier=".cg")  # noqa: E741
    acc = gl.load(
        parts_ptr + gl.expand_dims(of, 2) + gl.expand_dims(d[None, :], 1),
        mask=gl.expand_dims(there, 2), other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    largest = gl.max(m, 1)
    weight = gl.exp2(m - gl.where(largest == float("-inf"), 0.0, largest)[:, None])
    total = gl.convert_layout(gl.sum(l * weight, 1), gl.SliceLayout(1, gl.SliceLayout(1, L3)))
    o = gl.sum(acc * gl.expand_dims(weight, 2), 1) / total[:, None]
    row = gl.arange(0, G, gl.SliceLayout(1, gl.SliceLayout(1, L3)))
    gl.store(o_ptr + of_o + (row * D)[:, None] + d[None, :], cast(o, dtype))


@gluon.constexpr_function
def _by_key(G, D):
    """Returns the layout of [G, keys, D]: eight numbers of a head are a thread's."""
    return gl.BlockedLayout([G, 1, 8], [1, 256 // D, D // 8], [1, 8, 1], [2, 1, 0])


@gluon.jit
def _angles(cos_ptr, sin_ptr, place, d, capacity, D: gl.constexpr):
    """Returns cosine and sine of a position for elements d of a head."""
    at = place.to(gl.int64) * (D // 2) + d % (D // 2)
    mask = (d >= 0) & (place >= 0) & (place < capacity)
    return gl.load(cos_ptr + at, mask=mask, other=1.0), gl.load(sin_ptr + at, mask=mask, other=0.0)


@gluon.jit
def _part(
    k, v, new_ptr, keys_ptr, values_ptr, o_ptr, parts_ptr, counts_ptr, cos_ptr, sin_ptr, q_norm_ptr,
    k_norm_ptr, b, h, split, length, of_head, n_rows, capacity, n_splits, scale_log2, eps,
    dtype: gl.constexpr, N_HEADS: gl.constexpr, N_KV_HEADS: gl.constexpr, D: gl.constexpr,
    SPLITS: gl.constexpr, NORM: gl.constexpr, ROTATES: gl.constexpr,
):  # fmt: skip
    """Computes one part, of old keys k and values v [KEYS, D] and the new ones."""
    G: gl.constexpr = N_HEADS // N_KV_HEADS
    L3: gl.constexpr = _by_key(G, D)
    OF_KV: gl.constexpr = gl.SliceLayout(0, L3)  # [keys, D]
    OF_Q: gl.constexpr = gl.SliceLayout(1, L3)  # [G, D]
    EACH: gl.constexpr = D + 2
    place = length - 1
    d = gl.arange(0, D, gl.SliceLayout(0, OF_KV))
    d_q = gl.arange(0, D, gl.SliceLayout(0, OF_Q))
    g = gl.arange(0, G, gl.SliceLayout(1, OF_Q))
    cos, sin, cos_q, sin_q = 1.0, 0.0, 1.0, 0.0
    if ROTATES:
        cos, sin = _angles(cos_ptr, sin_ptr, place, d, capacity, D)
        one, two = _angles(cos_ptr, sin_ptr, place, d_q, capacity, D)
        cos_q, sin_q = one[None, :], two[None, :]
    of_k = (N_HEADS + h) * D
    new_k = _head(
        new_ptr, k_norm_ptr, cos, sin, of_k + d, of_k + (d + D // 2) % D,
        gl.where(d < D // 2, -1.0, 1.0), d >= 0, eps, NORM, D, 0, ROTATES,
    )  # fmt: skip
    new_k = cast(new_k, dtype)
    new_v = gl.load(new_ptr + of_k + N_KV_HEADS * D + d, cache_modifier=".cg")
    new_v = cast(new_v, dtype)
    of_q = (h * G + g)[:, None] * D
    q = _head(
        new_ptr, q_norm_ptr, cos_q, sin_q, of_q + d_q[None, :],
        of_q + ((d_q + D // 2) % D)[None, :], gl.where(d_q < D // 2, -1.0, 1.0)[None, :],
        (g >= 0)[:, None] & (d_q >= 0)[None, :], eps, NORM, D, 1, ROTATES,
    )  # fmt: skip
    q = cast(q, dtype).to(gl.float32) * scale_log2
    key = split * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, OF_KV))
    newest = ((key == place) & (key < capacity))[:, None]
    all_k = gl.where(newest, new_k[None, :], k).to(gl.float32)
    all_v = gl.where(newest, new_v[None, :], v).to(gl.float32)
    writes = (split == place // KEYS) & (place >= 0) & (place < capacity)
    gl.store(keys_ptr + of_head + place * D + d, new_k, mask=(d >= 0) & writes)
    gl.store(values_ptr + of_head + place * D + d, new_v, mask=(d >= 0) & writes)
    s = gl.sum(gl.expand_dims(q, 1) * gl.expand_dims(all_k, 0), 2)
    seen = split * KEYS + gl.arange(0, KEYS, gl.SliceLayout(0, gl.SliceLayout(2, L3)))
    s = gl.where((seen < length)[None, :], s, float("-inf"))
    m = gl.max(s, 1)
    p = gl.exp2(s - gl.where(m == float("-inf"), 0.0, m)[:, None])
    wrong = (length < 1) | (length > capacity)
    l = gl.where(wrong, float("nan"), gl.sum(p, 1))  # noqa: E741
    acc = gl.sum(gl.expand_dims(p, 2) * gl.expand_dims(all_v, 0), 1)
    own = parts_ptr + ((split * n_rows + b) * N_HEADS + h * G + g) * EACH
    gl.store(own[:, None] + d_q[None, :], acc)
    gl.store(own + D, gl.convert_layout(m, gl.SliceLayout(1, OF_Q)))
    gl.store(own + D + 1, gl.convert_layout(l, gl.SliceLayout(1, OF_Q)))
    tl.debug_barrier()  # all of this program's part is written before it counts
    count = counts_ptr + b * N_KV_HEADS + h
    if gl.atomic_add(count, 1) == n_splits - 1:
        _add_parts(
            parts_ptr, o_ptr, (b * N_HEADS + h * G) * EACH, n_rows * N_HEADS * EACH,
            b * (N_HEADS * D) + h * G * D, n_splits, dtype, G, D, SPLITS, L3,
        )  # fmt: skip
        gl.store(count, 0)


@gluon.jit
def _attend(
    arrived_ptr, meeting, n_meetings, qkv_ptr, keys_ptr, values_ptr, o_ptr, parts_ptr, counts_ptr,
    lengths_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, n_rows, capacity, n_splits, scale_log2,
    eps, dtype: gl.constexpr, N_HEADS: gl.constexpr, N_KV_HEADS: gl.constexpr, D: gl.constexpr,
    SPLITS: gl.constexpr, NORM: gl.constexpr, ROTATES: gl.constexpr,
):  # fmt: skip
    """Computes attention of the new tokens, and writes their keys and values to the cache.

    A task has KEYS keys of a kv head, and all heads of its group. Old keys of the first task are
    loaded before the meeting. The last program to finish a kv head's tasks adds up their parts.
    """
    OF_KV: gl.constexpr = gl.SliceLayout(0, _by_key(N_HEADS // N_KV_HEADS, D))
    d = gl.arange(0, D, gl.SliceLayout(0, OF_KV))
    at = gl.arange(0, KEYS, gl.SliceLayout(1, OF_KV))
    n_tasks = n_rows * N_KV_HEADS * n_splits
    n_turns = gl.cdiv(n_tasks, gl.num_programs(0))
    for turn in range(n_turns):
        task = gl.program_id(0) + turn * gl.num_programs(0)
        b = gl.minimum(task // (N_KV_HEADS * n_splits), n_rows - 1)
        h, split = task // n_splits % N_KV_HEADS, task % n_splits
        # No program of this launch writes lengths.
        length = gl.load(lengths_ptr + b)
        key = split * KEYS + at
        of_head = (b * N_KV_HEADS + h).to(gl.int64) * capacity * D
        old = ((task < n_tasks) & (key < length - 1) & (key < capacity))[:, None]
        of = of_head + key[:, None] * D + d[None, :]
        k = gl.load(keys_ptr + of, mask=old, other=0.0)
        v = gl.load(values_ptr + of, mask=old, other=0.0)
        if turn == 0:
            _meet(arrived_ptr, meeting, n_meetings)
        if task < n_tasks:
            _part(
                k, v, qkv_ptr + b * ((N_HEADS + 2 * N_KV_HEADS) * D), keys_ptr, values_ptr, o_ptr,
                parts_ptr, counts_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, b, h, split,
                length, of_head, n_rows, capacity, n_splits, scale_log2, eps, dtype, N_HEADS,
                N_KV_HEADS, D, SPLITS, NORM, ROTATES,
            )  # fmt: skip
    return meeting + 1


@gluon.jit
def _consume(
    ring, rows, sums, x_ptr, sum_ptr, update_ptr, delta_ptr, qkv_ptr, o_ptr, h_ptr, norms_ptr,
    norm_biases_ptr, q_norm_ptr, k_norm_ptr, qkv_bias_ptr, out_bias_ptr, up_bias_ptr,
    down_bias_ptr, qkv_scales_ptr, out_scales_ptr, up_scales_ptr, down_scales_ptr, head_scales_ptr,
    cos_ptr, sin_ptr, lengths_ptr, keys_ptr, values_ptr, parts_ptr, counts_ptr, arrived_ptr,
    best_ptr, best_id_ptr, n_layers, n_rows, capacity, n_splits, of_layer, vocab, scale_log2, eps,
    dtype: gl.constexpr, WIDTH: gl.constexpr, INNER: gl.constexpr, N_HEADS: gl.constexpr,
    N_KV_HEADS: gl.constexpr, D: gl.constexpr, NORM: gl.constexpr, HEAD_NORM: gl.constexpr,
    ROTATES: gl.constexpr, GATED: gl.constexpr, BIAS: gl.constexpr, SCALED: gl.constexpr,
    CHUNK: gl.constexpr, SPLITS: gl.constexpr, XM: gl.constexpr,
):  # fmt: skip
    """Computes all layers from what the ring brings."""
    HEADS: gl.constexpr = N_HEADS * D
    QKV: gl.constexpr = (N_HEADS + 2 * N_KV_HEADS) * D
    UP: gl.constexpr = 2 * INNER if GATED else INNER
    ACTIVATION: gl.constexpr = "swiglu" if GATED else "gelu"
    slot, phase, meeting = 0, 0, 0
    n_meetings = 5 * n_layers
    gdc_wait()
    gdc_launch_dependents()
    for layer in range(n_layers):
        norm = norms_ptr + 2 * layer * WIDTH
        norm_bias = norm_biases_ptr + 2 * layer * WIDTH
        chunks = _put(
            rows, x_ptr, delta_ptr, sum_ptr, norm, norm_bias, layer > 0, n_rows, eps, dtype, WIDTH,
            CHUNK, True, NORM, XM,
        )  # fmt: skip
        slot, phase = _product(
            ring, chunks, sums, slot, phase, qkv_scales_ptr + layer * QKV,
            qkv_bias_ptr + layer * QKV, qkv_ptr, n_rows, QKV, dtype, WIDTH, 8, CHUNK, SCALED, BIAS,
            "",
        )  # fmt: skip
        meeting = _attend(
            arrived_ptr, meeting, n_meetings, qkv_ptr, keys_ptr + layer * of_layer,
            values_ptr + layer * of_layer, o_ptr, parts_ptr, counts_ptr, lengths_ptr, cos_ptr,
            sin_ptr, q_norm_ptr + layer * D, k_norm_ptr + layer * D, n_rows, capacity, n_splits,
            scale_log2, eps, dtype, N_HEADS, N_KV_HEADS, D, SPLITS, HEAD_NORM, ROTATES,
        )  # fmt: skip
        meeting = _meet(arrived_ptr, meeting, n_meetings)
        chunks = _put(
            rows, o_ptr, o_ptr, o_ptr, norm, norm_bias, False, n_rows, eps, dtype, HEADS, CHUNK,
            False, "", XM,
        )  # fmt: skip
        slot, phase = _product(
            ring, chunks, sums, slot, phase, out_scales_ptr + layer * WIDTH,
            out_bias_ptr + layer * WIDTH, update_ptr, n_rows, WIDTH, dtype, HEADS, 8, CHUNK, SCALED,
            BIAS, "",
        )  # fmt: skip
        meeting = _meet(arrived_ptr, meeting, n_meetings)
        chunks = _put(
            rows, sum_ptr, update_ptr, x_ptr, norm + WIDTH, norm_bias + WIDTH, True, n_rows, eps,
            dtype, WIDTH, CHUNK, True, NORM, XM,
        )  # fmt: skip
        slot, phase = _product(
            ring, chunks, sums, slot, phase, up_scales_ptr + layer * UP, up_bias_ptr + layer * UP,
            h_ptr, n_rows, UP, dtype, WIDTH, INNER if GATED else 8, CHUNK, SCALED, BIAS, ACTIVATION,
        )  # fmt: skip
        meeting = _meet(arrived_ptr, meeting, n_meetings)
        chunks = _put(
            rows, h_ptr, h_ptr, h_ptr, norm, norm_bias, False, n_rows, eps, dtype, INNER, CHUNK,
            False, "", XM,
        )  # fmt: skip
        slot, phase = _product(
            ring, chunks, sums, slot, phase, down_scales_ptr + layer * WIDTH,
            down_bias_ptr + layer * WIDTH, delta_ptr, n_rows, WIDTH, dtype, INNER, 8, CHUNK, SCALED,
            BIAS, "",
        )  # fmt: skip
        meeting = _meet(arrived_ptr, meeting, n_meetings)
    last = 2 * n_layers * WIDTH
    chunks = _put(
        rows, x_ptr, delta_ptr, sum_ptr, norms_ptr + last, norm_biases_ptr + last, True, n_rows,
        eps, dtype, WIDTH, CHUNK, True, NORM, XM,
    )  # fmt: skip
    _best(
        ring, chunks, sums, slot, phase, head_scales_ptr, best_ptr, best_id_ptr, n_rows, vocab,
        dtype, WIDTH, CHUNK, SCALED,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["n_rows", "capacity", "n_splits", "n_layers"])
def persistent_step_kernel(
    qkv_desc, out_desc, up_desc, down_desc, head_desc, qkv_scales, out_scales, up_scales,
    down_scales, head_scales, x_ptr, sum_ptr, update_ptr, delta_ptr, qkv_ptr, o_ptr, h_ptr,
    norms_ptr, norm_biases_ptr, q_norm_ptr, k_norm_ptr, qkv_bias_ptr, out_bias_ptr, up_bias_ptr,
    down_bias_ptr, qkv_scales_ptr, out_scales_ptr, up_scales_ptr, down_scales_ptr, head_scales_ptr,
    cos_ptr, sin_ptr, lengths_ptr, keys_ptr, values_ptr, parts_ptr, counts_ptr, arrived_ptr,
    best_ptr, best_id_ptr, n_layers, n_rows, capacity, n_splits, of_layer, vocab, scale_log2, eps,
    WIDTH: gl.constexpr, INNER: gl.constexpr, N_HEADS: gl.constexpr, N_KV_HEADS: gl.constexpr,
    D: gl.constexpr, NORM: gl.constexpr, HEAD_NORM: gl.constexpr, ROTATES: gl.constexpr,
    GATED: gl.constexpr, BIAS: gl.constexpr, BITS: gl.constexpr, GROUPED: gl.constexpr,
    SCALED: gl.constexpr, SPLITS: gl.constexpr, XM: gl.constexpr, SLOTS: gl.constexpr,
    LONGEST: gl.constexpr,
):  # fmt: skip
    """Computes one token of each of n_rows sequences. Programs: one a multiprocessor, all at once.

    x: rows of the embedding [n_rows, WIDTH], which are overwritten. Matrices of all layers lie one
    behind the other. LONGEST: the most columns of rows in shared memory.
    """
    dtype: gl.constexpr = x_ptr.dtype.element_ty
    SHAPE: gl.constexpr = qkv_desc.block_type.shape
    EACH: gl.constexpr = SHAPE[2] * 8 // BITS if BITS < 16 else SHAPE[2]
    CHUNK: gl.constexpr = PARTS * EACH
    BM: gl.constexpr = XM if XM > COLUMNS else COLUMNS
    rows = gl.allocate_shared_memory(
        dtype, [LONGEST // EACH, 4, EACH // 32, 8, XM], IN_ROWS
    )
    sums = gl.allocate_shared_memory(gl.float32, [PARTS, 16, BM], IN_SUMS)
    weight = gl.allocate_shared_memory(
        qkv_desc.dtype, [SLOTS * 2, SHAPE[0], SHAPE[1], SHAPE[2]], qkv_desc.layout
    )
    boxes, scales = sums, sums
    if GROUPED:
        boxes = gl.allocate_shared_memory(
            qkv_scales.dtype, [SLOTS * 2, 8, PARTS], qkv_scales.layout
        )
        scales = boxes._reinterpret(qkv_scales.dtype, [SLOTS, 16, PARTS], PLAIN)
    ring = Ring(
        weight, boxes, scales, barriers(SLOTS, 1), barriers(SLOTS, 1), SLOTS, BITS, GROUPED
    )
    gl.warp_specialize(
        [
            (_consume, (
                ring, rows, sums, x_ptr, sum_ptr, update_ptr, delta_ptr, qkv_ptr, o_ptr, h_ptr,
                norms_ptr, norm_biases_ptr, q_norm_ptr, k_norm_ptr, qkv_bias_ptr, out_bias_ptr,
                up_bias_ptr, down_bias_ptr, qkv_scales_ptr, out_scales_ptr, up_scales_ptr,
                down_scales_ptr, head_scales_ptr, cos_ptr, sin_ptr, lengths_ptr, keys_ptr,
                values_ptr, parts_ptr, counts_ptr, arrived_ptr, best_ptr, best_id_ptr, n_layers,
                n_rows, capacity, n_splits, of_layer, vocab, scale_log2, eps, dtype, WIDTH, INNER,
                N_HEADS, N_KV_HEADS, D, NORM, HEAD_NORM, ROTATES, GATED, BIAS, SCALED, CHUNK,
                SPLITS, XM,
            )),
            (_produce, (
                ring, qkv_desc, out_desc, up_desc, down_desc, head_desc, qkv_scales, out_scales,
                up_scales, down_scales, head_scales, n_layers, vocab,
                (N_HEADS + 2 * N_KV_HEADS) * D, WIDTH, N_HEADS * D, 2 * INNER if GATED else INNER,
                INNER, GATED, CHUNK,
            )),
        ],
        [1],
        [24],
    )  # fmt: skip
