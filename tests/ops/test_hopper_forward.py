"""What runs around the forward kernel for Hopper, which itself is gated on one."""

import pytest
import torch

from tnp.ops.attention.hopper_forward import (
    KEY_PARTS,
    MIN_BLOCKS_SAVED,
    TILE_ROWS,
    bound_norms,
    schedule,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
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


@pytest.mark.parametrize("n_q, n_k", [(1, 1), (TILE_ROWS.value + 1, 65), (70, 2_100)])
@pytest.mark.parametrize("counted", [False, True])
def test_squared_norms_are_the_largest_of_tiles_and_of_parts(n_q, n_k, counted):
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, 3, n, 64, generator=generator).to(DEVICE) for n in (n_q, n_k))
    n_keys = None
    if counted:
        n_keys = torch.tensor([1, n_k], dtype=torch.int32, device=DEVICE)
        k[0, :, 1:] = 1e30  # padding
    kernel, n_norms = bound_norms(q, k, counted)
    norms = q.new_empty(n_norms)
    kernel(q, k, norms, n_keys if counted else q)
    if counted:
        k[0, :, 1:] = 0.0
    tiles, parts = norms.split([norms.numel() - 6 * KEY_PARTS.value, 6 * KEY_PARTS.value])
    squares = q.square().sum(-1)
    expected = [x.amax(-1) for x in squares.split(TILE_ROWS.value, dim=-1)]
    torch.testing.assert_close(tiles.view(2, 3, -1), torch.stack(expected, -1))
    largest = k.square().sum(-1).amax(-1)
    torch.testing.assert_close(parts.view(2, 3, -1).amax(-1), largest)
