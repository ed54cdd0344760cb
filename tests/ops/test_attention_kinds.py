"""Attention of every kind through the public function: masks, grouped heads, what is refused."""

import sys

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from tests.ops.attention_kinds import (
    HEAD_DIM,
    NAMES,
    OURS,
    SCALE,
    N,
    assert_close,
    cu_seqlens,
    draw,
    ours,
    run,
)
from tests.ops.opaque import require_contracts
from tests.ops.problems import DEVICE, assert_within_budget, by, setting
from tnp.dispatch import plans
from tnp.dispatch.call import call
from tnp.ops.attention import OPERATOR, attention
from tnp.ops.attention.keys import Reach

# ------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("implementation", [*OURS, "reference", "sdpa_flash"])
def test_causal_is_pytorchs(implementation):
    inputs = draw()
    found = run(inputs, causal=True, implementation=implementation)
    assert_close(found, run(inputs, scaled_dot_product_attention, is_causal=True, scale=SCALE))


@ours
@pytest.mark.parametrize("window", [None, 9])
def test_the_last_queries_stand_beside_the_last_keys(implementation, window):
    q, k, v, do = draw()
    asked = {"causal": True, "window": window, "implementation": implementation}
    last = attention(q[:, :, -5:], k, v, **asked)
    torch.testing.assert_close(last, attention(q, k, v, **asked)[:, :, -5:], rtol=1e-4, atol=1e-5)


@ours
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n_q, n_k, window", [(N, N, 33), (N, N, 1), (20, N, 2), (N, 20, 7)])
def test_a_window_is_the_mask_that_says_so(implementation, causal, n_q, n_k, window):
    """A mask made here by hand; where a query sees no key PyTorch has NaN, and we 0."""
    query, key = torch.arange(n_q)[:, None], torch.arange(n_k)[None]
    later = key - (query + n_k - n_q)
    seen = (later > -window) & (later < (1 if causal else window))
    sees = seen.any(1)
    q, k, v, do = draw(n_q, n_k)
    asked = {"causal": causal, "window": window, "implementation": implementation}
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


@ours
def test_a_window_of_all_keys_is_none(implementation):
    *inputs, _ = draw()
    for causal in (True, False):
        asked = {"causal": causal, "implementation": implementation}
        o = attention(*inputs, **asked)
        torch.testing.assert_close(attention(*inputs, window=N, **asked), o, rtol=1e-4, atol=1e-5)


HUGE = (2**31 - 1, sys.maxsize, 2**70)


@pytest.mark.parametrize("implementation", [*OURS, "sdpa_flash"])
@pytest.mark.parametrize("causal", [True, False])
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
    """As from a configuration, which goes by no public function."""

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
@pytest.mark.parametrize("kind", [{"causal": True}, {"window": 9}], ids=str)
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


# ----------------------------------------------------------------------------------- grouped heads


@ours
@pytest.mark.parametrize("heads, kind", [((4, 2), {"causal": True}), ((3, 1), {})], ids=str)
def test_grouped_heads_are_repeated_heads(implementation, heads, kind):
    """And gradients of keys are summed over the heads that share them."""
    q, k, v, do = draw(20, 33, heads, batch=2)
    group = heads[0] // heads[1]
    repeated = (q, *(x.repeat_interleave(group, 1) for x in (k, v)), do)
    expected = run(repeated, implementation=implementation, **kind)
    for name in ("dk", "dv"):
        expected[name] = expected[name].unflatten(1, (-1, group)).sum(2)
    assert_close(run((q, k, v, do), implementation=implementation, **kind), expected)


@ours
@pytest.mark.parametrize("head_dim", [48, 96, 256])
def test_head_dims(implementation, head_dim):
    """Of grouped heads, causal, in 16 bits, within the budget."""
    sizes = {"batch": 1, "n_heads": 2, "n_q": 20, "n_k": 33, "head_dim": head_dim}
    of = setting(OPERATOR, implementation, "bfloat16", **sizes, causal=True, n_kv_heads=1)
    assert_within_budget(of, by(of, implementation))


