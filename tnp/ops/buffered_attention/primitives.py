"""Shares code of both passes of attention around a buffer: the rows of a tile, and their keys.

Keys lie in blocks of 64. No block has keys both of the context and of the buffer. Rows are numbered
as if rows that see equally many blocks were neighbours. The first and the last rows of q see only
the context. In each group beside the buffer, the rows from 64·j on see its block j. So a tile's
blocks are known before it is read, and no product is computed whose weights are all zero.
"""

import triton
import triton.language as tl

from tnp.dispatch.spec import Problem
from tnp.ops._shared.primitives import dot
from tnp.ops.attention.primitives import load_rows
from tnp.ops.buffered_attention.definition import BLOCK_N, Rows, n_blocks

# These integers do not specialize a kernel: it serves all their values.
COUNTS = [
    "n_q", "n_context", "n_buffer", "n_first", "n_beside", "n_alone", "n_each", "n_segments",
    "chunk", "chunk_each", "chunk_last",
]  # fmt: skip


@triton.jit
def rows_alone(tile, n_first, n_beside, n_q, BLOCK_M: tl.constexpr):
    """Returns the rows of q in a tile of rows that see only the context; n_q is no row."""
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    return tl.minimum(tl.where(at < n_first, at, at + n_beside), n_q)


@triton.jit
def rows_beside(
    tile, block, n_first, n_beside, n_buffer, n_q, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Returns a tile's rows of q beside a block of the buffer, and their points; n_q is no row."""
    n_each = tl.minimum(BLOCK_N, n_buffer - block * BLOCK_N)  # rows of a group
    at = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    beside = at // n_each * n_buffer
    place = block * BLOCK_N + at % n_each
    return tl.where(beside < n_beside, n_first + beside + place, n_q), place


@triton.jit
def load_block(
    k_ptr, v_ptr, stride_kn, stride_vn, block, n_seen, n_context, n_buffer,
    C_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Loads the keys and values of a block, with 0 past its end and in the context's padding."""
    offs_n = first_key(block, n_context, C_BLOCKS, BLOCK_N) + tl.arange(0, BLOCK_N)
    end = tl.where(block < C_BLOCKS, n_seen, n_context + n_buffer)
    k = load_rows(k_ptr, offs_n, end, stride_kn, HEAD_DIM, True)
    v = load_rows(v_ptr, offs_n, end, stride_vn, HEAD_DIM, True)
    return k, v


@triton.jit
def first_key(block, n_context, C_BLOCKS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Returns the first key of a block. Keys of the buffer begin at n_context."""
    return block * BLOCK_N + tl.where(block < C_BLOCKS, 0, n_context - C_BLOCKS * BLOCK_N)


@triton.jit
def scores(
    q, k, block, n_seen, place, IN_CONTEXT: tl.constexpr, C_BLOCKS: tl.constexpr,
    BLOCK_N: tl.constexpr, RAGGED: tl.constexpr,
):  # fmt: skip
    """Returns q kᵀ of a block of keys, with −inf for each key that the row does not see.

    A row sees the context's first n_seen keys, which are whole blocks unless RAGGED. It sees the
    buffer's points up to `place`.
    """
    s = dot(q, tl.trans(k))
    offs_n = tl.arange(0, BLOCK_N)[None, :]
    if not IN_CONTEXT:
        point = (block - C_BLOCKS) * BLOCK_N + offs_n
        s = tl.where(point <= place[:, None], s, float("-inf"))
    elif RAGGED:
        s = tl.where(block * BLOCK_N + offs_n < n_seen, s, float("-inf"))
    return s


def constants(problem: Problem) -> dict:
    """Returns the constants of both kernels that are not in their configurations."""
    c_blocks, of_buffer = n_blocks(problem)
    return {
        "HEAD_DIM": problem["head_dim"],
        "BLOCK_N": BLOCK_N,
        "C_BLOCKS": c_blocks,
        "N_BLOCKS": of_buffer,
        "RAGGED": bool(problem["n_keys"] or Rows.of(problem).n_context % BLOCK_N),
        "HAS_N_KEYS": problem["n_keys"],
    }
