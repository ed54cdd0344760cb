"""Tests what runs around the forward kernel for Hopper. The gate runs the kernel on a GPU."""

from collections.abc import Iterator
from itertools import product

import pytest

from tnp.dispatch import devices
from tnp.dispatch.spec import Call
from tnp.ops.attention import OPERATOR
from tnp.ops.attention.hopper.forward import (
    MIN_BLOCKS_SAVED,
    ForwardConfig,
    configs,
    heads_together,
    schedule,
    tiles,
)

PROGRAMS = 132


@pytest.mark.parametrize("n_tiles", [1, 131, 132, 133, 264, 464, 8_544])
@pytest.mark.parametrize("blocks", [1, 16, 47, 157, 3_125])
def test_schedule_takes_every_block_of_every_tile_once(n_tiles, blocks):
    n_whole, n_split, share = schedule(n_tiles, blocks, PROGRAMS, may_split=True)
    if n_split == 0:
        assert share == 0
        assert (n_whole - 1) * PROGRAMS < n_tiles <= n_whole * PROGRAMS
    else:
        assert n_whole * PROGRAMS + n_split == n_tiles
        assert (share - 1) * PROGRAMS < n_split * blocks <= share * PROGRAMS
        # A program's part of the blocks lies in two tiles at most, and is short enough to pay.
        assert share <= blocks - MIN_BLOCKS_SAVED


def test_schedule_splits_only_where_it_pays():
    assert schedule(144, 47, PROGRAMS, may_split=True) == (1, 12, 5)
    assert schedule(144, 47, PROGRAMS, may_split=False) == (2, 0, 0)
    assert schedule(144, MIN_BLOCKS_SAVED, PROGRAMS, may_split=True) == (2, 0, 0)
    assert schedule(264, 47, PROGRAMS, may_split=True) == (2, 0, 0)


def causal(batch: int, n_q: int, head_dim: int = 64, **kind) -> Call:
    sizes = {"batch": batch, "n_heads": 32, "n_q": n_q, "n_k": n_q, "head_dim": head_dim}
    problem = OPERATOR.problem("bfloat16", **sizes, causal=True, n_kv_heads=8, **kind)
    return Call(problem, devices.named("H200"))


def taken(call: Call, config: ForwardConfig, in_rounds: bool) -> Iterator[tuple[int, int, int]]:
    """Yields each program, and the heads and tiles that it takes, as `tile_in_turn` has it."""
    n, _blocks, (n_whole, _n_split, rounds) = tiles(call, config)
    heads, together = call.problem["batch"] * call.problem["n_heads"], heads_together(call)
    of_head = n // heads
    for i, program in product(range(n_whole + 2), range(PROGRAMS)):
        at = program if i % 2 == 0 else PROGRAMS - 1 - program
        if in_rounds:
            begin = i // rounds * together
            at += i % rounds * PROGRAMS
        else:
            index = i * PROGRAMS + at
            begin = index // (of_head * together) * together
            at = index - begin * of_head
        of_section = max(min(together, heads - begin), 1)
        if begin < heads and at < of_section * of_head:
            yield program, begin + at % of_section, of_head - 1 - at // of_section


@pytest.mark.parametrize("batch, n_q", [(1, 65), (2, 8_192), (3, 777), (1, 32_768)])
@pytest.mark.parametrize("kind", [{}, {"window": 300}], ids=str)
def test_every_tile_under_a_mask_is_taken_once(batch, n_q, kind):
    call = causal(batch, n_q, **kind)
    for config in configs(call):
        n, *_ = tiles(call, config)
        found = [tile for _program, *tile in taken(call, config, in_rounds=not kind)]
        heads = batch * 32
        assert sorted(found) == [list(one) for one in product(range(heads), range(n // heads))]


@pytest.mark.parametrize("batch, n_q", [(2, 8_192), (1, 32_768)])
def test_programs_have_as_much_to_do_where_tiles_see_unequal_numbers_of_keys(batch, n_q):
    """The last tile of a head sees most keys. Without rounds of their own, sections share some."""
    call = causal(batch, n_q)
    config = configs(call)[0]
    assert config.consumers == 3

    def busiest(in_rounds: bool) -> float:
        loads = [0] * PROGRAMS
        for program, _head, tile in taken(call, config, in_rounds):
            loads[program] += tile + 1
        return max(loads) * PROGRAMS / sum(loads)

    assert busiest(True) < 1.01
    assert busiest(False) > 1.03, "the control"
