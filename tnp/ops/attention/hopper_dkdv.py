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

import triton
from torch import Tensor
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

from tnp.launch import Bound
from tnp.ops.attention.hopper_primitives import (
    allocate_tiles,
    flat_map,
    head_map,
    load_tile,
    product_ptx,
    reduce_add,
    ring,
    tile,
)
from tnp.ops.hopper_primitives import barriers, opaque

ROWS = gl.constexpr(64)  # keys of a warpgroup, and queries of a tile
BLOCK_N = gl.constexpr(128)
# A head's rows of lse, delta and dq's tiles are padded to a multiple of this.
PADDED_ROWS = gl.constexpr(128)
HEAD_DIM = gl.constexpr(64)


@dataclass(frozen=True)
class DkdvConfig:
    """Stages in flight (a power of two), query tiles a stage, registers of a consumer's thread."""

    num_stages: int
    tiles: int
    registers: int


@gluon.jit
def place(program, n_heads, n_k):
    """Sample, head, and first key of a program."""
    n_blocks = gl.cdiv(n_k, BLOCK_N)
    bh = program // n_blocks
    return bh // n_heads, bh % n_heads, program % n_blocks * BLOCK_N


@aggregate
class Pipeline:
    """Shared memory and barriers between the partitions, and what the program works on."""

    q: gl.shared_memory_descriptor
    do: gl.shared_memory_descriptor
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    k: gl.shared_memory_descriptor  # a tile a consumer
    v: gl.shared_memory_descriptor
    ds: gl.shared_memory_descriptor
    dq: gl.shared_memory_descriptor
    key_full: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor  # TILES query tiles: q, do, lse, delta
    empty: gl.shared_memory_descriptor
    ds_full: gl.shared_memory_descriptor
    ds_empty: gl.shared_memory_descriptor
    n_heads: gl.tensor
    n_q: gl.tensor
    n_k: gl.tensor
    keys: gl.tensor
    n_stages: gl.tensor  # to walk through
    STAGES: gl.constexpr
    TILES: gl.constexpr
    HAS_N_KEYS: gl.constexpr
    FUSED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self, q, do, lse, delta, k, v, ds, dq, key_full, full, empty, ds_full, ds_empty,
        n_heads, n_q, n_k, keys, n_stages,
        STAGES, TILES, HAS_N_KEYS, FUSED,
    ):  # fmt: skip
        self.q, self.do, self.lse, self.delta = q, do, lse, delta
        self.k, self.v, self.ds, self.dq = k, v, ds, dq
        self.key_full, self.full, self.empty = key_full, full, empty
        self.ds_full, self.ds_empty = ds_full, ds_empty
        self.n_heads, self.n_q, self.n_k = n_heads, n_q, n_k
        self.keys, self.n_stages = keys, n_stages
        self.STAGES, self.TILES = gl.constexpr(STAGES), gl.constexpr(TILES)
        self.HAS_N_KEYS = gl.constexpr(HAS_N_KEYS)
        self.FUSED = gl.constexpr(FUSED)

    @gluon.jit
    def place(self):
        """Sample, head, and first key of the program: kept from the start they would spill."""
        n_k = self.n_k if self.HAS_N_KEYS else opaque(self.n_k)
        return place(opaque(gl.program_id(0)), self.n_heads, n_k)

    @gluon.jit
    def first_row(self):
        """Of the program's head in the padded lse, delta and dq."""
        b, h, _first_key = self.place()
        return (b * self.n_heads + h) * gl.cdiv(self.n_q, PADDED_ROWS) * PADDED_ROWS


@gluon.jit
def _producer(pipe, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc):
    b, h, first_key = pipe.place()
    first_row = pipe.first_row()
    for c in gl.static_range(2):
        full = pipe.key_full.index(c)
        mbarrier.expect(full, 2 * k_desc.block_type.nbytes)
        load_tile(k_desc, b, h, first_key + c * ROWS, full, pipe.k, c)
        load_tile(v_desc, b, h, first_key + c * ROWS, full, pipe.v, c)
    for i in range(pipe.n_stages):
        stage, phase = ring(i, pipe.STAGES)
        mbarrier.wait(pipe.empty.index(stage), phase ^ 1)
        full = pipe.full.index(stage)
        mbarrier.expect(full, 2 * (q_desc.block_type.nbytes + lse_desc.block_type.nbytes))
        row = i * pipe.TILES * ROWS
        load_tile(q_desc, b, h, row, full, pipe.q, stage)
        load_tile(do_desc, b, h, row, full, pipe.do, stage)
        row += first_row
        tma.async_copy_global_to_shared(lse_desc, [row], full, pipe.lse.index(stage))
        tma.async_copy_global_to_shared(delta_desc, [row], full, pipe.delta.index(stage))


