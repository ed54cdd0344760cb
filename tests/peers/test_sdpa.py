"""Tests that PyTorch's SDPA computes what the plain forms compute, with gradients."""

from functools import partial

import pytest

from tests.ops.problems import assert_within_budget, results, setting
from tnp.dispatch.spec import Operator
from tnp.ops.buffered_attention import OPERATOR as BUFFERED
from tnp.ops.transformer_block import OPERATOR as BLOCK
from tnp_peers import sdpa

# A context of 7 points, a buffer of 4, a group beside it and 2 other rows.
AROUND = {"batch": 2, "n_heads": 2, "n_q": 17, "n_k": 11, "head_dim": 16}
AROUND |= {"n_buffer": 4, "n_groups": 1, "all_rows": True}
ROWS = {"batch": 2, "rows": 9, "d_model": 32, "d_ff": 48, "n_heads": 2, "n_q": 6, "n_k": 5}


@pytest.mark.parametrize("n_keys", [False, True])
@pytest.mark.parametrize(
    ("operator", "ours", "peer", "problem"),
    [
        (BUFFERED, "triton", sdpa.BUFFERED, AROUND),
        (BUFFERED, "triton", sdpa.BUFFERED, AROUND | {"base2": True}),
        (BLOCK, "fused", sdpa.BLOCK, ROWS | {"update": True}),
        (BLOCK, "fused", sdpa.BLOCK, ROWS | {"centred": True}),
    ],
    ids=["buffer", "buffer base2", "block with update", "block centred"],
)
def test_sdpa_computes_the_formula(operator: Operator, ours, peer, problem, n_keys):
    of = setting(operator, ours, "float32", n_keys=n_keys, **problem)
    assert_within_budget(of, results(of, partial(peer.run, **of.options)))
