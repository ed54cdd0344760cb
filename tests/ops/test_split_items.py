"""Tests which items of Hopper's backward passes are split, and the sum of their parts.

The kernel that works on pieces runs on a GPU alone (gate `op--attention--fused` has such problems);
the one that adds them up is interpreted here.
"""

import pytest
import torch

from tests.ops.problems import DEVICE
from tnp.dispatch import devices
from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call
from tnp.gates.checks import relative_error
from tnp.ops.attention import OPERATOR
from tnp.ops.attention.hopper import backward
from tnp.ops.attention.primitives import KeyGradients, n_key_tiles

BLOCK_N = backward.BLOCK_N.value
ONE = backward.DkdvConfig(4, 208, persistent=False)


def call(batch: int, n_q: int, n_k: int, **options) -> Call:
    sizes = {"batch": batch, "n_heads": 8, "n_q": n_q, "n_k": n_k, "head_dim": 64}
    return Call(OPERATOR.problem("bfloat16", **sizes, **options), devices.named("nvidia-h200"))


def rounds(what: Call, found: tuple[int, int] | None) -> float:
    """Returns the whole items of queries that the busiest of 132 multiprocessors walks."""
    n_items = n_key_tiles(what, BLOCK_N)
    n_whole, n_pieces = found or (n_items, 1)
    last = -(-(n_items - n_whole) * n_pieces // 132)
    return -(-n_whole // 132) + last / n_pieces


@pytest.mark.parametrize(("batch", "n_q", "n_k"), [(4, 11_000, 10_000), (3, 21_500, 20_000)])
def test_a_last_round_that_is_nearly_empty_is_split(batch, n_q, n_k):
    what = call(batch, n_q, n_k)
    found = backward.split(what, ONE)
    assert found is not None
    n_items = n_key_tiles(what, BLOCK_N)
    assert found[0] % 132 == 0 and 0 < n_items - found[0] < 132
    assert rounds(what, found) < rounds(what, None) - 0.3
    assert rounds(what, found) >= n_items / 132


def test_nothing_is_split_where_it_does_not_pay_or_samples_have_keys_of_their_own():
    for what in (
        call(4, 11_000, 10_000, n_keys=True),
        call(1, 11_000, 10_000),  # 104 of the last 132 programs have an item
        call(64, 564, 700),  # short walks
        call(1, 205_000, 200_000),  # 95 rounds, of which the last counts little
    ):
        assert backward.split(what, ONE) is None
    persistent = backward.DkdvConfig(4, 208, persistent=True)
    assert backward.split(call(4, 11_000, 10_000), persistent) is None


def test_counts_of_a_launch_include_the_split():
    what = call(4, 11_000, 10_000)
    _, items, walked, _ = backward.item_counts(what, ONE)
    tiles = -(-11_000 // backward.TILE_ROWS)
    assert items == 20
    assert walked == pytest.approx(rounds(what, backward.split(what, ONE)) * tiles, abs=1)
    _, items, walked, _ = backward.item_counts(call(1, 11_000, 10_000), ONE)
    assert (items, walked) == (5, 5 * tiles)


@pytest.mark.parametrize("section", [1, 2])
@pytest.mark.parametrize("apart", [False, True])
def test_pieces_are_added_up_where_their_item_lies(apart, section):
    """Two heads of three blocks of keys, the last ragged; the last two are in three pieces. They
    are blocks 1 and 2 of the second head, or where heads are taken in turn block 2 of each.
    """
    batch, n_heads, n_k, head_dim, n_pieces = 1, 2, 2 * BLOCK_N + 37, 64, 3
    n_whole, n_split = 4, 2
    k = torch.zeros(batch, n_heads, n_k, head_dim, device=DEVICE)
    pieces = torch.randn(n_split, n_pieces, 2, BLOCK_N, head_dim, device=DEVICE)
    of_keys = KeyGradients(k, apart)
    dk, dv = of_keys.allocate(k)
    dk.fill_(7.0)
    dv.fill_(8.0)
    rows = backward.PIECE_ROWS
    add = Bound(
        backward._add_pieces_kernel, (n_split, BLOCK_N // rows, 2),
        *of_keys.strides, n_heads, n_k, n_whole + n_split, n_whole, n_pieces, section,
        HEAD_DIM=head_dim, BLOCK_N=BLOCK_N, ROWS=rows,
    )  # fmt: skip
    add(pieces, dk, dv)
    for found, at, untouched in ((dv, 0, 8.0), (dk, 1, 7.0)):
        expected = torch.full((batch, n_heads, n_k, head_dim), untouched, dtype=torch.float64)
        sums = pieces[:, :, at].double().sum(1).cpu()
        if section == 1:
            expected[0, 1, BLOCK_N : 2 * BLOCK_N] = sums[0]
            expected[0, 1, 2 * BLOCK_N :] = sums[1, :37]
        else:
            expected[0, :, 2 * BLOCK_N :] = sums[:, :37]
        assert relative_error(found.cpu(), expected) < 1e-6


@pytest.mark.parametrize(
    ("sizes", "options", "is_served"),
    [
        ((1, 777, 777), {"causal": True}, True),  # 56 programs, the longest walks 52 tiles
        ((1, 2048, 2048), {"causal": True}, True),
        ((1, 2048, 2048), {}, True),  # 128 programs
        ((2, 2048, 2048), {}, False),
        ((1, 4097, 4097), {"causal": True}, False),
        ((8, 2048, 2048), {"causal": True}, False),
        ((1, 4097, 4097), {"causal": True, "window": 500}, False),
    ],
)
def test_heads_have_programs_of_their_own_where_the_gpu_would_be_empty(sizes, options, is_served):
    batch, n_q, n_k = sizes
    of = {"batch": batch, "n_heads": 32, "n_q": n_q, "n_k": n_k, "head_dim": 128}
    for heads in (0, 8):
        problem = OPERATOR.problem("bfloat16", **of, n_kv_heads=heads, **options)
        call = Call(problem, devices.named("nvidia-h200"), ("q", "k", "v"))
        reason, configs = backward.by_head(call), backward.separate_configs(call)
        assert (reason is None) is (is_served and heads > 0), reason
        expected = [True, False] if reason is None else [False]
        assert [config.by_head for config in configs] == expected
        assert [config.by_head for config in backward.fused_configs(call)] == expected


def test_heads_that_share_no_keys_have_no_shares():
    """Holds for any number of heads."""
    reason = backward.by_head(call(1, 777, 777))
    assert reason == "it is for heads that share keys"


def test_shares_of_heads_have_a_limit():
    """64 heads that share one of keys would take 1.6 GB for 24,000 of them."""
    of = {"batch": 1, "n_heads": 64, "n_kv_heads": 1, "head_dim": 128, "causal": True}
    for n, reason in ((2000, None), (24_000, "would take 1,572,864,000 bytes")):
        problem = OPERATOR.problem("bfloat16", **of, n_q=n, n_k=n)
        found = backward.by_head(Call(problem, devices.named("nvidia-h200"), ("q", "k", "v")))
        assert found == reason or reason in found


@pytest.mark.skipif(DEVICE.type == "cuda", reason="the gate runs it there")
@pytest.mark.parametrize("apart", [False, True])
def test_shares_of_heads_are_added_up(apart):
    batch, n_k, n_kv_heads, group, head_dim = 2, 70, 3, 4, 64
    generator = torch.Generator().manual_seed(0)
    shares = torch.randn(2, batch, n_k, n_kv_heads * group, head_dim, generator=generator)
    k = torch.empty(batch, n_k, n_kv_heads, head_dim).transpose(1, 2)
    of_keys = KeyGradients(k, apart)
    dk, dv = (x.fill_(7.0) for x in of_keys.allocate(k))
    launch = Bound(
        backward._add_shares_kernel,
        (-(-n_k // backward.PIECE_ROWS), batch * n_kv_heads, 2),
        *of_keys.strides, batch, n_k,
        N_HEADS=n_kv_heads * group, GROUP=group, HEAD_DIM=head_dim, ROWS=backward.PIECE_ROWS,
    )  # fmt: skip
    launch(shares.flatten(1), dk, dv)
    expected = shares.unflatten(3, (n_kv_heads, group)).sum(4).transpose(2, 3)
    torch.testing.assert_close(torch.stack([dk, dv]), expected)