@gluon.jit
def _query_tile(buffers, stage, t: gl.constexpr):
    """Tile t of a stage of q or do."""
    return tile(buffers, stage).slice(t * ROWS, ROWS, dim=0)


@gluon.jit
def _row_of(buffers, stage, t: gl.constexpr):
    """lse or delta of tile t of a stage, along the columns of the scores."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    values = buffers.index(stage).slice(t * ROWS, ROWS, dim=0).load(gl.SliceLayout(0, S))
    return values[None, :]


@gluon.jit
def _times_transposed(a, b):
    """Start a bᵀ for two tiles [64, D]."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zeros = gl.zeros([ROWS, ROWS], gl.float32, S)
    return warpgroup_mma(a, b.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_dp(pipe, v, do, stage, t: gl.constexpr):
    """Start v doᵀ, less delta where FUSED."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    if pipe.FUSED:
        # As what the matmul adds to, delta is awaited where time is left: 557 → 570 TFLOP/s (mid).
        start = gl.zeros([ROWS, ROWS], gl.float32, S) - _row_of(pipe.delta, stage, t)
        return warpgroup_mma(v, do.permute((1, 0)), start, is_async=True)
    else:
        return _times_transposed(v, do)


@gluon.jit
def _store_rows(pipe, ptr, x, WARPGROUP: gl.constexpr):
    """Write a consumer's 64 rows of dk or dv, [B, n_k, H, D]; 0 past the sample's keys.

    Straight from registers: once a program, and a bulk store's descriptors cost registers of loops.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    b, h, first_key = pipe.place()
    row = first_key + WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    column = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, S))
    if pipe.HAS_N_KEYS:
        x = gl.where((row < pipe.keys)[:, None], x, 0.0)
    first = ((b.to(gl.int64) * pipe.n_k + row) * pipe.n_heads + h) * HEAD_DIM
    ptrs = ptr + first[:, None] + column[None, :]
    gl.store(ptrs, x.to(ptr.dtype.element_ty), mask=(row < pipe.n_k)[:, None])


@gluon.jit
def _gradient_of_scores(p, p_operand, dp, FUSED: gl.constexpr):
    """p ∘ dp in the operands' dtype."""
    if FUSED:
        # In pairs of 16 bits: with p in float32 the registers do not suffice.
        return gl.inline_asm_elementwise(
            product_ptx(p_operand.dtype), "=r,r,r",
            [gl.convert_layout(p_operand, dp.type.layout), dp.to(p_operand.dtype)],
            dtype=p_operand.dtype, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return (p * dp).to(p_operand.dtype)


@gluon.jit
def _walk(pipe, k, v, scale_log2, WARPGROUP: gl.constexpr, MASKED: gl.constexpr):
    """dk (unscaled) and dv of a warpgroup's keys over all queries.

    The next tile's scores are multiplied, and its lse is read, beside this one's gradients. MASKED
    makes p of keys past the sample's 0: in dq they would be wrong.
    """
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    DTYPE: gl.constexpr = pipe.q.dtype
    _b, _h, first_key = pipe.place()
    row = first_key + WARPGROUP * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
    limit = gl.where(row < pipe.keys, float("inf"), float("-inf"))[:, None]
    dk = gl.zeros([ROWS, HEAD_DIM], gl.float32, S)
    dv = gl.zeros([ROWS, HEAD_DIM], gl.float32, S)
    s = gl.zeros([ROWS, ROWS], gl.float32, S)
    lse = gl.zeros([1, ROWS], gl.float32, S)
    if pipe.n_stages > 0:
        mbarrier.wait(pipe.full.index(0), 0)
        s = warpgroup_mma_wait(0, deps=[_times_transposed(k, _query_tile(pipe.q, 0, 0))])
        lse = _row_of(pipe.lse, 0, 0)
    for i in range(pipe.n_stages):
        stage, _phase = ring(i, pipe.STAGES)
        # The last stage's next is itself: its scores are thrown away.
        following, phase = ring(gl.minimum(i + 1, pipe.n_stages - 1), pipe.STAGES)
        for t in gl.static_range(pipe.TILES):
            q = _query_tile(pipe.q, stage, t)
            do = _query_tile(pipe.do, stage, t)
            dp_started = _start_dp(pipe, v, do, stage, t)
            exponent = s * scale_log2 - lse
            if MASKED:
                exponent = gl.minimum(exponent, limit)
            p = gl.exp2(exponent)
            p_operand = gl.convert_layout(p.to(DTYPE), A)
            if t + 1 < pipe.TILES:
                s_started = _times_transposed(k, _query_tile(pipe.q, stage, t + 1))
            else:
                mbarrier.wait(pipe.full.index(following), phase)
                s_started = _times_transposed(k, _query_tile(pipe.q, following, 0))
            dv_started = warpgroup_mma(p_operand, do, dv, is_async=True)
            delta = 0.0
            if not pipe.FUSED:
                delta = _row_of(pipe.delta, stage, t)
            if t == 0:
                dp = warpgroup_mma_wait(2, deps=[dp_started])
            else:
                dp, dk = warpgroup_mma_wait(2, deps=[dp_started, dk_started])  # noqa: F821
            ds = _gradient_of_scores(p, p_operand, dp - delta, pipe.FUSED)
            if pipe.FUSED:
                mbarrier.wait(pipe.ds_empty.index(i & 1), ((i >> 1) & 1) ^ 1)
                tile(pipe.ds, (i & 1) * 2 + WARPGROUP).store(ds)
                fence_async_shared()
                mbarrier.arrive(pipe.ds_full.index(i & 1), count=1)
            dk_started = warpgroup_mma(gl.convert_layout(ds, A), q, dk, is_async=True)
            if t + 1 < pipe.TILES:
                lse = _row_of(pipe.lse, stage, t + 1)
                s, dv = warpgroup_mma_wait(1, deps=[s_started, dv_started])
            else:
                lse = _row_of(pipe.lse, following, 0)
                s, dv, dk = warpgroup_mma_wait(0, deps=[s_started, dv_started, dk_started])
        mbarrier.arrive(pipe.empty.index(stage), count=1)
    return dk, dv


@gluon.jit
def _consumer(pipe, dk_ptr, dv_ptr, scale, scale_log2, WARPGROUP: gl.constexpr):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    A: gl.constexpr = gl.DotOperandLayout(0, S, 2)
    mbarrier.wait(pipe.key_full.index(WARPGROUP), 0)
    k = tile(pipe.k, WARPGROUP).load(A)
    v = tile(pipe.v, WARPGROUP)
    if pipe.FUSED:
        v = v.load(A)
        _b, _h, first_key = pipe.place()
        if first_key + (WARPGROUP + 1) * ROWS <= pipe.keys:
            dk, dv = _walk(pipe, k, v, scale_log2, WARPGROUP, False)
        else:
            dk, dv = _walk(pipe, k, v, scale_log2, WARPGROUP, True)
    else:
        # v in registers too miscompiles: ptxas 12.8 overwrites it with ds inside the loop.
        dk, dv = _walk(pipe, k, v, scale_log2, WARPGROUP, False)
    _store_rows(pipe, dv_ptr, dv, WARPGROUP)
    _store_rows(pipe, dk_ptr, dk * scale, WARPGROUP)


@gluon.jit
def _dq_consumer(pipe, dq_desc):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    zeros = gl.zeros([ROWS, HEAD_DIM], gl.float32, S)
    first_row = pipe.first_row()
    mbarrier.wait(pipe.key_full.index(0), 0)
    mbarrier.wait(pipe.key_full.index(1), 0)
    for i in range(pipe.n_stages):
        buffer = i & 1
        mbarrier.wait(pipe.ds_full.index(buffer), (i >> 1) & 1)
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
        reduce_add(dq_desc, [first_row + i * ROWS, 0], pipe.dq.index(buffer))
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_heads", "n_q", "n_k"])
def _attention_bwd_dkdv_hopper_kernel(
    q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc, dq_desc, dk_ptr, dv_ptr,
    n_keys_ptr, n_heads, n_q, n_k, scale, scale_log2,
    STAGES: gl.constexpr, TILES: gl.constexpr, REGISTERS: gl.constexpr,
    HAS_N_KEYS: gl.constexpr, FUSED: gl.constexpr,
):  # fmt: skip
    b, _h, first_key = place(gl.program_id(0), n_heads, n_k)
    keys = n_k
    n_stages = gl.cdiv(n_q, TILES * ROWS)
    if HAS_N_KEYS:
        keys = gl.maximum(gl.minimum(gl.load(n_keys_ptr + b), n_k), 1)
        n_stages = gl.where(first_key < keys, n_stages, 0)
    pipe = Pipeline(
        allocate_tiles(q_desc, STAGES),
        allocate_tiles(do_desc, STAGES),
        gl.allocate_shared_memory(gl.float32, [STAGES, TILES * ROWS], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, TILES * ROWS], delta_desc.layout),
        allocate_tiles(k_desc, 2),
        allocate_tiles(v_desc, 2),
        allocate_tiles(k_desc, 4 if FUSED else 1),
        gl.allocate_shared_memory(
            gl.float32, [2 if FUSED else 1, ROWS, HEAD_DIM], dq_desc.layout
        ),
        barriers(2, 1), barriers(STAGES, 1), barriers(STAGES, 2), barriers(2, 2), barriers(2, 1),
        n_heads, n_q, n_k, keys, n_stages,
        STAGES, TILES, HAS_N_KEYS, FUSED,
    )  # fmt: skip
    if FUSED:
        gl.warp_specialize(
            [
                (_consumer, (pipe, dk_ptr, dv_ptr, scale, scale_log2, 0)),
                (_consumer, (pipe, dk_ptr, dv_ptr, scale, scale_log2, 1)),
                (_dq_consumer, (pipe, dq_desc)),
                (_producer, (pipe, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)),
            ],
            [4, 4, 1],
            [REGISTERS, 72, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (pipe, dk_ptr, dv_ptr, scale, scale_log2, 0)),
                (_consumer, (pipe, dk_ptr, dv_ptr, scale, scale_log2, 1)),
                (_producer, (pipe, q_desc, do_desc, k_desc, v_desc, lse_desc, delta_desc)),
            ],
            [4, 1],
            [REGISTERS, 24],
        )


