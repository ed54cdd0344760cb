"""Attention forward in 8 bits for Hopper: both products of e4m3 operands, online softmax.

As `hopper_forward_kernel`, whose producer and split of the work it shares: consumer warpgroups own
64 query rows each, a producer warp streams blocks of 128 keys and values. `quantize` says what it
reads. With f the scales of a row of q and a block of keys, and log2(e)·scale, times one another:

    s = f·q kᵀ    m' = max(m, ⌈max_j s_j⌉)    p = 2^(s − m' + 8)    l = l·2^(m − m') + Σ_j p_j
    o = o·2^(m − m') + p v    and at the end  o / l, plus the vector that was taken from the values

m is a whole number: then p keeps the same 4 bits of its significand whatever the reference is, and
results depend on the order of blocks in nothing but what is too small for e4m3. 2^8 uses its range.

Sums of products of e4m3 keep about 13 bits in Hopper's tensor cores. So those of a block start at
zero, and blocks are added up in float32: acc·2^(m − m') + o is one FFMA, as the rescaling alone
would be. acc is in units of the last block's values; that the next block has others is part of the
same factor.

p never crosses the edge of the loop, where it would be unpacked. Within a trip: exponentials of the
scores that are there, their product with the values, the next scores; then the sums of values, and
the next maximum. Other warpgroups' exponentials run beside it. To start the next scores first takes
registers for both, so that two consumers are left: 514 TFLOP/s in place of 587 (large, H200).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from tnp.ops._shared.hopper_primitives import barriers, opaque
from tnp.ops.attention import eight_bit
from tnp.ops.attention.hopper_forward_kernel import store_part
from tnp.ops.attention.hopper_forward_pipeline import LAG, ROWS, Pipeline, produce
from tnp.ops.attention.hopper_forward_walk import lane_sums
from tnp.ops.attention.hopper_primitives import allocate_tiles, ring, tile
from tnp.ops.attention.quantize import BLOCK, GROUP

RANGE = gl.constexpr(eight_bit.RANGE)
HEAD_DIM = gl.constexpr(64)


@aggregate
class Pipeline8:
    """What all warps of a program share; `Pipeline` has the split of the work."""

    q: gl.shared_memory_descriptor  # 2 × consumers, [64, D]: this tile's and the next one's
    k: gl.shared_memory_descriptor  # stages, [128, D], and of each the values of LAG before
    v: gl.shared_memory_descriptor
    o: gl.shared_memory_descriptor  # consumers, [64, D]
    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    q_scale_ptr: gl.tensor
    scales_ptr: gl.tensor
    n_keys_ptr: gl.tensor
    n_tiles: gl.tensor
    n_heads: gl.tensor
    n_q: gl.tensor
    n_k: gl.tensor
    n_whole: gl.tensor
    share: gl.tensor
    scale_log2: gl.tensor
    BLOCK_N: gl.constexpr
    STAGES: gl.constexpr
    CONSUMERS: gl.constexpr
    HAS_N_KEYS: gl.constexpr
    # What `produce` and `store_part` ask of a pipeline beside.
    HEAD_DIM: gl.constexpr
    GROUP: gl.constexpr
    PACKED: gl.constexpr
    MASKED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q, k, v, o, q_full, q_empty, full, empty, q_scale_ptr, scales_ptr, n_keys_ptr,
        n_tiles, n_heads, n_q, n_k, n_whole, share, scale_log2,
        STAGES, CONSUMERS, HAS_N_KEYS,
    ):  # fmt: skip
        self.q, self.k, self.v, self.o = q, k, v, o
        self.q_full, self.q_empty = q_full, q_empty
        self.full, self.empty = full, empty
        self.q_scale_ptr, self.scales_ptr = q_scale_ptr, scales_ptr
        self.n_keys_ptr = n_keys_ptr
        self.n_tiles, self.n_heads, self.n_q, self.n_k = n_tiles, n_heads, n_q, n_k
        self.n_whole, self.share, self.scale_log2 = n_whole, share, scale_log2
        self.BLOCK_N, self.STAGES = gl.constexpr(BLOCK), gl.constexpr(STAGES)
        self.CONSUMERS = gl.constexpr(CONSUMERS)
        self.HAS_N_KEYS = gl.constexpr(HAS_N_KEYS)
        self.HEAD_DIM, self.GROUP = HEAD_DIM, gl.constexpr(1)
        self.PACKED, self.MASKED = gl.constexpr(False), gl.constexpr(False)

    n_items = Pipeline.n_items
    item = Pipeline.plain_item


@gluon.jit
def _scores(pipe, q, stage):
    """Start q kᵀ with the keys of a stage."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, S)
    k_t = tile(pipe.k, stage).permute((1, 0))
    return warpgroup_mma(q, k_t, zeros, use_acc=False, is_async=True)


