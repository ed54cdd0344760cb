"""Computes QK-norm and rotary embedding in one launch, and their backward pass.

With x̂ = x·rstd, the gradient g of a rotated head after rotating it back, and h = g·weight,

    dx = rstd·(h − x̂·mean_D(h·x̂))    dweight = Σ_heads g·x̂

All is in float32. The forward pass is the kernel of `triton_rope`. The backward pass reads q, k and
both gradients once and computes rstd again. A program has some heads of either q or k, walks tiles
of tokens, and keeps dweight in registers. It writes one partial sum [D], and a small launch adds
these up for both weights in a fixed order.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Kernel
from tnp.ops._shared.primitives import cast
from tnp.ops._shared.rows import SUM_COLUMNS, SUM_ROWS, programs
from tnp.ops.rope.definition import OPTIONS
from tnp.ops.rope.triton_rope import (
    Config,
    Tiles,
    checked,
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


@dataclass(frozen=True)
class BackwardConfig(Config):
    """Sets a tile, programs per multiprocessor, and stages of prefetched loads."""

    per_multiprocessor: int
    num_stages: int


# A thread has halves of 16 bytes of one head, or with 2048 pairs of two heads. In turn, the
# candidates take 83, 85 and 84 µs forward and 132, 136 and 140 µs backward, for 16,384 tokens of 40
# heads of 128 in bfloat16 (H200).
FORWARD_CONFIGS = (Config(1024, 4, 4), Config(1024, 8, 4), Config(2048, 8, 4))
BACKWARD_CONFIGS = (
    BackwardConfig(256, 4, 1, 20, 2),
    BackwardConfig(512, 8, 2, 10, 2),
    BackwardConfig(1024, 8, 4, 5, 2),
)


@triton.jit
def _walk_tokens(
    x_ptr, gradient_ptr, dx_ptr, weight_ptr, partials_ptr, cos_ptr, sin_ptr, positions_ptr,
    head, walker, walkers, rows, n_tokens, length, n_positions,
    stride_xb, stride_xh, stride_xl, stride_gb, stride_gh, stride_gl,
    stride_db, stride_dh, stride_dl, stride_pb, stride_pl, eps,
    STRIDE_C: tl.constexpr, STRIDE_S: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Returns a weight's partial gradient over every `walkers`-th tile of these heads."""
    a_weight, b_weight = load_weight(weight_ptr, HALF, BLOCK, TOKENS, HEADS, INTERLEAVED)
    a_weight, b_weight = a_weight.to(tl.float32), b_weight.to(tl.float32)
    da_weight = tl.zeros([TOKENS, HEADS, BLOCK], tl.float32)
    db_weight = tl.zeros([TOKENS, HEADS, BLOCK], tl.float32)
    for tile in tl.range(walker, rows, walkers, num_stages=STAGES):
        tokens = tile * TOKENS + tl.arange(0, TOKENS)
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
            cos_ptr, sin_ptr, row, in_tile, known, STRIDE_C, STRIDE_S, HALF, BLOCK, TOKENS, HEADS,
            HAS_POSITIONS, INTERLEAVED,
        )  # fmt: skip
        x_a, x_b = x_a.to(tl.float32), x_b.to(tl.float32)
        turned_a, turned_b = turned_a.to(tl.float32), turned_b.to(tl.float32)
        cos, sin = cos.to(tl.float32), sin.to(tl.float32)
        g_a, g_b = turned_a * cos + turned_b * sin, turned_b * cos - turned_a * sin
        rstd = reciprocal_root(x_a, x_b, eps, HALF)
        da_weight += g_a * (x_a * rstd)
        db_weight += g_b * (x_b * rstd)
        h_a, h_b = g_a * a_weight, g_b * b_weight
        # The sum uses only loaded values, so it does not wait for rstd.
        along = tl.sum(h_a * x_a + h_b * x_b, 2)[:, :, None] * (0.5 / HALF)
        shrink = rstd * (rstd * (rstd * along))
        offs_d = head_offsets(b, at, head, stride_db, stride_dh, stride_dl)
        store_pairs(
            dx_ptr, offs_d, h_a * rstd - x_a * shrink, h_b * rstd - x_b * shrink, mask,
            HALF, BLOCK, INTERLEAVED,
        )  # fmt: skip
    pair = tl.arange(0, BLOCK)
    offs_p = 2 * pair if INTERLEAVED else pair
    partner: tl.constexpr = 1 if INTERLEAVED else HALF
    tl.store(partials_ptr + offs_p, tl.sum(tl.sum(da_weight, 0), 0), mask=pair < HALF)
    tl.store(partials_ptr + offs_p + partner, tl.sum(tl.sum(db_weight, 0), 0), mask=pair < HALF)


