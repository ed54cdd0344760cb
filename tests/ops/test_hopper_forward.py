"""What runs around the forward kernel for Hopper, which itself is gated on one."""

from itertools import chain

import pytest
import triton

from tnp.ops.attention.hopper_forward import MIN_BLOCKS_SAVED, rounds, schedule

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


def loads(sections: list[list[int]]) -> list[int]:
    """What each program has to do where every section of tiles begins with a round of its own:
    programs take tiles there and back.
    """
    found, i = [0] * PROGRAMS, 0
    for tiles in sections:
        for first in range(0, len(tiles), PROGRAMS):
            for at, tile in enumerate(tiles[first : first + PROGRAMS]):
                found[at if i % 2 == 0 else PROGRAMS - 1 - at] += tile
            i += 1
    return found


@pytest.mark.parametrize("n_q, heads, together", [(8_192, 64, 44), (32_768, 32, 8)])
def test_programs_have_as_much_to_do_where_tiles_see_unequal_numbers_of_keys(n_q, heads, together):
    """Causal: of a head's tiles of 192 queries the last sees most, and is taken first, of all heads
    of a section in turn.
    """
    of_head = triton.cdiv(n_q, 192)
    tiles = range(of_head, 0, -1)
    sections = [
        [tile for tile in tiles for _ in range(min(together, heads - first))]
        for first in range(0, heads, together)
    ]
    found = loads(sections)
    assert max(found) < 1.01 * sum(found) / PROGRAMS
    together_at_once = loads([list(chain.from_iterable(sections))])
    assert max(together_at_once) > 1.03 * sum(found) / PROGRAMS, "the control"
    of_sections = [triton.cdiv(len(section), PROGRAMS) for section in sections]
    assert rounds(of_head, heads, together, PROGRAMS) == sum(of_sections)