@gluon.jit
def _packed(p):
    """p [64, 128] as an operand in e4m3, its columns in the order of `quantize.key_at`."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32])
    p = gl.permute(gl.reshape(p, [ROWS, BLOCK // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    p = gl.convert_layout(gl.reshape(p, [ROWS, BLOCK]), gl.DotOperandLayout(0, OUT, 4))
    # `.to(float8e4nv)` would take bytes apart and put them together again.
    return gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
        "=r,r,r,r,r", [p], dtype=gl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _values(pipe, p, stage):
    """Start p v with the values of a stage."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32])
    # Two transposed tiles [D, 64], one behind the other: so lies [D, 128] of rows of 64 bytes.
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(GROUP, 8, 2)
    v_t = tile(pipe.v, stage)._reinterpret(gl.float8e4nv, [HEAD_DIM, BLOCK], LAYOUT)
    zeros = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUT)
    return warpgroup_mma(p, v_t.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _exponentials(s, factor, m, l_i):
    """(2^(s − m + 8) packed as an operand, l [64, 4] with its sums)."""
    p = gl.exp2(s * factor[:, None] + (RANGE - m)[:, None])
    l_i = l_i + lane_sums(p, BLOCK)
    return _packed(p), l_i


@gluon.jit
def _attend(pipe, q, q_factor, scales_ptr, step, keys, first, last):
    """acc [64, D], l [64] and m [64] of one warpgroup's rows over key blocks first … last − 1.

    `step` stages were consumed before. `q_factor` [64] is a row's scale, times scale·log2(e);
    `scales_ptr` are the scales of the head's blocks.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32])
    acc = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUT)
    of_acc = gl.full([ROWS], 1.0, gl.float32, gl.SliceLayout(1, OUT))
    end = step + last - first

    stage, phase = ring(step, pipe.STAGES)
    factor = q_factor * gl.load(scales_ptr + 2 * (last - 1))
    unit = gl.load(scales_ptr + 2 * (last - 1) + 1)
    mbarrier.wait(pipe.full.index(stage), phase)
    s = warpgroup_mma_wait(0, deps=[_scores(pipe, q, stage)])
    mbarrier.arrive(pipe.empty.index(stage), count=1)
    columns = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, S))
    inside = (columns < keys - (last - 1) * BLOCK)[None, :]
    s = gl.where(inside, s, float("-inf"))
    m = gl.ceil(gl.max(s, 1) * factor)
    l_i = lane_sums(gl.zeros([ROWS, BLOCK], gl.float32, S), BLOCK)
    LANES: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)

    scales_ptr += 2 * (first - step - 1)
    for j in range(step + 1, end):
        next_ptr = scales_ptr + 2 * j
        k_scale = gl.load(next_ptr)
        next_unit = gl.load(next_ptr + 1)
        stage, phase = ring(j, pipe.STAGES)
        p, l_i = _exponentials(s, factor, m, l_i)
        mbarrier.wait(pipe.full.index(stage), phase)
        o_started = _values(pipe, p, stage)
        s_started = _scores(pipe, q, stage)
        o = warpgroup_mma_wait(1, deps=[o_started])
        acc = acc * of_acc[:, None] + o
        s = warpgroup_mma_wait(0, deps=[s_started])
        mbarrier.arrive(pipe.empty.index(stage), count=1)
        factor = q_factor * k_scale
        m_new = gl.maximum(m, gl.ceil(gl.max(s, 1) * factor))
        rescale = gl.exp2(m - m_new)
        l_i = l_i * gl.convert_layout(rescale, LANES)[:, None]
        of_acc = gl.convert_layout(rescale * gl.exp2(unit - next_unit), gl.SliceLayout(1, OUT))
        m = m_new
        unit = next_unit

    p, l_i = _exponentials(s, factor, m, l_i)
    stage, phase = ring(end, pipe.STAGES)
    mbarrier.wait(pipe.full.index(stage), phase)
    o = warpgroup_mma_wait(0, deps=[_values(pipe, p, stage)])
    mbarrier.arrive(pipe.empty.index(stage), count=1)
    acc = acc * of_acc[:, None] + o
    l_i = gl.convert_layout(gl.sum(l_i, 1), gl.SliceLayout(1, S))
    return acc * gl.exp2(unit), l_i, m


@gluon.jit
def _consumer(pipe, o_desc, part_ptr, vector_ptr, WARPGROUP: gl.constexpr):
    """Attend for the program's items."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32])
    n = 0
    step = 0
    for i in range(pipe.n_items()):
        index, bh, row, _n_rows, keys, first, last = pipe.item(i)
        if (index < pipe.n_tiles) & (first < last):
            rows = row + WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
            q_scales = pipe.q_scale_ptr + bh.to(gl.int64) * pipe.n_q + rows
            q_scale = gl.load(q_scales, mask=rows < pipe.n_q, other=0.0)
            blocks = gl.cdiv(pipe.n_k, BLOCK)
            scales_ptr = pipe.scales_ptr + bh.to(gl.int64) * blocks * 2
            slot, phase = ring(n, 2)
            mbarrier.wait(pipe.q_full.index(slot), phase)
            q = tile(pipe.q, slot * pipe.CONSUMERS + WARPGROUP)
            acc, l_i, m = _attend(
                pipe, q, q_scale * pipe.scale_log2, scales_ptr, step, keys, first, last
            )
            mbarrier.arrive(pipe.q_empty.index(slot), count=1)

            # Computed again: kept through the loops over keys it would take registers.
            _index, bh, row, _n_rows, _keys, first, last = pipe.item(i)
            if i < pipe.n_whole:
                offs_d = opaque(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT)))
                vector = gl.load(vector_ptr + bh * HEAD_DIM + offs_d)
                of_row = gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, OUT))
                o = acc * of_row[:, None] + vector[None, :]
                # The last tile's output has left shared memory by now.
                tma.store_wait(0)
                # Opaque, or addresses would be kept through the loops, and spill.
                buffer = opaque(WARPGROUP)
                tile(pipe.o, buffer).store(o.to(o_desc.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(
                    o_desc,
                    [bh // pipe.n_heads, bh % pipe.n_heads, row + WARPGROUP * ROWS, 0],
                    pipe.o.index(buffer),
                )
            else:
                store_part(pipe, part_ptr, i, acc, m, l_i, WARPGROUP)
            step += last - first + LAG
            n += 1
    tma.store_wait(0)


@gluon.jit
def _producer(pipe, q_desc, k_desc, v_desc):
    n = 0
    step = 0
    produce(pipe, q_desc, k_desc, v_desc, n, step)


@gluon.jit(do_not_specialize=["n_tiles", "n_heads", "n_q", "n_k", "n_whole", "share"])
def attention_fwd_hopper_8bit_kernel(
    q_desc, k_desc, v_desc, o_desc, q_scale_ptr, scales_ptr, vector_ptr, part_ptr, n_keys_ptr,
    n_tiles, n_heads, n_q, n_k, n_whole, share, scale_log2,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, CONSUMERS: gl.constexpr,
    HAS_N_KEYS: gl.constexpr,
):  # fmt: skip
    """o of whole query tiles, and parts of those that are split."""
    gl.static_assert(CONSUMERS == 3, "three are launched")
    pipe = Pipeline8(
        allocate_tiles(q_desc, 2 * CONSUMERS),
        allocate_tiles(k_desc, STAGES),
        allocate_tiles(v_desc, STAGES),
        allocate_tiles(o_desc, CONSUMERS),
        barriers(2, 1), barriers(2, CONSUMERS),
        barriers(STAGES, 2), barriers(STAGES, CONSUMERS),
        q_scale_ptr, scales_ptr, n_keys_ptr,
        n_tiles, n_heads, n_q, n_k, n_whole, share, scale_log2,
        STAGES, CONSUMERS, HAS_N_KEYS,
    )  # fmt: skip
    # An inline list: assigned to a name first, its constants would turn into tensors.
    gl.warp_specialize(
        [
            (_consumer, (pipe, o_desc, part_ptr, vector_ptr, 0)),
            (_consumer, (pipe, o_desc, part_ptr, vector_ptr, 1)),
            (_consumer, (pipe, o_desc, part_ptr, vector_ptr, 2)),
            (_producer, (pipe, q_desc, k_desc, v_desc)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )
