"""Tests what runs before and after Hopper's backward kernels, in the interpreter."""

import heapq
from itertools import accumulate, product

import pytest
import torch
import triton
import triton.language as tl

from tests.ops.problems import DEVICE
from tnp.dispatch import devices
from tnp.dispatch.spec import Call
from tnp.ops.attention import OPERATOR
from tnp.ops.attention.hopper.dkdv_pipeline import heads_in_turn
from tnp.ops.attention.hopper.padded_rows import TILE_ROWS, PaddedRows
from tnp.ops.attention.keys import (
    Reach,
    block_in_turn,
    blocks_after,
    blocks_before,
    query_tiles,
)

N_Q, N_HEADS = 150, 3
PADDED = 192


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the gate runs it there")
def test_do_is_weighted_where_every_lse_of_a_tile_is_near_zero():
    generator = torch.Generator().manual_seed(0)
    o, do = (
        torch.randn(1, N_HEADS, N_Q, 64, generator=generator).bfloat16().contiguous()
        for _ in range(2)
    )
    lse = torch.randn(1, N_HEADS, N_Q, generator=generator) * 5
    lse[0, 1, 70] = 64.0  # the second tile of the second head
    lse[0, 2, 149] = float("nan")  # the third of the third
    sizes = {"batch": 1, "n_heads": N_HEADS, "n_q": N_Q, "n_k": 300, "head_dim": 64}
    call = Call(OPERATOR.problem("bfloat16", **sizes, base2=True), devices.named("H200"))

    rows = N_HEADS * PADDED
    statistics = torch.full([2 * rows + N_HEADS], 7.0)
    dq = torch.full([rows * 64], 7.0)
    weighted = torch.full([1, N_HEADS, PADDED, 64], 7.0, dtype=torch.bfloat16)
    launch = PaddedRows(call).statistics(o, do, base2=True)
    launch(o, do, lse, lse, statistics, dq, weighted, lse, lse, lse, lse)

    found_lse, delta = statistics[: 2 * rows].view(2, N_HEADS, PADDED)
    assert (dq == 0).all()
    assert statistics[2 * rows :].tolist() == [0.0, 1.0, 1.0]
    assert (weighted[0, :, N_Q:] == 0).all() and (delta[:, N_Q:] == 0).all()
    for head in range(N_HEADS):
        for first in range(0, N_Q, TILE_ROWS):
            some = slice(first, min(first + TILE_ROWS, N_Q))
            left = (head, first) in ((1, 64), (2, 128))
            weight = torch.ones(1) if left else torch.exp2(-lse[0, head, some])[:, None]
            expected = (do[0, head, some].float() * weight).bfloat16()
            torch.testing.assert_close(weighted[0, head, some], expected, rtol=2**-7, atol=0)
            of_tile = (weighted[0, head, some].float() * o[0, head, some].float()).sum(1)
            torch.testing.assert_close(delta[head, some], of_tile, rtol=1e-4, atol=1e-4)
            as_it_was = lse[0, head, some] if left else torch.zeros(len(of_tile))
            torch.testing.assert_close(found_lse[head, some], as_it_was, equal_nan=True)
    assert (found_lse[0, N_Q:] == 0).all() and torch.isinf(found_lse[2, N_Q:]).all()


