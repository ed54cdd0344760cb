"""Tests attention of every kind through the public function: masks, lengths, dtypes."""

import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from tests.ops.attention_kinds import (
    SCALE,
    N,
    assert_close,
    cu_seqlens,
    draw,
    ours,
    run,
)
from tests.ops.opaque import require_contracts
from tests.ops.problems import DEVICE
from tnp.dispatch import plans
from tnp.dispatch.call import call
from tnp.ops.attention import OPERATOR, attention
from tnp.ops.attention.keys import Reach

# ------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("implementation", ["reference", "sdpa_flash"])
def test_causal_is_pytorchs(implementation):
    inputs = draw()
    found = run(inputs, causal=True, implementation=implementation)
    assert_close(found, run(inputs, scaled_dot_product_attention, is_causal=True, scale=SCALE))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n_q, n_k, window", [(N, N, 33), (N, N, 1), (20, N, 2), (N, 20, 7)])
def test_a_window_is_the_mask_that_says_so(causal, n_q, n_k, window):
    """A mask made here by hand; where a query sees no key PyTorch has NaN, and we 0.

    The gate compares ours with this reference.
    """
    query, key = torch.arange(n_q)[:, None], torch.arange(n_k)[None]
    later = key - (query + n_k - n_q)
    seen = (later > -window) & (later < (1 if causal else window))
    sees = seen.any(1)
    q, k, v, do = draw(n_q, n_k)
    asked = {"causal": causal, "window": window, "implementation": "reference"}
    found = run((q, k, v, do), **asked)
    of_those = (q[:, :, sees], k, v, do[:, :, sees])
    mask = seen[sees].to(DEVICE)
    expected = run(of_those, scaled_dot_product_attention, attn_mask=mask, scale=SCALE)
    for name in ("o", "dq"):
        assert (found[name][:, :, ~sees] == 0).all()
        found[name] = found[name][:, :, sees]
    for name in ("dk", "dv"):
        assert (found[name][:, :, ~seen.any(0)] == 0).all()
    assert_close(found, expected)


HUGE = (2**31 - 1, sys.maxsize, 2**70)


@pytest.mark.parametrize("implementation, causal", [("fused", True), ("sdpa_flash", False)])
def test_a_window_that_bounds_nothing_has_the_plan_of_none(implementation, causal):
    """However long it is: no number of it comes to a kernel."""
    inputs, asked = draw(5, 7), {"causal": causal, "implementation": implementation}
    expected = run(inputs, **asked)
    known = set(plans.plans(OPERATOR).by_key)
    for window in (12, HUGE[-1]):
        found = run(inputs, window=window, **asked)
        assert all(torch.equal(found[name], x) for name, x in expected.items())
    assert set(plans.plans(OPERATOR).by_key) == known
    run(inputs, window=11, **asked)
    assert set(plans.plans(OPERATOR).by_key) != known


@pytest.mark.parametrize("implementation", ["fused", "reference"])
def test_a_problem_with_a_huge_window_is_one_without(implementation):
    """A configuration asks so, without the public function."""

    def windowed(*inputs, **asked):
        options = tuple(asked.items())
        return call(OPERATOR, implementation, (*inputs, *[None] * 3), (SCALE,), options)

    inputs = draw(5, 7)
    expected = run(inputs, windowed, causal=True)
    for window in HUGE:
        assert_close(run(inputs, windowed, causal=True, window=window), expected)


def test_a_reach_fits_32_bits():
    sizes = {"batch": 1, "n_heads": 1, "n_q": 5, "n_k": 7, "head_dim": 16}
    numbers = {
        window: Reach.of(OPERATOR.problem("float32", **sizes, window=window)).numbers
        for window in (3, 12, *HUGE)
    }
    assert numbers == {3: (2, 2)} | dict.fromkeys((12, *HUGE), (11, 11))


