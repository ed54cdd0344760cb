"""Tests what other packages' decode attention is given and returns, with stand-ins.

The stand-ins have the layouts, arguments and results of fa3-fwd 0.0.3 and flashinfer-python
0.7.2.post1.
"""

import sys
import types

import pytest
import torch

from tnp.dispatch.devices import named
from tnp.dispatch.spec import Call
from tnp.ops._shared.random_values import Random
from tnp.ops.decode_attention import OPERATOR
from tnp_peers import decode_attention as peers

SIZES = {"batch": 3, "heads": 4, "kv_heads": 2, "n_queries": 1, "n_keys": 96, "head_dim": 64}
DRAW = (("lengths", "1,32,70"),)


def inputs(page=32, seed=0, **sizes) -> list:
    values = {"page": page or 96, "page_table": bool(page)} | SIZES | sizes
    problem = OPERATOR.problem("float32", **values)
    case = OPERATOR.case("float32", *(size for _, size in problem.sizes), **dict(problem.options))
    drawn = OPERATOR.draw(type(case)(problem, DRAW), Random(case, torch.device("cpu"), seed))
    return [drawn[name] for name in OPERATOR.tensors]


def expected(of: list) -> torch.Tensor:
    return OPERATOR.reference(*of, 0.3)


@pytest.fixture
def fa3(monkeypatch):
    def flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens, softmax_scale, causal):
        assert causal and cache_seqlens.dtype == torch.int32
        q, k, v = (x.transpose(1, 2) for x in (q, k_cache, v_cache))
        o = OPERATOR.reference(q, k, v, cache_seqlens, None, None, None, softmax_scale)
        return o.transpose(1, 2).contiguous()

    module = types.ModuleType("fa3_fwd_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", module)


@pytest.mark.parametrize("n_queries", [1, 5])
def test_layouts_of_fa3(fa3, n_queries):
    of = inputs(page=None, n_queries=n_queries)
    torch.testing.assert_close(peers.FA3.run(*of, 0.3), expected(of))


@pytest.fixture
def plans(monkeypatch):
    """Installs a stand-in for FlashInfer, and returns the plans that were made."""
    made = []

    class BatchDecodeWithPagedKVCacheWrapper:
        def __init__(self, workspace, kv_layout, use_tensor_cores):
            assert workspace.dtype == torch.uint8 and kv_layout == "NHD" and use_tensor_cores

        def plan(
            self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            *, q_data_type, kv_data_type, sm_scale,
        ):  # fmt: skip
            made.append(self)
            assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (4, 2, 64, 32)
            assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
            assert q_data_type == kv_data_type == torch.float32
            self.scale = sm_scale
            counts = indptr.diff()
            self.lengths = (counts - 1) * page_size + last_page_len
            assert ((last_page_len >= 1) & (last_page_len <= page_size)).all()
            self.table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
            for b, row in enumerate(self.table):
                row[: counts[b]] = indices[indptr[b] : indptr[b + 1]]

        def run(self, q, paged_kv_cache):
            assert q.dim() == 3 and q.is_contiguous()
            k, v = (x.transpose(1, 2) for x in paged_kv_cache)
            rest = self.lengths.int(), self.table, None, None, self.scale
            return OPERATOR.reference(q.unsqueeze(2), k, v, *rest)[:, :, 0]

    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = BatchDecodeWithPagedKVCacheWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(peers, "WORKSPACE_BYTES", 16)
    peers._plans.clear()
    peers._workspace.cache_clear()
    yield made
    peers._plans.clear()
    peers._workspace.cache_clear()


def test_flashinfer_plans_once_a_composition(plans):
    of = inputs()
    for _ in range(3):
        torch.testing.assert_close(peers.FLASHINFER.run(*of, 0.3), expected(of))
    assert len(plans) == 1
    of[3][2] = 20  # in place
    torch.testing.assert_close(peers.FLASHINFER.run(*of, 0.3), expected(of))
    other = inputs(seed=1)
    torch.testing.assert_close(peers.FLASHINFER.run(*other, 0.3), expected(other))
    assert len(plans) == 3
    for _ in range(2):  # as it is timed
        peers.FLASHINFER.plan(*other, 0.3)
    assert len(plans) == 5


def test_flashinfer_plans_anew_for_tensors_without_versions(plans):
    """Tensors of inference mode have no version."""
    with torch.inference_mode():
        of = [x if x is None else x.clone() for x in inputs()]
        for length in (70, 20, 20):
            of[3][2] = length
            torch.testing.assert_close(peers.FLASHINFER.run(*of, 0.3), expected(of))
    assert len(plans) == 3 and not peers._plans


def test_flashinfer_keeps_so_many_plans(plans, monkeypatch):
    monkeypatch.setattr(peers, "MOST_PLANNED", 2)
    for seed in range(4):
        peers.FLASHINFER.run(*inputs(seed=seed), 0.3)
    assert len(peers._plans) == 2


@pytest.mark.parametrize(
    "peer, change, reason",
    [
        (peers.FA3, {"page_table": False, "head_dim": 48}, "it takes head_dim 64, 128, not 48"),
        (peers.FA3, {"page_table": False, "cache": "e4m3"}, "it does not take cache=e4m3"),
        (peers.FA3, {"page_table": False}, None),
        (peers.FA3, {}, "it does not take page_table=True"),
        (peers.FLASHINFER, {}, None),
        (peers.FLASHINFER, {"page_table": False}, "it takes only a cache in pages"),
        (peers.FLASHINFER, {"n_queries": 5}, "it takes n_queries 1, not 5"),
        (peers.FLASHINFER, {"k_descale": True}, "it does not take k_descale=True"),
    ],
)
def test_limits(peer, change, reason):
    values = {"page": 32, "page_table": True} | SIZES | change
    problem = OPERATOR.problem("bfloat16", **values)
    assert peer.refuses(Call(problem, named("NVIDIA H200"))) == reason
