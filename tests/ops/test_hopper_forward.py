"""What runs around the forward kernel for Hopper, which itself is gated on one."""

import pytest

from tnp.ops.attention.hopper_forward import MIN_BLOCKS_SAVED, schedule

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
