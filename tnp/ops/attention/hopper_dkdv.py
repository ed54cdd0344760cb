"""dK and dV of attention for Hopper, and in the fused form dQ: a program owns 128 keys.

Two consumer warpgroups own 64 keys each and walk the queries, which a producer warp streams through
shared memory. Scores and their gradients are computed transposed, so that both feed their matmuls
from registers. With pᵀ = 2^(scale·log2(e)·k qᵀ − lse) and delta = Σ_d do·o:

    dv = Σ_tiles pᵀ do    dsᵀ = pᵀ ∘ (v doᵀ − delta)    dk = scale · Σ_tiles dsᵀ q

FUSED adds a third warpgroup that multiplies ds k and adds it to dq in device memory, by bulk
reductions of float32 tiles, in whatever order programs arrive: dq then differs by rounding from run
to run. The tiles hold dq in the order of the matmul's registers, which needs no shuffles;
`finish_dq` puts it right.
"""

from dataclasses import dataclass

import torch
import triton
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate

from tnp.ops.attention.hopper_primitives import (
    allocate_tiles,
    barriers,
    head_descriptor,
    load_tile,
    opaque,
    tile,
)
from tnp.ops.attention.primitives import LOG2_E, empty_rows

ROWS = gl.constexpr(64)  # keys of a warpgroup, and queries of a tile
BLOCK_N = gl.constexpr(128)
HEAD_DIM = gl.constexpr(64)


@dataclass(frozen=True)
class DkdvConfig:
    """Query tiles in flight (a power of two), registers of a consumer's thread."""

    num_stages: int
    registers: int


@gluon.constexpr_function
def masked_product_ptx(dtype):
    """PTX for two products of 16-bit floats, where the third operand's bits are set, else 0."""
    kind = "bf16" if dtype == gl.bfloat16 else "f16"
    return f"{{ .reg .b32 p; and.b32 p, $1, $3; mul.rn.{kind}x2 $0, p, $2; }}"


@builtin
def reduce_add(desc, coord, src, _semantic=None):
    """Start the addition of a tile in shared memory to device memory."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle
    )


@aggregate
class Pipeline:
    """Shared memory and barriers between the partitions, and what the program works on."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor  # a tile a consumer; dk and dv leave through k and v
    v: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    key_full: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # a query tile: q, do, lse, delta
    empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    ds_empty: gl.shared_memory_descriptor
    b: gl.tensor
    h: gl.tensor
    first_key: gl.tensor
    keys: gl.tensor
    n_tiles: gl.tensor
    first_tile: gl.tensor  # of the head in the padded lse, delta and dq
    STAGES: gl.constexpr
    HAS_N_CONTEXT: gl.constexpr
    FUSED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q, do, lse, delta, k, v, ds, dq, key_full, full, empty, ds_full, ds_empty,
        b, h, first_key, keys, n_tiles, first_tile, STAGES, HAS_N_CONTEXT, FUSED,
    ):  # fmt: skip
        self.q, self.do, self.lse, self.delta = q, do, lse, delta
        self.k, self.v, self.ds, self.dq = k, v, ds, dq
        self.key_full, self.full, self.empty = key_full, full, empty
        self.ds_full, self.ds_empty = ds_full, ds_empty
        self.b, self.h, self.first_key, self.keys = b, h, first_key, keys
        self.n_tiles, self.first_tile = n_tiles, first_tile
        self.STAGES = gl.constexpr(STAGES)
        self.HAS_N_CONTEXT = gl.constexpr(HAS_N_CONTEXT)
        self.FUSED = gl.constexpr(FUSED)

    @gluon.jit
    def stage(self, n):
        """Buffer of the n-th query tile, of a power of two of them, and its barriers' phase."""
        return n & (self.STAGES - 1), (n >> (self.STAGES.bit_length() - 1)) & 1


@gluon.jit
def _producer(pipe, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc):
    for c in gl.static_range(2):
        full = pipe.key_full.index(c)
        mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
        load_tile(k_desc, pipe.b, pipe.h, pipe.first_key + c * ROWS, full, pipe.k, c)
        load_tile(v_desc, pipe.b, pipe.h, pipe.first_key + c * ROWS, full, pipe.v, c)
    for i in range(pipe.n_tiles):
        stage, phase = pipe.stage(i)
        mbarrier.wait(pipe.empty.index(stage), phase ^ 1)
        full = pipe.full.index(stage)
        mbarrier.expect(full, 2 * (q_desc.block_type.nbytes + lse_desc.block_type.nbytes))
        load_tile(q_desc, pipe.b, pipe.h, i * ROWS, full, pipe.q, stage)
        load_tile(do_desc, pipe.b, pipe.h, i * ROWS, full, pipe.do, stage)
        row = (pipe.first_tile + i) * ROWS
        tma.async_copy_global_to_shared(lse_desc, [row], full, pipe.lse.index(stage))
        tma.async_copy_global_to_shared(delta_desc, [row], full, pipe.delta.index(stage))


