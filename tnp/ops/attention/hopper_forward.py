"""Attention forward for Hopper: what runs around `hopper_forward_kernel`.

Where tiles were split along the keys, a second kernel adds their parts up in a fixed order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel
from tnp.ops.attention.definition import WITH_LSE, n_kv_heads
from tnp.ops.attention.hopper_forward_kernel import attention_fwd_hopper_kernel, part_width
from tnp.ops.attention.hopper_forward_pipeline import ROWS
from tnp.ops.attention.hopper_primitives import head_map, supported, without_reference
from tnp.ops.attention.keys import Reach, Tiles, all_seen, lengths_given, n_tiles
from tnp.ops.attention.primitives import (
    LOG2_E,
    Layout,
    empty,
    flat,
    forward,
    head_ptr,
    lse_layout,
    of_all_seen,
    rows_layout,
    store_rows,
)

COMBINE_ROWS = 32
# Blocks of keys (0.6 µs each on an H200) that splitting must save a program: parts cost 10 µs and
# more.
MIN_BLOCKS_SAVED = 16
SECTION_BYTES = 24 * 2**20  # of keys and values; an H200's L2 cache holds 50 MiB


@dataclass(frozen=True)
class ForwardConfig:
    """Keys a block, blocks in flight (a power of two), registers of a consumer's thread, consumers.

    Three consumers, of 192 rows, overlap best; two leave fewer rows of a last tile without work.
    """

    block_n: int
    num_stages: int
    registers: int
    consumers: int


def schedule(n_tiles: int, blocks: int, programs: int, may_split: bool) -> tuple[int, int, int]:
    """(query tiles a program takes whole, tiles left to split, blocks of keys of those a program).

    Without a split the last round is of whole tiles too, and not all programs have one.
    """
    n_whole, n_split = divmod(n_tiles, programs)
    share = triton.cdiv(n_split * blocks, programs)
    if may_split and blocks - share >= MIN_BLOCKS_SAVED:
        return n_whole, n_split, share
    return triton.cdiv(n_tiles, programs), 0, 0


@triton.jit(do_not_specialize=["n_q", "first_tile", "share", "blocks"])
def _combine_kernel(
    part_ptr, o_ptr, beside_ptr, stride_ob, stride_oh, stride_om, n_heads, n_q, first_tile, share,
    blocks, TILE: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
    PART_WIDTH: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Rows of a split tile from its parts: Σ 2^(m − max m)·acc over Σ 2^(m − max m)·l.

    CENTRED: `beside` is a vector of each head to be added to the rows; else lse, to be written.
    """
    split = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, HEAD_DIM)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    first = split * blocks // share
    last = ((split + 1) * blocks - 1) // share
    for program in tl.range(first, last + 1):
        part = 2 * program + split - program * share // blocks
        part_rows = part_ptr + (part * TILE + rows) * PART_WIDTH
        m = tl.load(part_rows + HEAD_DIM)
        part_l = tl.load(part_rows + HEAD_DIM + 1)
        m_new = tl.maximum(m_i, m)
        old, new = tl.math.exp2(m_i - m_new), tl.math.exp2(m - m_new)
        part_acc = tl.load(part_rows[:, None] + offs_d[None, :])
        acc = acc * old[:, None] + part_acc * new[:, None]
        l_i = l_i * old + part_l * new
        m_i = m_new
    n_tiles = tl.cdiv(n_q, TILE)
    pid_bh = (first_tile + split) // n_tiles
    offs_m = (first_tile + split) % n_tiles * TILE + rows
    o_ptr = head_ptr(o_ptr, stride_ob, stride_oh, pid_bh, n_heads)
    o = acc * (1.0 / l_i)[:, None]
    if CENTRED:
        o += tl.load(beside_ptr + pid_bh * HEAD_DIM + offs_d)[None, :]
    store_rows(o_ptr, o, offs_m, n_q, stride_om, HEAD_DIM)
    if not CENTRED:
        lse_ptrs = beside_ptr + pid_bh.to(tl.int64) * n_q + offs_m
        tl.store(lse_ptrs, m_i + tl.math.log2(l_i), mask=offs_m < n_q)


def configs(call: Call) -> tuple[ForwardConfig, ...]:
    """Candidates, the default first. With masks wide blocks would spill."""
    wide, masked = call.problem["head_dim"] == 128, not all_seen(call.problem)
    if masked and wide:
        return (ForwardConfig(64, 4, 240, 2),)
    if masked:  # three: 570 : 511 TFLOP/s (causal, 16,384 tokens, 32 heads over 8, H200)
        two, three = ForwardConfig(64, 8, 240, 2), ForwardConfig(64, 8, 160, 3)
        return (two, three) if call.problem["n_q"] <= 2 * ROWS.value else (three, two)
    if wide:  # 649 : 626 TFLOP/s (8 × 2,048, 32 heads, H200)
        return ForwardConfig(128, 2, 240, 2), ForwardConfig(64, 4, 240, 2)
    return (
        ForwardConfig(64, 8, 160, 3),
        ForwardConfig(64, 4, 160, 3),
        ForwardConfig(64, 8, 240, 2),
        ForwardConfig(128, 4, 232, 2),
    )


