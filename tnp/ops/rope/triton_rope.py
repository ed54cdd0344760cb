"""Rotary embedding of q and k in one launch: every element is read once and written once.

A program takes a tile of tokens and heads, of q or of k, with its rows of the tables. The backward
pass is the same kernel with the sine's sign turned. Computed in float32.
"""

from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl

from tnp.contract import Kernel
from tnp.launch import Bound, asserts
from tnp.ops.primitives import cast


@dataclass(frozen=True)
class Config:
    """Pairs of elements in a tile, and heads in it at most."""

    pairs: int
    heads: int
    num_warps: int


# With 1024 pairs and four warps a thread's halves are 16 bytes each in 16 bits.
CONFIGS = (
    Config(1024, 8, 4),
    Config(1024, 4, 4),
    Config(1024, 16, 4),
    Config(2048, 8, 4),
    Config(2048, 8, 8),
    Config(512, 4, 2),
)


@triton.jit
def _angles(cos_ptr, sin_ptr, offs_c, offs_s, mask, BACK: tl.constexpr):
    """Cosines and sines of a tile's pairs, [tokens, 1, BLOCK] in float32; BACK turns the sign."""
    cos = tl.load(cos_ptr + offs_c, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + offs_s, mask=mask, other=0.0).to(tl.float32)
    if BACK:
        sin = -sin
    return cos[:, None, :], sin[:, None, :]