@gluon.jit
def _times_transposed(a, b):
    """Start a bᵀ for two tiles [64, D]."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zeros = gl.zeros([ROWS, ROWS], gl.float32, S)
    return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _store_rows(pipe, desc, x, inside, WARPGROUP: gl.constexpr):
    """Write a consumer's 64 rows of dk or dv; 0 past the sample's keys."""
    if pipe.HAS_N_CONTEXT:  # else the descriptor ends where the keys do
        x = gl.where(inside[:, None], x, 0.0)
    tile(pipe.v, WARPGROUP).store(x.to(desc.dtype))
    fence_async_shared()
    row = pipe.first_key + WARPGROUP * ROWS
    tma.async_copy_shared_to_global(desc, [pipe.b, pipe.h, row, 0], pipe.v.index(WARPGROUP))
    tma.store_wait(0)


@gluon.jit
def _consumer(pipe, dk_desc, dv_desc, scale, scale_log2, WARPGROUP: gl.constexpr):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    COLUMN: gl.constexpr = gl.SliceLayout(0, S)
    DTYPE: gl.constexpr = dk_desc.dtype
    ROW: gl.constexpr = gl.SliceLayout(1, S)
    first = pipe.first_key + WARPGROUP * ROWS
    # Past the sample's keys ds must not reach dq.
    inside = gl.arange(0, ROWS, layout=ROW) < pipe.keys - first
    mask = gl.where(inside, -1, 0).to(gl.int16)[:, None]
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, S)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, S)
    mbarrier.wait(pipe.key_full.index(WARPGROUP), 0)
    k = tile(pipe.k, WARPGROUP).load(A)
    v = tile(pipe.v, WARPGROUP)
    if pipe.FUSED:
        v = v.load(A)
    if pipe.n_tiles > 0:
        mbarrier.wait(pipe.full.index(0), 0)
        s = warpgroup_mma_wait(0, deps=[_times_transposed(k, tile(pipe.q, 0))])
        for i in range(pipe.n_tiles):
            stage, _phase = pipe.stage(i)
            # The last tile's next is itself: its scores are thrown away.
            following, phase = pipe.stage(gl.minimum(i + 1, pipe.n_tiles - 1))
            q = tile(pipe.q, stage)
            do = tile(pipe.do, stage)
            dp_started = _times_transposed(v, do)
            lse = pipe.lse.index(stage).load(COLUMN)
            p = gl.exp2(s * scale_log2 - lse[None, :])
            p_operand = gl.convert_layout(p.to(DTYPE), A)
            mbarrier.wait(pipe.full.index(following), phase)
            s_started = _times_transposed(k, tile(pipe.q, following))
            dv_started = warpgroup_mma(p_operand, do, dv, is_async=True)
            delta = pipe.delta.index(stage).load(COLUMN)
            dp = warpgroup_mma_wait(2, deps=[dp_started])
            if pipe.FUSED:
                # In pairs of 16 bits: with p in float32 the registers do not suffice.
                ds = gl.inline_asm_elementwise(
                    masked_product_ptx(DTYPE), "=r,r,r,r",
                    [gl.convert_layout(p_operand, S), (dp - delta[None, :]).to(DTYPE), mask],
                    dtype=pipe.q.dtype, is_pure=True, pack=2,
                )  # fmt: skip
                mbarrier.wait(pipe.ds_empty.index(i & 1), ((i >> 1) & 1) ^ 1)
                tile(pipe.ds, (i & 1) * 2 + WARPGROUP).store(ds)
                fence_async_shared()
                mbarrier.arrive(pipe.ds_full.index(i & 1), count=1)
            else:
                ds = (p * (dp - delta[None, :])).to(DTYPE)
            dk_started = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
            s, dv, dk = warpgroup_mma_wait(0, deps=[s_started, dv_started, dk_started])
            mbarrier.arrive(pipe.empty.index(stage), count=1)
    # Computed again: kept beside the accumulators it would spill.
    inside = opaque(gl.arange(0, ROWS, layout=ROW)) < pipe.keys - pipe.first_key - WARPGROUP * ROWS
    # Both through v's buffer: the warpgroup of dq may still read k's.
    _store_rows(pipe, dv_desc, dv, inside, WARPGROUP)
    _store_rows(pipe, dk_desc, dk * scale, inside, WARPGROUP)


@gluon.jit
def _dq_consumer(pipe, dq_desc):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zeros = gl.zeros([ROWS, HEAD_DIM], gl.float32, S)
    mbarrier.wait(pipe.key_full.index(0), 0)
    mbarrier.wait(pipe.key_full.index(1), 0)
    for i in range(pipe.n_tiles):
        buffer = i & 1
        mbarrier.wait(pipe.ds_full.index(buffer), (i >> 1) & 1)
        dq = zeros
        ds = tile(pipe.ds, 2 * buffer).permute((1, 0))
        dq = warpgroup_mma(ds, tile(pipe.k, 0), zeros, use_acc=False, is_async=True)
        ds = tile(pipe.ds, 2 * buffer + 1).permute((1, 0))
        dq = warpgroup_mma(ds, tile(pipe.k, 1), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(pipe.ds_empty.index(buffer), count=1)
        tma.store_wait(1)
        in_order = gl.permute(gl.reshape(dq, [4, 2, 8, 8, 4, 2]), (3, 0, 2, 4, 1, 5))
        pipe.dq.index(buffer).store(gl.reshape(in_order, [ROWS, HEAD_DIM]))
        fence_async_shared()
        reduce_add(dq_desc, [(pipe.first_tile + i) * ROWS, 0], pipe.dq.index(buffer))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_heads", "n_q", "n_k"])
def _attention_bwd_dkdv_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dk_desc, dv_desc, dq_desc,
    n_context_ptr, n_heads, n_q, n_k, scale, scale_log2,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, HAS_N_CONTEXT: gl.constexpr,
    FUSED: gl.constexpr,
):  # fmt: skip
    n_blocks = gl.cdiv(n_k, BLOCK_N)
    bh = gl.program_id(0) // n_blocks
    first_key = (gl.program_id(0) % n_blocks) * BLOCK_N
    b = bh // n_heads
    tiles_per_head = gl.cdiv(n_q, ROWS)
    keys = n_k
    n_tiles = tiles_per_head
    if HAS_N_CONTEXT:
        keys = gl.maximum(gl.minimum(gl.load(n_context_ptr + b), n_k), 1)
        n_tiles = gl.where(first_key < keys, n_tiles, 0)
    pipe = Pipeline(
        allocate_tiles(q_desc, STAGES),
        allocate_tiles(do_desc, STAGES),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], delta_desc.layout),
        allocate_tiles(k_desc, 2),
        allocate_tiles(v_desc, 2),
        allocate_tiles(k_desc, 4 if FUSED else 1),
        gl.allocate_shared_memory(
            gl.float32, [2 if FUSED else 1, ROWS, HEAD_DIM], dq_desc.layout
        ),
        barriers(2, 1), barriers(STAGES, 1), barriers(STAGES, 2), barriers(2, 2), barriers(2, 1),
        b, bh % n_heads, first_key, keys, n_tiles, bh * tiles_per_head,
        STAGES, HAS_N_CONTEXT, FUSED,
    )  # fmt: skip
    if FUSED:
        gl.warp_specialize(
            [
                (_consumer, (pipe, dk_desc, dv_desc, scale, scale_log2, 0)),
                (_consumer, (pipe, dk_desc, dv_desc, scale, scale_log2, 1)),
                (_dq_consumer, (pipe, dq_desc)),
                (_producer, (pipe, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)),
            ],
            [4, 4, 1],
            [REGISTERS, 72, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (pipe, dk_desc, dv_desc, scale, scale_log2, 0)),
                (_consumer, (pipe, dk_desc, dv_desc, scale, scale_log2, 1)),
                (_producer, (pipe, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )


def attention_dkdv(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    statistics: torch.Tensor,
    dq_tiles: torch.Tensor,
    n_context: torch.Tensor | None,
    scale: float,
    config: DkdvConfig,
    *,
    fused: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dk and dv [B, H, n_k, D] laid out [B, n_k, H, D]; where `fused` dq is added to `dq_tiles`.

    statistics: lse and delta, float32 [2, rows], each head's rows padded to whole query tiles.
    dq_tiles: float32 [rows, D], each 64 rows a tile of unscaled dq in the order of registers.
    """
    batch, n_heads, n_q, _head_dim = q.shape
    n_k = k.shape[2]
    dk, dv = empty_rows(k, n_k), empty_rows(v, n_k)
    rows = ROWS.value
    row_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    tile_layout = gl.NVMMASharedLayout.get_default_for([rows, rows], gl.float32)
    _attention_bwd_dkdv_hopper_kernel[(triton.cdiv(n_k, BLOCK_N.value) * batch * n_heads,)](
        *(head_descriptor(x, rows) for x in (q, do, k, v)),
        *(TensorDescriptor.from_tensor(x, [rows], row_layout) for x in statistics),
        *(head_descriptor(x, rows) for x in (dk, dv)),
        TensorDescriptor.from_tensor(dq_tiles, [rows, rows], tile_layout),
        dq_tiles if n_context is None else n_context,
        n_heads, n_q, n_k, scale, scale * LOG2_E,
        STAGES=config.num_stages, REGISTERS=config.registers,
        HAS_N_CONTEXT=n_context is not None, FUSED=fused, num_warps=4,
    )  # fmt: skip
    return dk, dv