# ------------------------------------------------------------------------- nothing there to be seen


@ours
@pytest.mark.parametrize("kind, blind", [({"causal": True}, 30), ({"window": 3}, 28)], ids=str)
def test_queries_that_see_no_key(implementation, kind, blind):
    """More queries than keys: the first stand before every key. They give and get nothing."""
    inputs = draw(N, 20)
    found = run(inputs, implementation=implementation, **kind)
    for name in ("o", "dq"):
        assert (found[name][:, :, :blind] == 0).all()
        # The first that sees sees one key, whose weight is 1 whatever the query holds.
        seeing = found[name][:, :, blind + (name == "dq") :]
        assert (seeing != 0).any(-1).all()
    for x in (inputs[0], inputs[3]):
        x[:, :, :blind] *= 1e3
    again = run(inputs, implementation=implementation, **kind)
    assert torch.equal(found["dv"], again["dv"]) and torch.equal(found["dk"], again["dk"])


# ------------------------------------------------------------------------------ PyTorch's machinery

CU = {"cu_seqlens_q": cu_seqlens([8, 12]), "cu_seqlens_k": cu_seqlens([8, 12])}
EACH = [{"causal": True, "window": 9, "heads": (2, 1)}, CU, CU | {"causal": True}]
each = pytest.mark.parametrize("kind", EACH, ids=lambda kind: "-".join(kind))


@ours
@each
def test_compiles_in_one_graph(implementation, kind):
    torch._dynamo.reset()
    asked = {"implementation": implementation} | kind
    inputs = draw(20, 20, asked.pop("heads", (1, 1)))
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    assert_close(run(inputs, compiled, **asked), run(inputs, **asked))


@ours
@pytest.mark.parametrize("kind", [CU, {"n_keys": cu_seqlens([20])[1:]}], ids="-".join)
def test_fake_tensors_are_not_asked_what_they_hold(implementation, kind):
    x = draw(20, 20)[0]
    with FakeTensorMode() as mode:
        fake = {name: mode.from_tensor(one) for name, one in ({"x": x} | kind).items()}
        q = fake.pop("x")
        assert attention(q, q, q, implementation=implementation, **fake).shape == x.shape


@ours
@each
def test_operators_keep_their_contracts(implementation, kind):
    asked = dict(kind)
    *inputs, _ = draw(20, 20, asked.pop("heads", (1, 1)))
    inputs = [x.requires_grad_() for x in inputs]
    inputs += [asked.pop(name, None) for name in OPERATOR.tensors[3:]]
    require_contracts(OPERATOR, implementation, inputs, tuple(asked.items()))