def tiles(call: Call, config: ForwardConfig) -> tuple[int, int, tuple[int, int, int]]:
    """Query tiles, blocks of keys of one, and `schedule`, of programs as many as multiprocessors.

    With n_keys, and where queries see unequal numbers of keys, nothing is split: a program's share
    would depend on the samples' lengths. Under a causal mask without a window the rounds of a
    section of heads stand in the share's place.
    """
    p = call.problem
    rows = config.consumers * ROWS.value
    of_head, heads = n_tiles(p["n_q"], rows, int(p["n_sequences"])), p["batch"] * p["n_heads"]
    n = of_head * heads
    blocks = triton.cdiv(p["n_k"], config.block_n)
    reach = Reach.of(p)
    if reach.bounded_right and not reach.bounded_left:
        together, programs = min(section(call), heads), call.target.multiprocessors
        of_section = triton.cdiv(of_head * together, programs)
        return n, blocks, (n_rounds(of_head, heads, together, programs), 0, of_section)
    may_split = all_seen(p) and not p["n_keys"]
    return n, blocks, schedule(n, blocks, call.target.multiprocessors, may_split)


def n_rounds(of_head: int, heads: int, section: int, programs: int) -> int:
    """Tiles of the busiest program where each section of heads begins with a round of its own."""
    sections = (min(section, heads - first) for first in range(0, heads, section))
    return sum(triton.cdiv(of_head * n, programs) for n in sections)


def section(call: Call) -> int:
    """Heads of queries that programs take together: those whose keys and values lie in half of the
    L2 cache, and all that share them.
    """
    p = call.problem
    of_keys = 2 * p["n_k"] * p["head_dim"] * p.itemsize
    group = p["n_heads"] // n_kv_heads(p)
    return max(1, SECTION_BYTES // of_keys) * group


def parts(
    call: Call, config: ForwardConfig, of_o: Layout, centred: bool = False
) -> tuple[Layout, Bound | None]:
    """The workspace that split tiles are left in, and what adds them up, None without a split.

    Two parts a program. What adds them up takes the workspace, o, and lse, which it writes; where
    `centred` a vector of each head in its place, [B, H, D], which it adds to o.
    """
    p = call.problem
    tile_rows = config.consumers * ROWS.value
    of_parts = flat(2 * call.target.multiprocessors * tile_rows * part_width(p["head_dim"]))
    n, blocks, (_, n_split, share) = tiles(call, config)
    if not n_split:
        return of_parts, None
    return of_parts, Bound(
        _combine_kernel, (n_split, tile_rows // COMBINE_ROWS),
        *of_o[1][:3], p["n_heads"], p["n_q"], n - n_split, share, blocks,
        TILE=tile_rows, BLOCK_M=COMBINE_ROWS, HEAD_DIM=p["head_dim"],
        PART_WIDTH=part_width(p["head_dim"]), CENTRED=centred,
    )  # fmt: skip


@of_all_seen
def counts(call: Call, config: ForwardConfig) -> tuple[float, ...]:
    """A launch, blocks of keys of the busiest program, tiles of an average one, a split."""
    n, blocks, (n_whole, n_split, share) = tiles(call, config)
    busiest = n_whole * blocks + share
    return 1, busiest, n / call.target.multiprocessors, float(n_split > 0)


def prepare(call: Call, config: ForwardConfig, inputs: tuple) -> Callable:
    """The kernel, and the sum of parts where tiles are split."""
    q, k, v = inputs[:3]
    _, n_heads, n_q, head_dim = q.shape
    of_o, of_lse = rows_layout(q), lse_layout(q)
    rows, of_keys = ROWS.value, head_map(config.block_n)
    programs = call.target.multiprocessors
    n, _, (n_whole, n_split, share) = tiles(call, config)
    reach, table = Reach.of(call.problem), Tiles(call, "n_q", config.consumers * rows)
    kernel = Bound(
        attention_fwd_hopper_kernel, (programs,), n, table.n, section(call), n_heads, n_q,
        k.shape[2], n_whole, share, *reach.numbers,
        maps=(head_map(rows), of_keys, of_keys, head_map(rows)),
        HEAD_DIM=head_dim, GROUP=n_heads // k.shape[1], BLOCK_N=config.block_n,
        STAGES=config.num_stages, REGISTERS=config.registers, CONSUMERS=config.consumers,
        **lengths_given(call), **reach.constants, BASE2=without_reference(call), num_warps=4,
    )  # fmt: skip
    of_parts, combine = parts(call, config, of_o)

    def launch(inputs, scalars):
        q, k, v, *lengths = inputs
        o = q.new_empty_strided(*of_o)
        lse = q.new_empty_strided(*of_lse, dtype=torch.float32)
        of_split = lse.new_empty_strided(*of_parts) if combine else lse
        pointers = table.pointers(lengths, lse)
        kernel(q, k, v, o, o, lse, of_split, *pointers, scalars[0] * LOG2_E)
        if combine:
            combine(of_split, o, lse)
        return (o,), (lse,)

    return forward(launch, call)


FORWARD = Kernel("hopper", empty, prepare, supported, configs, WITH_LSE, counts=counts)
