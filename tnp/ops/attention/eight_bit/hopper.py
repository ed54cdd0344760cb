"""Computes attention forward in 8 bits for Hopper: both products of e4m3 operands, online softmax.

It shares the producer and the split of the work with `hopper.forward`: consumer warpgroups own 64
query rows each, and a producer warp streams blocks of 128 keys and values. `quantize` describes its
operands. With f the product of a row's scale, a block's scale and scale·log2(e):

    s = f·q kᵀ    m' = max(m, ⌈max_j s_j⌉)    p = 2^(s − m' + 8)    l = l·2^(m − m') + Σ_j p_j
    o = o·2^(m − m') + p v    and at the end  o / l + vector, lse = m − 8 + log2(l) + q·key vector

m is a whole number, so that p keeps the same 4 bits of its significand with any reference. The
order of blocks then changes results only in what is too small for e4m3. 2^8 uses e4m3's range.

Sums of products of e4m3 keep about 13 bits in Hopper's tensor cores. So the sums of a block start
at zero, and blocks are added up in float32: acc·2^(m − m') + o is one FFMA, as rescaling alone
would be. acc is in units of the last block's values. The factor also holds the change of units.

p never crosses the edge of the loop, where it would be unpacked. A trip computes the exponentials
of the scores it has, their product with the values, and the next scores. Then it computes the sums
of values and the next maximum. Other warpgroups' exponentials run beside it. To start the next
scores first takes registers for both scores, which leaves two consumers: 514 TFLOP/s in place of
587 (large, H200).
"""

from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel, Reason
from tnp.ops._shared.hopper_primitives import barriers, opaque, structure
from tnp.ops.attention import eight_bit
from tnp.ops.attention.eight_bit import TAKEN
from tnp.ops.attention.eight_bit.quantize import BLOCK, GROUP, quantizer
from tnp.ops.attention.hopper import forward as hopper_forward
from tnp.ops.attention.hopper import primitives as hopper_primitives
from tnp.ops.attention.hopper.forward import ForwardConfig, lane_sums, store_part
from tnp.ops.attention.hopper.forward_pipeline import LAG, ROWS, Pipeline, produce
from tnp.ops.attention.hopper.primitives import allocate_tiles, head_map, ring, tile
from tnp.ops.attention.primitives import LOG2_E, empty, forward, lse_layout, rows_layout

RANGE = gl.constexpr(eight_bit.RANGE)
HEAD_DIM = gl.constexpr(64)


@structure
class Pipeline8:
    """Holds shared memory, barriers and sizes of a program's warps; `Pipeline` splits the work."""

    q: gl.shared_memory_descriptor  # 2 × consumers, [64, D]: this tile's and the next one's
    k: gl.shared_memory_descriptor  # stages, [128, D]; a stage has the values of LAG blocks before
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
    # `produce` and `store_part` read these too.
    HEAD_DIM: gl.constexpr
    GROUP: gl.constexpr
    PACKED: gl.constexpr
    MASKED: gl.constexpr

    n_items = Pipeline.n_items
    item = Pipeline.plain_item