@ours
def test_a_gradient_alone_is_that_among_others(implementation):
    q, k, v, do = draw(20, 33, heads=(2, 1))
    asked = {"causal": True, "window": 9, "implementation": implementation}
    expected = run((q, k, v, do), **asked)
    for index, name in enumerate(NAMES[1:]):
        inputs = [q, k, v]
        inputs[index] = leaf = inputs[index].detach().requires_grad_()
        (alone,) = torch.autograd.grad(attention(*inputs, **asked), leaf, do)
        torch.testing.assert_close(alone, expected[name], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------- what is bad


def bad_inputs():
    x = torch.zeros(1, 2, 8, HEAD_DIM, device=DEVICE)
    half = cu_seqlens([4, 4])
    both = {"cu_seqlens_q": half, "cu_seqlens_k": half}
    n_keys = torch.ones(1, dtype=torch.int32, device=DEVICE)
    two = torch.zeros(2, 2, 8, HEAD_DIM, device=DEVICE)
    yield "window is 0: it must be a whole number, at least 1", x, x, {"window": 0}
    yield "window is -1: it must be a whole number, at least 1", x, x, {"window": -1}
    yield "window is 1.5", x, x, {"window": 1.5}
    yield "k has 2 heads and q 3: theirs must divide q's", x[:, [0, 1, 1]], x, {}
    yield "k has 4 heads and q 2", x, x[:, [0, 1, 1, 0]], {}
    yield "k has 0 heads and q 2", x, x[:, :0], {}
    yield "cu_seqlens_k is None: packed sequences need", x, x, {"cu_seqlens_q": half}
    yield "cu_seqlens_q is None: packed sequences need", x, x, {"cu_seqlens_k": half}
    yield "cu_seqlens_k is torch.int64", x, x, both | {"cu_seqlens_k": half.long()}
    yield "cu_seqlens_q is torch.int32 \\(1, 3\\)", x, x, both | {"cu_seqlens_q": half[None]}
    yield "cu_seqlens_q is torch.int32 \\(1,\\)", x, x, both | {"cu_seqlens_q": half[:1]}
    yield "cu_seqlens_k is on meta", x, x, both | {"cu_seqlens_k": half.to("meta")}
    yield "q has a batch of 2: packed sequences lie in a batch of 1", two, two, both
    yield "n_keys and cu_seqlens are both given", x, x, both | {"n_keys": n_keys}
    yield "q has 0 heads: attention needs at least one", x[:, :0], x, {}
    yield "q has 0 heads: attention needs at least one", x[:, :0], x[:, :0], {}
    yield "q is of type list: it must be a tensor", [1], x, {}
    yield "k is of type list: it must be a tensor", x, [1], {"window": 3}
    for name, value in (("causal", "no"), ("causal", 1), ("base2", None), ("lse", "yes")):
        yield f"{name} is {value!r}: it must be True or False", x, x, {name: value}
    sentence = "it must be torch.bfloat16 or torch.float16"
    yield f"compute_dtype is torch.float64: {sentence}", x, x, {"compute_dtype": torch.float64}
    yield f"compute_dtype is torch.int32: {sentence}", x, x, {"compute_dtype": torch.int32}
    yield f"compute_dtype is 'bfloat16': {sentence}", x, x, {"compute_dtype": "bfloat16"}
    in_16_bits = {"compute_dtype": torch.bfloat16}
    yield "q is torch.int64: it must be a float dtype", x.long(), x, in_16_bits
    yield "q is torch.float32 on .* and k torch.float16 on", x, x.half(), in_16_bits
    more = cu_seqlens([4, 2, 2])
    yield "cu_seqlens_q has 3 numbers and cu_seqlens_k 4", x, x, both | {"cu_seqlens_k": more}


def str_of(x) -> str:
    """What names a test: sentences."""
    return x if isinstance(x, str) else ""


@pytest.mark.parametrize("implementation", [*OURS, "reference"])
@pytest.mark.parametrize("sentence, q, k, asked", list(bad_inputs()), ids=str_of)
def test_bad_input_is_one_sentence(implementation, sentence, q, k, asked):
    with pytest.raises(ValueError, match=sentence):
        attention(q, k, k, implementation=implementation, **asked)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there the host does not know them")
@pytest.mark.parametrize("implementation", [*OURS, "reference", "sdpa_flash"])
@pytest.mark.parametrize("wrong", [0, -3, 9])
def test_n_keys_out_of_range_are_one_sentence_on_the_cpu(implementation, wrong):
    x, n_keys = torch.zeros(2, 1, 8, HEAD_DIM), torch.tensor([8, wrong], dtype=torch.int32)
    with pytest.raises(ValueError) as raised:
        attention(x, x, x, n_keys=n_keys, implementation=implementation)
    sentence = f"n_keys is {wrong} in sample 1: it must lie between 1 and 8"
    assert str(raised.value) == sentence


# ------------------------------------------------------------------------- computed in other dtypes


@pytest.mark.parametrize("implementation", ["fused", "reference", "sdpa_flash"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_compute_dtype_is_casts_by_hand(implementation, dtype):
    """What comes back has the inputs' dtype, lse stays as it is."""
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
    ("e4m3", {"lse": True}, "it does not take lse=True"),
]


@pytest.mark.parametrize("name, kind, reason", REFUSED)
def test_what_does_not_take_a_kind_says_so(name, kind, reason):
    x = torch.zeros(1, 2, 20, 64, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(RuntimeError, match=f"'{name}' cannot run here: {reason}"):
        attention(x, x, x, implementation=name, **kind)
