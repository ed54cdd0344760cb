"""Tests the lab's simple attention in the interpreter. On a GPU its gate does."""

from functools import partial

import pytest
import torch

from tests.lab.judging import assert_within_budget, refused
from tests.ops.problems import DEVICE
from tnp.ops import attention

CASES = [
    ("float16", 1, 1, 16, {}),
    ("bfloat16", 70, 33, 64, {"n_kv_heads": 2, "lse": True}),
    ("float16", 33, 65, 64, {"causal": True}),  # several tiles of queries, with an offset
    ("bfloat16", 50, 20, 64, {"causal": True}),  # the first 30 queries see no key
    ("float16", 33, 256, 64, {"base2": True, "magnitude": 8.0}),
    ("bfloat16", 65, 128, 128, {"causal": True}),
    ("bfloat16", 20, 30, 32, {"n_kv_heads": 0}),  # heads share no keys
]


def case(dtype, n_q, n_k, head_dim, kind):
    kind = {"n_kv_heads": 1} | kind
    return attention.OPERATOR.case(
        dtype, 2, 2 * max(kind["n_kv_heads"], 1), n_q, n_k, head_dim, **kind
    )


@pytest.mark.skipif(DEVICE.type == "cuda", reason="judged on a CPU, where it is interpreted")
@pytest.mark.parametrize("problem", CASES)
def test_it_is_within_its_budget(problem):
    assert_within_budget("attention", "simple", case(*problem))


def test_a_query_that_sees_no_key_gives_zeros():
    q, k = (
        torch.randn(1, 1, 5, 64, device=DEVICE).half(),
        torch.randn(1, 1, 3, 64).to(DEVICE).half(),
    )
    o, lse = attention.attention(q, k, k, causal=True, lse=True, implementation="simple")
    assert (o[0, 0, :2] == 0).all() and lse[0, 0, :2].tolist() == [-float("inf")] * 2
    assert torch.isfinite(lse[0, 0, 2:]).all()


def test_refusals():
    refuses = partial(refused, "attention", "simple", "float16", batch=1, n_heads=2, n_q=9)
    assert refuses(n_k=256, head_dim=64) is None and refuses(n_k=128, head_dim=128) is None
    assert "holds 128 keys and there are 129" in refuses(n_k=129, head_dim=128)
    assert "16, 32, 64, 128, not 80" in refuses(n_k=9, head_dim=80)
    assert refuses(n_k=9, head_dim=64, wanted=("q",)) == "it is forward only"