@gluon.jit
def _scores(pipe, q, stage):
    """Starts q kᵀ with the keys of a stage."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, S)
    k_t = tile(pipe.k, stage).permute((1, 0))
    return warpgroup_mma(q, k_t, zeros, use_acc=False, is_async=True)


@gluon.jit
def _packed(p):
    """Returns p [64, 128] as an operand in e4m3, with columns in the order of `quantize.key_at`."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32])
    p = gl.permute(gl.reshape(p, [ROWS, BLOCK // 16, 2, 4, 2]), (0, 1, 3, 2, 4))
    p = gl.convert_layout(gl.reshape(p, [ROWS, BLOCK]), gl.DotOperandLayout(0, OUT, 4))
    # `.to(float8e4nv)` would unpack and repack bytes.
    return gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
        "=r,r,r,r,r", [p], dtype=gl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def _values(pipe, p, stage):
    """Starts p v with the values of a stage."""
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 32])
    # Two transposed tiles [D, 64], one after the other, lie as [D, 128] in rows of 64 bytes.
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(GROUP, 8, 2)
    v_t = tile(pipe.v, stage)._reinterpret(gl.float8e4nv, [HEAD_DIM, BLOCK], LAYOUT)
    zeros = gl.zeros([ROWS, HEAD_DIM], gl.float32, OUT)
    return warpgroup_mma(p, v_t.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _exponentials(s, factor, m, l_i):
    """Returns 2^(s − m + 8), packed as an operand, and l [64, 4] with its sums added."""
    p = gl.exp2(s * factor[:, None] + (RANGE - m)[:, None])
    l_i = l_i + lane_sums(p, BLOCK)
    return _packed(p), l_i


@gluon.jit
def _attend(pipe, q, q_factor, scales_ptr, step, keys, first, last):
    """Returns acc [64, D], l [64] and m [64] of a warpgroup over key blocks first … last − 1.

    `step` stages were consumed before. `q_factor` [64] is each row's scale times scale·log2(e).
    `scales_ptr` points to the scales of the head's blocks.
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
def _consumer(
    pipe, o_desc, lse_ptr, part_ptr, q_vector_ptr, vector_ptr, WARPGROUP: gl.constexpr
):  # fmt: skip
    """Attends for the program's items."""
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

            # These are computed again: kept through the loops over keys they would take registers.
            _index, bh, row, _n_rows, _keys, first, last = pipe.item(i)
            row += WARPGROUP * ROWS
            rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
            at = bh.to(gl.int64) * pipe.n_q + rows
            q_vector = gl.load(q_vector_ptr + at, mask=rows < pipe.n_q, other=0.0)
            m += q_vector * pipe.scale_log2 - RANGE
            offs_d = opaque(gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, OUT)))
            vector = gl.load(vector_ptr + bh * HEAD_DIM + offs_d)
            acc += gl.convert_layout(l_i, gl.SliceLayout(1, OUT))[:, None] * vector[None, :]
            if i < pipe.n_whole:
                o = acc * gl.convert_layout(1.0 / l_i, gl.SliceLayout(1, OUT))[:, None]
                # Waits until the last tile's output has left shared memory.
                tma.store_wait(0)
                # Without `opaque` addresses would be kept through the loops, and spill.
                buffer = opaque(WARPGROUP)
                tile(pipe.o, buffer).store(o.to(o_desc.dtype))
                fence_async_shared()
                tma.async_copy_shared_to_global(
                    o_desc, [bh // pipe.n_heads, bh % pipe.n_heads, row, 0], pipe.o.index(buffer)
                )
                gl.store(lse_ptr + at, m + gl.log2(l_i), mask=rows < pipe.n_q)
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
    q_desc, k_desc, v_desc, o_desc, lse_ptr, part_ptr,
    q_scale_ptr, q_vector_ptr, scales_ptr, vector_ptr, n_keys_ptr,
    n_tiles, n_heads, n_q, n_k, n_whole, share, scale_log2,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, CONSUMERS: gl.constexpr,
    HAS_N_KEYS: gl.constexpr,
):  # fmt: skip
    """Writes o and lse of whole query tiles, and the parts of split ones."""
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
        BLOCK, STAGES, CONSUMERS, HAS_N_KEYS, HEAD_DIM, 1, False, False,
    )  # fmt: skip
    # The list is inline: assigned to a name first, its constants would turn into tensors.
    gl.warp_specialize(
        [
            (_consumer, (pipe, o_desc, lse_ptr, part_ptr, q_vector_ptr, vector_ptr, 0)),
            (_consumer, (pipe, o_desc, lse_ptr, part_ptr, q_vector_ptr, vector_ptr, 1)),
            (_consumer, (pipe, o_desc, lse_ptr, part_ptr, q_vector_ptr, vector_ptr, 2)),
            (_producer, (pipe, q_desc, k_desc, v_desc)),
        ],
        [4, 4, 1],
        [REGISTERS, REGISTERS, 24],
    )


# ------------------------------------------------------------------------------------- the launches


def supported(call: Call) -> Reason:
    """Returns why it cannot serve a call, or None. The quantizer reads rows that TMA cannot."""
    if call.target.kind != "cuda" or call.target.capability != 90:
        return hopper_primitives.supported(call)
    return None


def configs(call: Call) -> tuple[ForwardConfig, ...]:
    """Returns the candidates, the default first.

    They take 1.730 and 1.771 ms at mid, and 143.0 and 144.2 ms at large (H200).
    """
    return ForwardConfig(BLOCK.value, 2, 160, 3), ForwardConfig(BLOCK.value, 4, 160, 3)


def prepare(call: Call, config: ForwardConfig, inputs: tuple) -> Callable:
    """Prepares the quantization, the kernel, and the sum of parts if tiles are split."""
    q, k, _, n_keys = inputs[:4]
    _, n_heads, n_q, _ = q.shape
    of_o, of_lse, rows = rows_layout(q), lse_layout(q), ROWS.value
    quantize = quantizer(call, inputs)
    n_tiles, _, (n_whole, n_split, share) = hopper_forward.tiles(call, config)
    kernel = Bound(
        attention_fwd_hopper_8bit_kernel, (call.target.multiprocessors,),
        n_tiles, n_heads, n_q, k.shape[2], n_whole, share,
        maps=(head_map(rows), head_map(config.block_n), head_map(config.block_n), head_map(rows)),
        STAGES=config.num_stages, REGISTERS=config.registers, CONSUMERS=config.consumers,
        HAS_N_KEYS=n_keys is not None, num_warps=4,
    )  # fmt: skip
    of_parts, combine = hopper_forward.parts(call, config, of_o)

    def launch(inputs, scalars):
        q, _, _, n_keys = inputs[:4]
        o = q.new_empty_strided(*of_o)
        x = quantize(inputs)
        lse = q.new_empty_strided(*of_lse, dtype=torch.float32)
        of_split = lse.new_empty_strided(*of_parts) if combine else lse
        kernel(
            x.q, x.k, x.v, o, lse, of_split, x.q_scale, x.q_vector, x.scales, x.vector,
            x.vector if n_keys is None else n_keys, scalars[0] * LOG2_E,
        )  # fmt: skip
        if combine:
            combine(of_split, o, lse)
        return (o,), (lse,)

    return forward(launch, call)


FORWARD = Kernel("hopper_8bit", empty, prepare, supported, configs, TAKEN)
