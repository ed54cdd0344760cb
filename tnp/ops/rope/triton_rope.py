"""Computes rotary embedding of q and k in one launch: every element is read once and written once.

A program takes a tile of tokens and heads, of q or of k, with its rows of the tables. The backward
pass is the same kernel with the opposite sign of the sine. All is in float32. `triton_qk_norm` uses
the same functions for a tile, after the norm of each head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel, Problem
from tnp.ops._shared.primitives import cast
from tnp.ops._shared.ranges import asserting, between
from tnp.ops.rope.definition import OPTIONS


@dataclass(frozen=True)
class Config:
    """Sets the pairs of 16-bit elements in a tile (half as many of 32 bits), and its most heads."""

    pairs: int
    heads: int
    num_warps: int


# With 1024 pairs and four warps a thread has halves of 16 bytes of one head. With 2048 pairs it has
# halves of two heads.
CONFIGS = (
    Config(1024, 8, 4),
    Config(1024, 4, 4),
    Config(1024, 16, 4),
    Config(2048, 8, 4),
    Config(2048, 8, 8),
    Config(512, 4, 2),
)


@triton.jit
def load_pairs(ptr, offs, mask, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Loads both elements of each pair of the heads at offs, [tokens, heads, 1].

    It returns [tokens, heads, BLOCK] in the dtype of the memory. mask is [tokens, 1, 1].
    """
    if INTERLEAVED:
        offs_d = tl.arange(0, 2 * BLOCK)[None, None, :]
        x = tl.load(ptr + offs + offs_d, mask=mask & (offs_d < 2 * HALF), other=0.0)
        pairs: tl.constexpr = [x.shape[0], x.shape[1], BLOCK, 2]
        a, b = tl.split(tl.reshape(x, pairs))
    else:
        offs_d = tl.arange(0, BLOCK)[None, None, :]
        mask = mask & (offs_d < HALF)
        a = tl.load(ptr + offs + offs_d, mask=mask, other=0.0)
        b = tl.load(ptr + offs + HALF + offs_d, mask=mask, other=0.0)
    return a, b


