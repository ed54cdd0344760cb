"""QK-norm and rotary embedding in one launch, and their backward pass.

With x̂ = x·rstd, g the gradient of a rotated head turned back, and h = g·weight,

    dx = rstd·(h − x̂·mean_D(h·x̂))    dweight = Σ_heads g·x̂

Computed in float32. The forward pass is `triton_rope`'s kernel. The backward pass reads q, k and
both gradients once and computes rstd again. Its programs walk tiles of either q or k, in proportion
to their heads, and keep dweight in registers: each writes one partial [D], and a small launch for
each weight adds these in a fixed order.
"""

from dataclasses import dataclass

import triton
import triton.language as tl

from tnp.contract import Kernel
from tnp.launch import Bound
from tnp.ops.norms import ParameterSum
from tnp.ops.rope.definition import OPTIONS
from tnp.ops.rope.triton_rope import (
    Config,
    Tiles,
    checked,
    configs,
    empty,
    empty_like,
    head_offsets,
    load_angles,
    load_pairs,
    load_weight,
    locate,
    of_tables,
    prepared,
    readable,
    reciprocal_root,
    steps,
    store_pairs,
)
from tnp.ops.rows import programs


@dataclass(frozen=True)
class BackwardConfig(Config):
    """A tile, programs per multiprocessor, and stages of the loads ahead."""

    per_multiprocessor: int
    num_stages: int


# With the first a thread has 8 pairs, and six programs fit into a multiprocessor's registers.
BACKWARD_CONFIGS = (
    BackwardConfig(512, 8, 2, 6, 3),
    BackwardConfig(512, 8, 2, 6, 2),
    BackwardConfig(512, 4, 2, 6, 3),
    BackwardConfig(256, 4, 1, 12, 3),
    BackwardConfig(1024, 8, 4, 3, 3),
    BackwardConfig(1024, 8, 4, 4, 2),
    BackwardConfig(2048, 8, 8, 2, 2),
)