def bound_dkdv(
    q: Tensor, k: Tensor, counted: bool, rows: int, config: DkdvConfig, *, fused: bool
) -> Bound:
    """Of q, do, k, v, lse, delta, dq's tiles, dk, dv, n_keys or any tensor, scale, scale·log2(e).

    dk and dv are laid out [B, n_k, H, D].

    Args:
        q, k: [B, H, n, D], whose sizes count.
        counted: whether n_keys is given.
        rows: of lse and delta, each head's padded to PADDED_ROWS.
        config: what to launch with.
        fused: dq is added to its tiles, float32 [rows, D], each 64 rows a tile of unscaled dq in
            the order of registers. Where not, they are never read.
    """
    batch, n_heads, n_q, head_dim = q.shape
    n_k, size = k.shape[2], ROWS.value
    row_layout = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    tile_layout = gl.NVMMASharedLayout.get_default_for([size, size], gl.float32)
    of_q = head_map(size * config.tiles)
    of_rows = flat_map([rows], [size * config.tiles], row_layout)
    of_tiles = flat_map([rows if fused else 1, head_dim], [size, size], tile_layout)
    return Bound(
        _attention_bwd_dkdv_hopper_kernel, (triton.cdiv(n_k, BLOCK_N.value) * batch * n_heads,),
        n_heads, n_q, n_k,
        maps=(of_q, of_q, head_map(size), head_map(size), of_rows, of_rows, of_tiles),
        STAGES=config.num_stages, TILES=config.tiles, REGISTERS=config.registers,
        HAS_N_KEYS=counted, FUSED=fused, num_warps=4,
    )  # fmt: skip