def padded_places(lengths: list[int] | None) -> torch.Tensor:
    """Returns the place of each of a head's rows among the padded ones."""
    if lengths is None:
        return torch.arange(N_Q)
    places, first = [], 0
    for s, length in enumerate(lengths):
        begin = (first // TILE_ROWS + s) * TILE_ROWS
        places += range(begin, begin + length)
        first += length
    return torch.tensor(places)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the gate runs it there")
@pytest.mark.parametrize("lengths", [None, [150], [5, 0, 64, 1, 80]], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("ordered", [False, True])
def test_rows_are_padded_and_dq_is_put_in_order(lengths, head_dim, ordered):
    """Every sequence begins with a tile of its own; what no row is in must not be read. If ordered,
    no tile of dq need be written before its first block of keys does.
    """
    sizes = {"batch": 1, "n_heads": N_HEADS, "n_q": N_Q, "n_k": N_Q, "head_dim": head_dim}
    packed = {"cu_seqlens_q": True, "cu_seqlens_k": True, "n_sequences": len(lengths or ())}
    problem = OPERATOR.problem("bfloat16", **sizes, **(packed if lengths else {}), causal=True)
    padded = PaddedRows(Call(problem, devices.named("H200")))
    generator = torch.Generator().manual_seed(0)
    o, do = (torch.randn(1, N_HEADS, N_Q, head_dim, generator=generator) for _ in range(2))
    lse = torch.randn(1, N_HEADS, N_Q, generator=generator)
    cu = torch.tensor([0, *accumulate(lengths or [])], dtype=torch.int32)
    pointers = padded.table.pointers((None, cu, cu), lse)[:3]
    rows = padded.n_all * TILE_ROWS
    statistics = torch.full([2 * rows], 7.0)
    tiles = torch.full([rows * head_dim], 7.0)
    turns = torch.full([padded.n_all], 7, dtype=torch.int32)
    launch = padded.statistics(o, do, ordered=ordered, of_lse=True)
    dlse = torch.randn(1, N_HEADS, N_Q, generator=generator)
    launch(o, do, lse, dlse, statistics, tiles, do, turns, *pointers)

    places = padded_places(lengths)
    found_lse, delta = statistics.view(2, N_HEADS, padded.of_head)
    assert torch.equal(found_lse[:, places], lse[0])
    torch.testing.assert_close(delta[:, places], ((o * do).sum(-1) - dlse)[0], rtol=1e-5, atol=1e-5)
    of_rows = torch.zeros(padded.n, dtype=torch.bool)
    of_rows[places // TILE_ROWS] = True
    cleared = turns.view(N_HEADS, -1, 1) if ordered else tiles.view(N_HEADS, padded.n, -1)
    kept = tiles if ordered else turns
    assert (cleared[:, of_rows] == 0).all() and (kept == 7).all()
    beside = of_rows.repeat_interleave(TILE_ROWS)
    beside[places] = False
    assert torch.isinf(found_lse[:, beside]).all() and (delta[:, beside] == 0).all()

    # Tiles of 64 columns, as registers of a matmul hold them: warp, lane, column block, half, pair.
    expected = torch.randn(N_HEADS, padded.of_head, head_dim, generator=generator)
    by_register = expected.view(N_HEADS, padded.n, 4, 2, 8, head_dim // 64, 8, 4, 2)
    tiles = by_register.permute(0, 1, 5, 6, 2, 4, 7, 3, 8).contiguous()
    turns = torch.ones(N_HEADS, padded.n, dtype=torch.int32)
    if ordered:  # no block of keys added to the first tile of the second head
        turns[1, 0], tiles[1, 0], expected[1, :TILE_ROWS] = 0, float("nan"), 0.0
    dq = torch.full([1, N_HEADS, N_Q, head_dim], 7.0)
    finish = padded.finish(dq, dq.stride()[:3], ordered=ordered)
    finish(tiles.flatten(), dq, turns, *pointers, 0.5)
    torch.testing.assert_close(dq[0], 0.5 * expected[:, places])


@triton.jit
def _turns_kernel(
    item_ptr, ptr, n_q, n_keys, left, right, n_items, of_head, section, n_tiles,
    LEFT: tl.constexpr, RIGHT: tl.constexpr,
):  # fmt: skip
    """Stores each item's head and block, and how many blocks add to a tile's dq before it.

    The number is −1 where the item does not add to the tile of 64 queries.
    """
    item = tl.program_id(0)
    head, block = block_in_turn(item, n_items, of_head, section, LEFT)
    tl.store(item_ptr + 2 * item, head)
    tl.store(item_ptr + 2 * item + 1, block)
    key = block * 128
    first, last = query_tiles(key, n_q, n_keys, left, right, 128, 64, LEFT, RIGHT)
    for tile in range(n_tiles):
        if LEFT:
            before = blocks_after(key, tile * 64, n_q, n_keys, left, right, 128, 64, LEFT, RIGHT)
        else:
            before = blocks_before(key, tile * 64, n_q, n_keys, left, right, 128, 64, LEFT, RIGHT)
        walked = (tile >= first) & (tile < last)
        tl.store(ptr + item * n_tiles + tile, tl.where(walked, before, -1))
    tl.device_assert(last <= n_tiles)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the gate runs it there")
@pytest.mark.parametrize(
    "n_q, n_keys, n_k, causal, window",
    [
        (600, 600, 600, True, 0), (600, 600, 600, True, 70), (500, 777, 777, False, 70),
        (777, 300, 300, True, 300), (777, 300, 300, True, 0), (65, 1000, 1000, False, 0),
        (65, 1000, 1000, True, 70), (1, 129, 129, True, 0), (1, 129, 129, False, 70),
        (700, 65, 600, True, 0), (700, 65, 600, True, 300), (300, 130, 300, False, 70),
        (300, 130, 300, True, 70), (300, 1, 300, True, 0), (300, 1, 300, False, 0),
    ],
)  # fmt: skip
def test_blocks_of_keys_take_turns_in_the_order_in_which_they_are_launched(
    n_q, n_keys, n_k, causal, window
):
    """If a block waited for too many, or for one that is launched later, it could wait forever; if
    for too few, dq would be added up in no order. Blocks past a sample's last key walk nothing.
    """
    n_heads, section = 5, 2
    sizes = {"batch": 1, "n_heads": 1, "n_q": n_q, "n_k": n_k, "head_dim": 64}
    options = {name: it for name, it in (("causal", causal), ("window", window)) if it}
    reach = Reach.of(OPERATOR.problem("bfloat16", **sizes, **options))
    of_head, n_tiles = triton.cdiv(n_k, 128), triton.cdiv(n_q, 64)
    n_items = n_heads * of_head
    items = torch.empty([n_items, 2], dtype=torch.int32)
    turns = torch.empty([n_items, n_tiles], dtype=torch.int32)
    _turns_kernel[(n_items,)](
        items, turns, n_q, n_keys, *reach.numbers, n_items, of_head, section, n_tiles,
        **reach.constants,
    )  # fmt: skip
    assert sorted(map(tuple, items.tolist())) == list(product(range(n_heads), range(of_head)))
    added = torch.zeros([n_heads, n_tiles], dtype=torch.int32)
    for (head, _block), turn in zip(items.tolist(), turns, strict=True):
        assert torch.equal(turn[turn >= 0], added[head][turn >= 0])
        added[head] += turn >= 0


def busiest(programs: int, n_heads: int, of_head: int, section: int) -> float:
    """Returns the busiest multiprocessor's work over the average one's.

    Each takes the next item when it is free. The first of a head's blocks of 128 keys sees all
    tiles of 64 queries.
    """
    sections = [range(at, min(at + section, n_heads)) for at in range(0, n_heads, section)]
    items = [2 * (of_head - block) for heads in sections for block in range(of_head) for _ in heads]
    free = [0] * programs
    for item in items:
        heapq.heapreplace(free, free[0] + item)
    return max(free) * programs / sum(items)


@pytest.mark.parametrize("n_heads, of_head", [(64, 16), (16, 64), (71, 16), (32, 8)])
def test_no_multiprocessor_is_left_with_a_long_causal_item(n_heads, of_head):
    call = Call(
        OPERATOR.problem("bfloat16", batch=1, n_heads=8, n_q=9, n_k=9, head_dim=64, causal=True),
        devices.named("H200"),
    )
    programs = call.target.multiprocessors
    assert busiest(programs, n_heads, of_head, heads_in_turn(call, of_head, n_heads)) < 1.05
    head_by_head = busiest(programs, n_heads, of_head, 1)
    assert head_by_head > 1.1, "the control"