@triton.jit
def _walk_tiles(
    x_ptr, gradient_ptr, dx_ptr, weight_ptr, partials_ptr, cos_ptr, sin_ptr, positions_ptr,
    program, n_programs, n_tiles, blocks, n_tokens, length, n_positions,
    stride_xb, stride_xh, stride_xl, stride_gb, stride_gh, stride_gl,
    stride_db, stride_dh, stride_dl, stride_pb, stride_pl, eps,
    STRIDE_C: tl.constexpr, STRIDE_S: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`program` of `n_programs` takes every `n_programs`-th tile of q or of k."""
    a_weight, b_weight = load_weight(weight_ptr, HALF, BLOCK, INTERLEAVED)
    da_weight = tl.zeros([TOKENS, HEADS, BLOCK], tl.float32)
    db_weight = tl.zeros([TOKENS, HEADS, BLOCK], tl.float32)
    for tile in tl.range(program, n_tiles, n_programs, num_stages=STAGES):
        tokens = tile // blocks * TOKENS + tl.arange(0, TOKENS)
        head = tile % blocks * HEADS + tl.arange(0, HEADS)
        b, at, row, in_tile, known = locate(
            tokens, n_tokens, length, n_positions, positions_ptr, stride_pb, stride_pl,
            HAS_POSITIONS,
        )  # fmt: skip
        mask = in_tile[:, None, None]
        offs_x = head_offsets(b, at, head, stride_xb, stride_xh, stride_xl)
        offs_g = head_offsets(b, at, head, stride_gb, stride_gh, stride_gl)
        x_a, x_b = load_pairs(x_ptr, offs_x, mask, HALF, BLOCK, INTERLEAVED)
        turned_a, turned_b = load_pairs(gradient_ptr, offs_g, mask, HALF, BLOCK, INTERLEAVED)
        cos, sin = load_angles(
            cos_ptr, sin_ptr, row, in_tile, known, STRIDE_C, STRIDE_S, HALF, BLOCK, HAS_POSITIONS
        )
        g_a, g_b = turned_a * cos + turned_b * sin, turned_b * cos - turned_a * sin
        rstd = reciprocal_root(x_a, x_b, eps, HALF)
        da_weight += g_a * (x_a * rstd)
        db_weight += g_b * (x_b * rstd)
        h_a, h_b = g_a * a_weight, g_b * b_weight
        # The sum is of loaded values alone, so that it does not wait for rstd.
        along = tl.sum(h_a * x_a + h_b * x_b, 2)[:, :, None] / (2 * HALF)
        shrink = rstd * (rstd * (rstd * along))
        offs_d = head_offsets(b, at, head, stride_db, stride_dh, stride_dl)
        store_pairs(
            dx_ptr, offs_d, h_a * rstd - x_a * shrink, h_b * rstd - x_b * shrink, mask,
            HALF, BLOCK, INTERLEAVED,
        )  # fmt: skip
    pair = tl.arange(0, BLOCK)
    offs_p = program.to(tl.int64) * 2 * HALF + (2 * pair if INTERLEAVED else pair)
    partner: tl.constexpr = 1 if INTERLEAVED else HALF
    tl.store(partials_ptr + offs_p, tl.sum(tl.sum(da_weight, 0), 0), mask=pair < HALF)
    tl.store(partials_ptr + offs_p + partner, tl.sum(tl.sum(db_weight, 0), 0), mask=pair < HALF)


@triton.jit
def _qk_norm_rope_bwd_kernel(
    q_ptr, k_ptr, dq_out_ptr, dk_out_ptr, dq_ptr, dk_ptr, q_weight_ptr, k_weight_ptr,
    q_partials_ptr, k_partials_ptr, cos_ptr, sin_ptr, positions_ptr,
    q_programs, k_programs, q_tiles, k_tiles, q_blocks, k_blocks, n_tokens, length, n_positions,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl,
    stride_gqb, stride_gqh, stride_gql, stride_gkb, stride_gkh, stride_gkl,
    stride_dqb, stride_dqh, stride_dql, stride_dkb, stride_dkh, stride_dkl,
    stride_pb, stride_pl, eps,
    STRIDE_C: tl.constexpr, STRIDE_S: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The first `q_programs` walk q, the others k."""
    program = tl.program_id(0)
    if program < q_programs:
        _walk_tiles(
            q_ptr, dq_out_ptr, dq_ptr, q_weight_ptr, q_partials_ptr,
            cos_ptr, sin_ptr, positions_ptr,
            program, q_programs, q_tiles, q_blocks, n_tokens, length, n_positions,
            stride_qb, stride_qh, stride_ql, stride_gqb, stride_gqh, stride_gql,
            stride_dqb, stride_dqh, stride_dql, stride_pb, stride_pl, eps,
            STRIDE_C, STRIDE_S, HALF, BLOCK, TOKENS, HEADS, HAS_POSITIONS, INTERLEAVED, STAGES,
        )  # fmt: skip
    else:
        _walk_tiles(
            k_ptr, dk_out_ptr, dk_ptr, k_weight_ptr, k_partials_ptr,
            cos_ptr, sin_ptr, positions_ptr,
            program - q_programs, k_programs, k_tiles, k_blocks, n_tokens, length, n_positions,
            stride_kb, stride_kh, stride_kl, stride_gkb, stride_gkh, stride_gkl,
            stride_dkb, stride_dkh, stride_dkl, stride_pb, stride_pl, eps,
            STRIDE_C, STRIDE_S, HALF, BLOCK, TOKENS, HEADS, HAS_POSITIONS, INTERLEAVED, STAGES,
        )  # fmt: skip


def prepare(call, config, inputs):
    q, k, _q_weight, _k_weight, *tables = inputs
    run = prepared(call, config, (q, k), tables)

    def launch(inputs, scalars):
        q, k, q_weight, k_weight, *tables = inputs
        weights = q_weight.contiguous(), k_weight.contiguous()
        return run((q, k), weights, *tables, *scalars), ()

    return checked(launch, call)


SIDES = (("q", "q_weight"), ("k", "k_weight"))


def _arriving(wanted, gradients):
    """Gradients that something wanted depends on."""
    pairs = zip(SIDES, gradients, strict=True)
    return [x if set(names) & set(wanted) else None for names, x in pairs]


def _shared_out(n_programs, tiles):
    """Programs for q and for k, in proportion to their tiles, at least one where there is any."""
    for_q = max(1, round(n_programs * tiles[0] / sum(tiles)))
    return [min(for_q, tiles[0]), min(max(1, n_programs - for_q), tiles[1])]


def empty_backward(wanted, inputs):
    gradients, (q, k, q_weight, k_weight, *_tables), _saved = inputs
    there = [gradient is not None for gradient in _arriving(wanted, gradients)]
    heads = [empty_like(x) if found else None for x, found in zip((q, k), there, strict=True)]
    pairs = zip((q_weight, k_weight), there, strict=True)
    weights = [x.new_empty(x.shape) if found else None for x, found in pairs]
    return _given(wanted, (*heads, *weights))


def _given(wanted, results):
    """Of results in the order of `differentiated` those that are wanted."""
    names = (*(x for x, _ in SIDES), *(weight for _, weight in SIDES))
    return tuple(x if name in wanted else None for name, x in zip(names, results, strict=True))


def prepare_backward(call, config, inputs):
    gradients, (q, k, _q_weight, _k_weight, *tables), _saved = inputs
    problem, arriving = call.problem, _arriving(call.wanted, gradients)
    there = [at for at, x in enumerate(arriving) if x is not None]
    if not there:  # the gradient of an output of whose input none is wanted
        return lambda inputs, scalars: (None,) * 4
    first, last = there[0], there[-1]
    cut = Tiles(problem, config, arriving)
    tiles = [cut.rows * blocks for blocks in cut.blocks]
    n_programs = _shared_out(programs(call.target, config.per_multiprocessor, sum(tiles)), tiles)
    ends = [(q, k)[at] for at in (first, last)]
    cos, _sin, positions = tables
    kernel = Bound(
        _qk_norm_rope_bwd_kernel, (sum(n_programs),),
        *n_programs, *tiles, *cut.blocks, cut.n_tokens, problem["n_tokens"], len(cos),
        *steps(*map(readable, ends), *(readable(arriving[at]) for at in (first, last))),
        *steps(*map(empty_like, ends)),
        *((0, 0) if positions is None else positions.stride()),
        INTERLEAVED=bool(problem["interleaved"]), STAGES=config.num_stages,
        num_warps=config.num_warps, **cut.constants, **of_tables(*tables),
    )  # fmt: skip
    totals = [ParameterSum(max(1, n), problem["head_dim"]) for n in n_programs]

    def launch(inputs, scalars):
        gradients, (q, k, q_weight, k_weight, cos, sin, positions), _saved = inputs
        heads = readable(q), readable(k)
        weights = q_weight.contiguous(), k_weight.contiguous()
        dx, partials, read = [None, None], [None, None], [None, None]
        for at in there:
            dx[at], partials[at] = empty_like((q, k)[at]), totals[at].partials(q)
            read[at] = readable(gradients[at])
        # Of what is not there no program takes a tile: the other stands in its place.
        pairs = heads, read, dx, weights, partials
        kernel(
            *(pair[at] for pair in pairs for at in (first, last)),
            readable(cos), readable(sin), q if positions is None else positions, *scalars,
        )  # fmt: skip
        of_weights = [
            totals[at].of(partials[at], weights[at])
            if at in there and SIDES[at][1] in call.wanted
            else None
            for at in (0, 1)
        ]
        return _given(call.wanted, (*dx, *of_weights))

    return launch


FORWARD = Kernel("triton", empty, prepare, configs=configs, options=OPTIONS)
BACKWARD = Kernel(
    "triton", empty_backward, prepare_backward, configs=lambda call: BACKWARD_CONFIGS,
    options=OPTIONS,
)  # fmt: skip