@ours
@pytest.mark.parametrize("kind", [{"window": 9}], ids=str)
def test_a_sample_ends_with_its_own_keys(implementation, kind):
    """Its last query stands beside the last of them; padding weighs nothing."""
    lengths = (21, N)
    q, k, v, do = draw(batch=2)
    for x in (k, v):
        x[0, :, 21:] = 1e30
    n_keys = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    found = run((q, k, v, do), n_keys=n_keys, implementation=implementation, **kind)
    for b, n in enumerate(lengths):
        rows = slice(b, b + 1)
        alone = (q[rows], k[rows, :, :n], v[rows, :, :n], do[rows])
        expected = run(alone, implementation=implementation, **kind)
        of_sample = {name: x[rows] for name, x in found.items()}
        for name in ("dk", "dv"):
            assert (of_sample[name][:, :, n:] == 0).all()
            of_sample[name] = of_sample[name][:, :, :n]
        assert_close(of_sample, expected)


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on CUDA other functions of PyTorch do it")
@pytest.mark.parametrize("n_q, n_k", [(7, 20), (20, 7)])
@pytest.mark.parametrize(
    "kind",
    [
        {"causal": True},
        {"window": 3},
        {"causal": True, "n_keys": torch.tensor([4, 7], dtype=torch.int32)},
        {"window": 2, "n_keys": torch.tensor([4, 7], dtype=torch.int32)},
    ],
    ids=str,
)
def test_flash_on_the_cpu_takes_every_mask(n_q, n_k, kind):
    """Grouped heads with it, and 0 where a query sees no key."""
    inputs = draw(n_q, n_k, (4, 2), batch=2)
    expected = run(inputs, implementation="reference", **kind)
    assert_close(run(inputs, implementation="sdpa_flash", **kind), expected)


# ------------------------------------------------------------------------------ PyTorch's machinery

CU = {"cu_seqlens_q": cu_seqlens([8, 12]), "cu_seqlens_k": cu_seqlens([8, 12])}
COUNTED = {"n_keys": cu_seqlens([20])[1:]}
EACH = [{"causal": True, "window": 9, "heads": (2, 1)}, CU | {"causal": True}, COUNTED]
each = pytest.mark.parametrize("kind", EACH, ids=lambda kind: "-".join(kind))


@each
def test_compiles_in_one_graph(kind):
    torch._dynamo.reset()
    asked = {"implementation": "fused"} | kind
    inputs = draw(20, 20, asked.pop("heads", (1, 1)))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert_close(run(inputs, compiled, **asked), run(inputs, **asked))


@ours
@pytest.mark.parametrize("kind", [CU, COUNTED], ids="-".join)
def test_values_of_fake_tensors_are_not_read(implementation, kind):
    x = draw(20, 20)[0]
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(one) for name, one in ({"x": x} | kind).items()}
        q = fake.pop("x")
        assert attention(q, q, q, implementation=implementation, **fake).shape == x.shape


@each
def test_operators_keep_their_contracts(kind):
    asked = dict(kind)
    *inputs, _ = draw(20, 20, asked.pop("heads", (1, 1)))
    inputs = [x.requires_grad_() for x in inputs]
    inputs += [asked.pop(name, None) for name in OPERATOR.tensors[3:]]
    require_contracts(OPERATOR, "fused", inputs, tuple(asked.items()))


# ------------------------------------------------------------------------- computed in other dtypes


@pytest.mark.parametrize(
    "implementation, dtype",
    [("fused", torch.float32), ("reference", torch.float64), ("sdpa_flash", torch.float32)],
)
def test_a_compute_dtype_is_casts_by_hand(implementation, dtype):
    """Results have the inputs' dtype, and lse stays float32."""
    inputs = [x.to(dtype) for x in draw(5, 7)]
    asked = {"causal": True, "implementation": implementation}

    def by_hand(q, k, v, **options):
        return attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), **options).to(dtype)

    found = run(inputs, compute_dtype=torch.bfloat16, **asked)
    for name, x in run(inputs, by_hand, **asked).items():
        assert found[name].dtype == dtype and torch.equal(found[name], x), name
    if implementation != "sdpa_flash":
        o, lse = attention(*inputs[:3], compute_dtype=torch.bfloat16, lse=True, **asked)
        assert torch.equal(o, found["o"]) and lse.dtype == torch.float32


REFUSED = [
    ("e4m3", {"causal": True}, "it does not take causal=True"),
    ("e4m3", {"window": 3}, "it does not take window=3"),
    ("e4m3", CU, "it does not take cu_seqlens_k=True"),
    ("sdpa_cudnn", {"window": 3}, "it does not take window=3"),
    ("sdpa_cudnn", CU, "it does not take cu_seqlens_k=True"),
    ("sdpa_flash", {"lse": True}, "it does not take lse=True"),
    ("sdpa_cudnn", {"lse": True}, "it does not take lse=True"),
]


@pytest.mark.parametrize("name, kind, reason", REFUSED)
def test_an_implementation_that_refuses_a_kind_says_so(name, kind, reason):
    x = torch.zeros(1, 2, 20, 64, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(RuntimeError, match=f"'{name}' cannot run here: {reason}"):
        attention(x, x, x, implementation=name, **kind)