@triton.jit
def store_pairs(
    ptr, offs, a, b, mask, HALF: tl.constexpr, BLOCK: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Stores pairs in the layout of `load_pairs`, in the dtype of the memory."""
    dtype: tl.constexpr = ptr.dtype.element_ty
    if INTERLEAVED:
        offs_d = tl.arange(0, 2 * BLOCK)[None, None, :]
        whole: tl.constexpr = [a.shape[0], a.shape[1], 2 * BLOCK]
        x = cast(tl.reshape(tl.join(a, b), whole), dtype)
        tl.store(ptr + offs + offs_d, x, mask=mask & (offs_d < 2 * HALF))
    else:
        offs_d = tl.arange(0, BLOCK)[None, None, :]
        mask = mask & (offs_d < HALF)
        tl.store(ptr + offs + offs_d, cast(a, dtype), mask=mask)
        tl.store(ptr + offs + HALF + offs_d, cast(b, dtype), mask=mask)


@triton.jit
def load_weight(
    ptr, HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Loads the weights of both elements of each pair, for every head of a tile, so that a thread
    loads the weights of its own pairs. As [1, 1, BLOCK] they would be spread over the program, and
    would force their layout on the other operand.
    """
    first = tl.zeros([TOKENS, HEADS, 1], tl.int32)
    present = tl.full([TOKENS, 1, 1], True, tl.int1)
    return load_pairs(ptr, first, present, HALF, BLOCK, INTERLEAVED)


@triton.jit
def reciprocal_root(a, b, eps, HALF: tl.constexpr):
    """Returns 1/√(mean_D x² + eps) of each head, [tokens, heads, 1]."""
    return tl.rsqrt(tl.sum(a * a + b * b, 2) * (0.5 / HALF) + eps)[:, :, None]


@triton.jit
def locate(
    tokens, n_tokens, length, n_positions, positions_ptr, stride_pb, stride_pl,
    HAS_POSITIONS: tl.constexpr,
):  # fmt: skip
    """Returns for tokens of all sequences: sequence, place in it, row of the tables, and whether
    the token and the row exist. For a row that does not exist it returns the nearest one.
    """
    b, at = tokens // length, tokens % length
    in_tile = tokens < n_tokens
    row, known = at, in_tile
    if HAS_POSITIONS:
        offs_p = b.to(tl.int64) * stride_pb + at.to(tl.int64) * stride_pl
        given = tl.load(positions_ptr + offs_p, mask=in_tile, other=0)
        row = tl.minimum(tl.maximum(given, 0), n_positions - 1)
        known = row == given
    return b, at, row.to(tl.int64), in_tile, known


@triton.jit
def load_angles(
    cos_ptr, sin_ptr, row, in_tile, known,
    STRIDE_C: tl.constexpr, STRIDE_S: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Loads cosines and sines of these rows in the tables' dtype, for every head of a tile or once
    for all heads. For a row that does not exist the cosine is NaN, and so are the rotated elements.
    """
    pair, row = tl.arange(0, BLOCK)[None, :], row[:, None]
    mask = in_tile[:, None] & (pair < HALF)
    offs_c, offs_s = row * STRIDE_C + pair, row * STRIDE_S + pair
    if not INTERLEAVED:
        # For every head, a thread loads the angles of its own pairs, 16 bytes at once. Loaded once
        # for all heads, they would be spread over the program and pass through shared memory.
        offs_c = tl.broadcast_to(offs_c[:, None, :], [TOKENS, HEADS, BLOCK])
        offs_s = tl.broadcast_to(offs_s[:, None, :], [TOKENS, HEADS, BLOCK])
        mask = mask[:, None, :]
    cos = tl.load(cos_ptr + offs_c, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + offs_s, mask=mask, other=0.0)
    if INTERLEAVED:  # these pairs need another layout than loads: for one head less is moved
        cos, sin = cos[:, None, :], sin[:, None, :]
    if HAS_POSITIONS:
        cos = tl.where(known[:, None, None], cos.to(tl.float32), float("nan"))
    return cos, sin


@triton.jit
def head_offsets(b, at, head, stride_b, stride_h, stride_l):
    """Returns 64-bit offsets of heads of tokens, [tokens, heads, 1]."""
    tokens = b.to(tl.int64) * stride_b + at.to(tl.int64) * stride_l
    return tokens[:, None, None] + (head.to(tl.int64) * stride_h)[None, :, None]


@triton.jit
def _turn_tile(
    x_ptr, out_ptr, weight_ptr, cos_ptr, sin_ptr, offs_x, offs_out, row, in_tile, known, eps,
    STRIDE_C: tl.constexpr, STRIDE_S: tl.constexpr, HALF: tl.constexpr, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Rotates a tile. Loads of elements are issued before the tables are waited for."""
    mask = in_tile[:, None, None]
    a, b = load_pairs(x_ptr, offs_x, mask, HALF, BLOCK, INTERLEAVED)
    cos, sin = load_angles(
        cos_ptr, sin_ptr, row, in_tile, known, STRIDE_C, STRIDE_S, HALF, BLOCK, TOKENS, HEADS,
        HAS_POSITIONS, INTERLEAVED,
    )  # fmt: skip
    if NORM:
        a_weight, b_weight = load_weight(weight_ptr, HALF, BLOCK, TOKENS, HEADS, INTERLEAVED)
    a, b, cos, sin = a.to(tl.float32), b.to(tl.float32), cos.to(tl.float32), sin.to(tl.float32)
    if BACK:
        sin = -sin
    scaled_a, scaled_b = a, b
    if NORM:
        scaled_a, scaled_b = a * a_weight.to(tl.float32), b * b_weight.to(tl.float32)
    turned_a, turned_b = scaled_a * cos - scaled_b * sin, scaled_b * cos + scaled_a * sin
    if NORM:
        # rstd comes late: ptxas then issues more of the loads before it waits for the first.
        rstd = reciprocal_root(a, b, eps, HALF)
        turned_a, turned_b = turned_a * rstd, turned_b * rstd
    store_pairs(out_ptr, offs_out, turned_a, turned_b, mask, HALF, BLOCK, INTERLEAVED)


@triton.jit(do_not_specialize=["n_positions"])
def _rope_kernel(
    q_ptr, k_ptr, q_out_ptr, k_out_ptr, q_weight_ptr, k_weight_ptr,
    cos_ptr, sin_ptr, positions_ptr,
    n_tokens, length, n_positions,
    stride_qb, stride_qh, stride_ql, stride_kb, stride_kh, stride_kl,
    stride_oqb, stride_oqh, stride_oql, stride_okb, stride_okh, stride_okl,
    stride_pb, stride_pl, eps,
    STRIDE_C: tl.constexpr, STRIDE_S: tl.constexpr,
    HALF: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    Q_BLOCKS: tl.constexpr, BLOCKS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr, INTERLEAVED: tl.constexpr, BACK: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Rotates `n_tokens` tokens of sequences of `length`; heads are BLOCKS tiles, q's first."""
    tokens = tl.program_id(0) // BLOCKS * TOKENS + tl.arange(0, TOKENS)
    block = tl.program_id(0) % BLOCKS
    b, at, row, in_tile, known = locate(
        tokens, n_tokens, length, n_positions, positions_ptr, stride_pb, stride_pl, HAS_POSITIONS
    )
    if block < Q_BLOCKS:
        head = block * HEADS + tl.arange(0, HEADS)
        offs_x = head_offsets(b, at, head, stride_qb, stride_qh, stride_ql)
        offs_out = head_offsets(b, at, head, stride_oqb, stride_oqh, stride_oql)
        _turn_tile(
            q_ptr, q_out_ptr, q_weight_ptr, cos_ptr, sin_ptr, offs_x, offs_out,
            row, in_tile, known, eps,
            STRIDE_C, STRIDE_S, HALF, BLOCK, TOKENS, HEADS,
            HAS_POSITIONS, INTERLEAVED, BACK, NORM,
        )  # fmt: skip
    else:
        head = (block - Q_BLOCKS) * HEADS + tl.arange(0, HEADS)
        offs_x = head_offsets(b, at, head, stride_kb, stride_kh, stride_kl)
        offs_out = head_offsets(b, at, head, stride_okb, stride_okh, stride_okl)
        _turn_tile(
            k_ptr, k_out_ptr, k_weight_ptr, cos_ptr, sin_ptr, offs_x, offs_out,
            row, in_tile, known, eps,
            STRIDE_C, STRIDE_S, HALF, BLOCK, TOKENS, HEADS,
            HAS_POSITIONS, INTERLEAVED, BACK, NORM,
        )  # fmt: skip


# ------------------------------------------------------------------------------------ around it


def configs(call):
    return CONFIGS


def readable(x: torch.Tensor) -> torch.Tensor:
    """Returns x as kernels read it: the last dimension is contiguous."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def empty_like(x: torch.Tensor) -> torch.Tensor:
    """Allocates a tensor in x's memory order: a token's heads together, or a head's tokens."""
    batch, heads, n_tokens, head_dim = x.shape
    if x.stride(1) < x.stride(2):
        return x.new_empty((batch, n_tokens, heads, head_dim)).transpose(1, 2)
    return x.new_empty(x.shape)


def steps(*tensors: torch.Tensor) -> list[int]:
    """Returns the strides of batch, heads and tokens of each tensor in turn."""
    return [step for x in tensors for step in x.stride()[:3]]


class Tiles:
    """Cuts q and k, either of which may be None, into tiles of tokens and heads."""

    def __init__(self, problem: Problem, config: Config, tensors: tuple) -> None:
        n_heads = [0 if x is None else x.shape[1] for x in tensors]
        half, self.n_tokens = problem["head_dim"] // 2, problem["batch"] * problem["n_tokens"]
        block = triton.next_power_of_2(half)
        pairs = config.pairs * 2 // problem.itemsize
        # Tiles hold whole numbers of heads, for q and for k.
        heads = gcd(gcd(*n_heads), min(config.heads, max(1, pairs // block)))
        tokens = max(1, pairs // (block * heads))
        tokens = min(tokens, triton.next_power_of_2(self.n_tokens))
        self.blocks = [n // heads for n in n_heads]  # tiles of the heads of a token
        self.rows = triton.cdiv(self.n_tokens, tokens)  # tiles along the tokens
        self.constants = {"HALF": half, "BLOCK": block, "TOKENS": tokens, "HEADS": heads}


def of_tables(cos: torch.Tensor, sin: torch.Tensor, positions: torch.Tensor | None) -> dict:
    """Returns the constants of a kernel that reads these tables."""
    # Triton knows only whether 16 divides an integer, so 40, half of 80, is a constant.
    distances = {"STRIDE_C": readable(cos).stride(0), "STRIDE_S": readable(sin).stride(0)}
    return distances | {"HAS_POSITIONS": positions is not None}


def prepared(
    call: Call, config: Config, tensors: tuple, tables: tuple, back: bool = False
) -> Callable:
    """Returns the launch on q and k, either of which may be None.

    Call it with (tensors, weights or None, cos, sin, positions, eps). With weights it normalizes
    first.
    """
    norm = call.problem.op != "rope"
    present = [x for x in tensors if x is not None]
    cos, _sin, positions = tables
    tiles = Tiles(call.problem, config, tensors)
    ends = present[0], present[-1]
    kernel = Bound(
        _rope_kernel, (tiles.rows * sum(tiles.blocks),),
        tiles.n_tokens, call.problem["n_tokens"], len(cos),
        *steps(*map(readable, ends), *map(empty_like, ends)),
        *((0, 0) if positions is None else positions.stride()),
        Q_BLOCKS=tiles.blocks[0], BLOCKS=sum(tiles.blocks),
        INTERLEAVED=bool(call.problem["interleaved"]), BACK=back, NORM=norm,
        num_warps=config.num_warps, **tiles.constants, **of_tables(*tables),
    )  # fmt: skip

    def launch(tensors, weights, cos, sin, positions, eps=0.0):
        present = [x for x in tensors if x is not None]
        results, read = [empty_like(x) for x in present], [readable(x) for x in present]
        cos, sin = readable(cos), readable(sin)
        # No program takes a tile of a missing tensor: another tensor replaces it.
        q_weight, k_weight = weights or (cos, cos)
        kernel(
            read[0], read[-1], results[0], results[-1], q_weight, k_weight,
            cos, sin, cos if positions is None else positions, eps,
        )  # fmt: skip
        made = iter(results)
        return tuple(None if x is None else next(made) for x in tensors)

    return launch


def checked(launch: Callable, call: Call) -> Callable:
    """Returns the launch; with TNP_CHECK=1 the device first asserts that positions are valid."""
    if not call.problem["positions"]:
        return launch
    return asserting(
        launch, lambda inputs: [between("positions", inputs[-1], 0, len(inputs[-2]) - 1)]
    )


def empty(wanted, inputs):
    return tuple(map(empty_like, inputs[:2])), ()


def prepare(call, config, inputs):
    q, k, *tables = inputs
    run = prepared(call, config, (q, k), tables)

    def launch(inputs, scalars):
        q, k, *tables = inputs
        return run((q, k), None, *tables), ()

    return checked(launch, call)


def _wanted(wanted, gradients):
    """Returns the gradients to rotate back, None if unwanted or if the output was not used."""
    pairs = zip(("q", "k"), gradients, strict=True)
    return tuple(x if name in wanted else None for name, x in pairs)


def empty_backward(wanted, inputs):
    gradients, _kept, _saved = inputs
    return tuple(None if x is None else empty_like(x) for x in _wanted(wanted, gradients))


def prepare_backward(call, config, inputs):
    gradients, tables, _saved = inputs
    gradients = _wanted(call.wanted, gradients)
    if all(x is None for x in gradients):  # only an unwanted input's output has a gradient
        return lambda inputs, scalars: (None, None)
    run = prepared(call, config, gradients, tables, back=True)

    def launch(inputs, scalars):
        gradients, tables, _saved = inputs
        return run(_wanted(call.wanted, gradients), None, *tables)

    return launch


FORWARD = Kernel("triton", empty, prepare, configs=configs, options=OPTIONS)
BACKWARD = Kernel("triton", empty_backward, prepare_backward, configs=configs, options=OPTIONS)