SIZES = ["walkers", "rows", "q_blocks", "blocks", "n_tokens", "length", "n_positions"]


@triton.jit(do_not_specialize=SIZES)
def _qk_norm_rope_bwd_kernel(
    q_ptr, k_ptr, dq_out_ptr, dk_out_ptr, dq_ptr, dk_ptr, q_weight_ptr, k_weight_ptr,
    partials_ptr, cos_ptr, sin_ptr, positions_ptr,
    walkers, rows, q_blocks, blocks, n_tokens, length, n_positions,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl,
    stride_gqb, stride_gqh, stride_gql, stride_gkb, stride_gkh, stride_gkl,
    stride_dqb, stride_dqh, stride_dql, stride_dkb, stride_dkh, stride_dkl,
    stride_pb, stride_pl, eps,
    STRIDE_C: tl.constexpr, STRIDE_S: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes gradients. A token's heads are `blocks` tiles, q's first, of `walkers` programs."""
    block, walker = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    partials_ptr += (block * walkers + walker).to(tl.int64) * 2 * HALF
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        _walk_tokens(
            q_ptr, dq_out_ptr, dq_ptr, q_weight_ptr, partials_ptr, cos_ptr, sin_ptr, positions_ptr,
            head, walker, walkers, rows, n_tokens, length, n_positions,
            stride_qb, stride_qh, stride_ql, stride_gqb, stride_gqh, stride_gql,
            stride_dqb, stride_dqh, stride_dql, stride_pb, stride_pl, eps,
            STRIDE_C, STRIDE_S, HALF, BLOCK, TOKENS, HEADS, HAS_POSITIONS, INTERLEAVED, STAGES,
        )  # fmt: skip
    else:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        _walk_tokens(
            k_ptr, dk_out_ptr, dk_ptr, k_weight_ptr, partials_ptr, cos_ptr, sin_ptr, positions_ptr,
            head, walker, walkers, rows, n_tokens, length, n_positions,
            stride_kb, stride_kh, stride_kl, stride_gkb, stride_gkh, stride_gkl,
            stride_dkb, stride_dkh, stride_dkl, stride_pb, stride_pl, eps,
            STRIDE_C, STRIDE_S, HALF, BLOCK, TOKENS, HEADS, HAS_POSITIONS, INTERLEAVED, STAGES,
        )  # fmt: skip


@triton.jit
def _sum_span(
    partials_ptr, out_ptr, start, end, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    offs_d = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(start, end, ROWS):
        offs_p = at + tl.arange(0, ROWS)
        mask = (offs_p < end)[:, None] & (offs_d < D)[None, :]
        ptrs = partials_ptr + offs_p.to(tl.int64)[:, None] * D + offs_d[None, :]
        acc += tl.load(ptrs, mask=mask, other=0.0)
    tl.store(out_ptr + offs_d, cast(tl.sum(acc, 0), out_ptr.dtype.element_ty), mask=offs_d < D)


SPANS = ["first_start", "first_end", "last_start", "last_end"]


@triton.jit(do_not_specialize=SPANS)
def _qk_norm_weights_kernel(
    partials_ptr, first_ptr, last_ptr, first_start, first_end, last_start, last_end,
    D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Adds up the partials of one weight, or of both in separate programs."""
    if tl.program_id(1) == 0:
        _sum_span(partials_ptr, first_ptr, first_start, first_end, D, ROWS, COLUMNS)
    else:
        _sum_span(partials_ptr, last_ptr, last_start, last_end, D, ROWS, COLUMNS)


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
    """Returns the gradients that a wanted result depends on."""
    pairs = zip(SIDES, gradients, strict=True)
    return [x if set(names) & set(wanted) else None for names, x in pairs]


def empty_backward(wanted, inputs):
    gradients, (q, k, q_weight, k_weight, *_tables), _saved = inputs
    there = [gradient is not None for gradient in _arriving(wanted, gradients)]
    heads = [empty_like(x) if found else None for x, found in zip((q, k), there, strict=True)]
    pairs = zip((q_weight, k_weight), there, strict=True)
    weights = [x.new_empty(x.shape) if found else None for x, found in pairs]
    return _given(wanted, (*heads, *weights))


def _given(wanted, results):
    """Returns the requested results, in the order of `differentiated`."""
    names = (*(x for x, _ in SIDES), *(weight for _, weight in SIDES))
    return tuple(x if name in wanted else None for name, x in zip(names, results, strict=True))


def prepare_backward(call, config, inputs):
    gradients, (q, k, _q_weight, _k_weight, *tables), _saved = inputs
    problem, arriving = call.problem, _arriving(call.wanted, gradients)
    there = [at for at, x in enumerate(arriving) if x is not None]
    if not there:  # only an unwanted input's output has a gradient
        return lambda inputs, scalars: (None,) * 4
    first, last = there[0], there[-1]
    cut = Tiles(problem, config, arriving)
    blocks = sum(cut.blocks)
    at_once = programs(call.target, config.per_multiprocessor, blocks * cut.rows)
    walkers = max(1, at_once // blocks)
    ends = [(q, k)[at] for at in (first, last)]
    cos, _sin, positions = tables
    kernel = Bound(
        _qk_norm_rope_bwd_kernel, (blocks * walkers,),
        walkers, cut.rows, cut.blocks[0], blocks, cut.n_tokens, problem["n_tokens"], len(cos),
        *steps(*map(readable, ends), *(readable(arriving[at]) for at in (first, last))),
        *steps(*map(empty_like, ends)),
        *((0, 0) if positions is None else positions.stride()),
        INTERLEAVED=bool(problem["interleaved"]), STAGES=config.num_stages,
        num_warps=config.num_warps, **cut.constants, **of_tables(*tables),
    )  # fmt: skip
    head_dim, n_partials = problem["head_dim"], blocks * walkers
    spans = (0, cut.blocks[0] * walkers), (cut.blocks[0] * walkers, n_partials)
    summed = [at for at in there if SIDES[at][1] in call.wanted]
    add = Bound(
        _qk_norm_weights_kernel, (triton.cdiv(head_dim, SUM_COLUMNS), len(summed)),
        *(n for at in summed[:1] + summed[-1:] for n in spans[at]),
        D=head_dim, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, num_warps=8,
    )  # fmt: skip

    def launch(inputs, scalars):
        gradients, (q, k, q_weight, k_weight, cos, sin, positions), _saved = inputs
        heads = readable(q), readable(k)
        weights = q_weight.contiguous(), k_weight.contiguous()
        dx, read = [None, None], [None, None]
        for at in there:
            dx[at], read[at] = empty_like((q, k)[at]), readable(gradients[at])
        partials = q.new_empty((n_partials, head_dim), dtype=torch.float32)
        # No program takes a tile of a missing tensor: the other tensor replaces it.
        pairs = heads, read, dx, weights
        kernel(
            *(pair[at] for pair in pairs for at in (first, last)), partials,
            readable(cos), readable(sin), q if positions is None else positions, *scalars,
        )  # fmt: skip
        of_weights = [
            x.new_empty(x.shape) if at in summed else None for at, x in enumerate(weights)
        ]
        if summed:
            add(partials, of_weights[summed[0]], of_weights[summed[-1]])
        return _given(call.wanted, (*dx, *of_weights))

    return launch


FORWARD = Kernel("triton", empty, prepare, configs=lambda call: FORWARD_CONFIGS, options=OPTIONS)
BACKWARD = Kernel(
    "triton", empty_backward, prepare_backward, configs=lambda call: BACKWARD_CONFIGS,
    options=OPTIONS,
)  # fmt: skip
