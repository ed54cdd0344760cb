"""What runs ahead of Hopper's backward kernels, in the interpreter: weights of do, lse, flags."""

import pytest
import torch

from tests.ops.problems import DEVICE
from tnp import targets
from tnp.contract import Call
from tnp.ops.attention import OPERATOR
from tnp.ops.attention.hopper_backward import PADDED_ROWS, TILE_ROWS, _bound_statistics

N_Q, N_HEADS = 150, 3
PADDED = 256


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
    call = Call(OPERATOR.problem("bfloat16", **sizes, base2=True), targets.named("H200"))
    assert PADDED % PADDED_ROWS.value == 0

    rows = N_HEADS * PADDED
    statistics = torch.full([2 * rows + N_HEADS], 7.0)
    dq = torch.full([rows * 64], 7.0)
    weighted = torch.full([1, N_HEADS, PADDED, 64], 7.0, dtype=torch.bfloat16)
    launch = _bound_statistics(call, o, do, fused=True, base2=True)
    launch(o, do, lse, statistics, dq, weighted)

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
    assert (found_lse[0, N_Q:] == 0).all() and torch.isinf(found_lse[2, N_Q:192]).all()