@triton.jit
def _rotate_tile(
    x_ptr, out_ptr, cos_ptr, sin_ptr, offs_x, offs_out, offs_c, offs_s, in_tile,
    HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """Rotates heads of tokens at offs_x, [tokens, heads, 1], by rows of the tables at offs_c and
    offs_s, [tokens, 1]. Elements are on their way before the tables are waited for.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    pair = tl.arange(0, BLOCK)[None, :]
    in_table = in_tile[:, None] & (pair < HALF)
    if INTERLEAVED:
        offs_d = tl.arange(0, 2 * BLOCK)[None, None, :]
        mask = in_tile[:, None, None] & (offs_d < 2 * HALF)
        x = tl.load(x_ptr + offs_x + offs_d, mask=mask, other=0.0).to(tl.float32)
        cos, sin = _angles(cos_ptr, sin_ptr, offs_c + pair, offs_s + pair, in_table, BACK)
        pairs: tl.constexpr = [x.shape[0], x.shape[1], BLOCK, 2]
        a, b = tl.split(tl.reshape(x, pairs))
        out = tl.reshape(tl.join(a * cos - b * sin, b * cos + a * sin), x.shape)
        tl.store(out_ptr + offs_out + offs_d, cast(out, dtype), mask=mask)
    else:
        offs_d = pair[:, None, :]
        mask = in_tile[:, None, None] & (offs_d < HALF)
        a = tl.load(x_ptr + offs_x + offs_d, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(x_ptr + offs_x + HALF + offs_d, mask=mask, other=0.0).to(tl.float32)
        cos, sin = _angles(cos_ptr, sin_ptr, offs_c + pair, offs_s + pair, in_table, BACK)
        tl.store(out_ptr + offs_out + offs_d, cast(a * cos - b * sin, dtype), mask=mask)
        tl.store(out_ptr + offs_out + HALF + offs_d, cast(b * cos + a * sin, dtype), mask=mask)


@triton.jit
def _offsets(b, position, head, stride_b, stride_h, stride_l):
    """64-bit offsets of heads of tokens, [tokens, heads, 1]."""
    tokens = b.to(tl.int64) * stride_b + position.to(tl.int64) * stride_l
    return tokens[:, None, None] + (head.to(tl.int64) * stride_h)[None, :, None]


@triton.jit
def _rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, cos_ptr, sin_ptr, positions_ptr,
    n_tokens, length, n_positions, q_blocks, blocks,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl,
    stride_oqb, stride_oqh, stride_oql, stride_okb, stride_okh, stride_okl,
    stride_pb, stride_pl,
    STRIDE_C: tl.constexpr, STRIDE_S: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
):  # fmt: skip
    """`n_tokens` of all sequences of `length`; a token's heads are `blocks` tiles, q's first."""
    tokens = tl.program_id(0) // blocks * TOKENS + tl.arange(0, TOKENS)
    block = tl.program_id(0) % blocks
    b, at = tokens // length, tokens % length
    in_tile = tokens < n_tokens
    position = at
    if HAS_POSITIONS:
        offs_p = b.to(tl.int64) * stride_pb + at.to(tl.int64) * stride_pl
        position = tl.load(positions_ptr + offs_p, mask=in_tile, other=0)
        position = tl.minimum(tl.maximum(position, 0), n_positions - 1)
    position = position.to(tl.int64)[:, None]
    offs_c, offs_s = position * STRIDE_C, position * STRIDE_S
    if block < q_blocks:
        head = block * HEADS + tl.arange(0, HEADS)
        offs_x = _offsets(b, at, head, stride_qb, stride_qh, stride_ql)
        offs_out = _offsets(b, at, head, stride_oqb, stride_oqh, stride_oql)
        _rotate_tile(
            q_ptr, q_out_ptr, cos_ptr, sin_ptr, offs_x, offs_out, offs_c, offs_s, in_tile,
            HALF, BLOCK, INTERLEAVED, BACK,
        )  # fmt: skip
    else:
        head = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        offs_x = _offsets(b, at, head, stride_kb, stride_kh, stride_kl)
        offs_out = _offsets(b, at, head, stride_okb, stride_okh, stride_okl)
        _rotate_tile(
            k_ptr, k_out_ptr, cos_ptr, sin_ptr, offs_x, offs_out, offs_c, offs_s, in_tile,
            HALF, BLOCK, INTERLEAVED, BACK,
        )  # fmt: skip


def configs(call):
    return CONFIGS


def _empty_like(x):
    """In the order of x's memory: a token's heads together, or a head's tokens."""
    batch, heads, n_tokens, head_dim = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((batch, n_tokens, heads, head_dim)).transpose(1, 2)
    return x.new_empty(x.shape)


def _prepared(call, config, tensors, tables, positions, back):
    """What launches on q and k, either of which may be None, tables and positions."""
    problem, present = call.problem, [x for x in tensors if x is not None]
    batch, n_tokens, half = problem["batch"], problem["n_tokens"], problem["head_dim"] // 2
    n_heads = [0 if x is None else x.shape[1] for x in tensors]
    # Whole tiles of heads, of q as of k.
    heads = gcd(gcd(*n_heads), config.heads)
    block = triton.next_power_of_2(half)
    tokens = max(1, config.pairs // (block * heads))
    tokens = min(tokens, triton.next_power_of_2(batch * n_tokens))
    blocks = sum(n_heads) // heads
    read = [x if x.stride(-1) == 1 else x.contiguous() for x in present]
    strides = [x.stride()[:3] for x in (read[0], read[-1])]
    strides += [_empty_like(x).stride()[:3] for x in (present[0], present[-1])]
    copied = [x.stride(-1) != 1 for x in present]
    tables_copied = [half > 1 and x.stride(-1) != 1 for x in tables]
    pairs = zip(tables, tables_copied, strict=True)
    table_strides = [half if copy else x.stride(0) for x, copy in pairs]
    kernel = Bound(
        _rope_kernel, (triton.cdiv(batch * n_tokens, tokens) * blocks,),
        batch * n_tokens, n_tokens, len(tables[0]), n_heads[0] // heads, blocks,
        *(step for steps in strides for step in steps),
        *((0, 0) if positions is None else positions.stride()),
        # Triton knows of integers at most that 16 divides them: 40, half of 80, is a constant.
        STRIDE_C=table_strides[0], STRIDE_S=table_strides[1],
        HALF=half, BLOCK=block, TOKENS=tokens, HEADS=heads,
        HAS_POSITIONS=positions is not None, INTERLEAVED=bool(problem["interleaved"]), BACK=back,
        num_warps=config.num_warps,
    )  # fmt: skip

    def launch(tensors, cos, sin, positions):
        present = [x for x in tensors if x is not None]
        results = [_empty_like(x) for x in present]
        read = [x.contiguous() if c else x for x, c in zip(present, copied, strict=True)]
        if tables_copied[0]:
            cos = cos.contiguous()
        if tables_copied[1]:
            sin = sin.contiguous()
        # Of what is not there no program takes a tile: the other stands in its place.
        kernel(
            read[0], read[-1], results[0], results[-1],
            cos, sin, cos if positions is None else positions,
        )  # fmt: skip
        made = iter(results)
        return tuple(None if x is None else next(made) for x in tensors)

    return launch


def empty(wanted, inputs):
    return tuple(map(_empty_like, inputs[:2])), ()


def prepare(call, config, inputs):
    q, k, cos, sin, positions = inputs
    run = _prepared(call, config, (q, k), (cos, sin), positions, back=False)

    def launch(inputs, scalars):
        q, k, cos, sin, positions = inputs
        return run((q, k), cos, sin, positions), ()

    return _checked(launch) if call.problem["positions"] and asserts() else launch


def _checked(launch):
    """The launch, after an assertion on the device that tables have a row of every position."""

    def after_check(inputs, scalars):
        cos, positions = inputs[2], inputs[4]
        inside = ((positions >= 0) & (positions < len(cos))).all()
        torch._assert_async(inside, f"positions must lie between 0 and {len(cos) - 1}")
        return launch(inputs, scalars)

    return after_check


def _wanted(wanted, gradients):
    """Gradients to turn back; None where nobody asks for it, or nobody used the output."""
    pairs = zip(("q", "k"), gradients, strict=True)
    return tuple(x if name in wanted else None for name, x in pairs)


def empty_backward(wanted, inputs):
    gradients, _kept, _saved = inputs
    return tuple(None if x is None else _empty_like(x) for x in _wanted(wanted, gradients))


def prepare_backward(call, config, inputs):
    gradients, (cos, sin, positions), _saved = inputs
    gradients = _wanted(call.wanted, gradients)
    if all(x is None for x in gradients):  # the gradient of an output whose input needs none
        return lambda inputs, scalars: (None, None)
    run = _prepared(call, config, gradients, (cos, sin), positions, back=True)

    def launch(inputs, scalars):
        gradients, (cos, sin, positions), _saved = inputs
        return run(_wanted(call.wanted, gradients), cos, sin, positions)

    return launch


FORWARD = Kernel("triton", empty, prepare, configs=configs, options=("interleaved", "positions"))
BACKWARD = Kernel(
    "triton", empty_backward, prepare_backward, configs=configs,
    options=("interleaved", "positions"),
)  # fmt: skip
