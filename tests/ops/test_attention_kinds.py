"""Attention of every kind through the public function: masks, grouped heads, packed sequences."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError

from tests.ops.opaque import require_contracts
from tests.ops.problems import DEVICE, HERE, assert_within_budget, by, setting
from tnp import plans, selection
from tnp.contract import OWN
from tnp.ops.attention import OPERATOR, attention, keys
from tnp.ops.attention.torch_forms import visible

OURS = [
    x.name
    for x in OPERATOR.implementations
    if x.provider == OWN and x.differentiable and x.selectable
]
ours = pytest.mark.parametrize("implementation", OURS)
NAMES = ("o", "dq", "dk", "dv")
N = 50  # more than a tile of any kernel in float32
HEAD_DIM = 16
SCALE = 1 / math.sqrt(HEAD_DIM)


def draw(n_q: int = N, n_k: int = N, heads=(2, 2), batch: int = 1) -> list[torch.Tensor]:
    """q, k, v and do."""
    generator = torch.Generator().manual_seed(n_q + n_k)
    sizes = ((heads[0], n_q), (heads[1], n_k), (heads[1], n_k), (heads[0], n_q))
    return [
        torch.randn(batch, *size, HEAD_DIM, generator=generator).to(DEVICE) for size in sizes
    ]  # fmt: skip


def run(inputs, function=attention, **asked) -> dict[str, torch.Tensor]:
    """o, dq, dk, dv of (q, k, v, do), by name."""
    *leaves, do = (x.detach() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    o = function(*leaves, **asked)
    return dict(zip(NAMES, (o.detach(), *torch.autograd.grad(o, leaves, do)), strict=True))


def assert_close(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def cu_seqlens(lengths) -> torch.Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(DEVICE, torch.int32)


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


@pytest.mark.skipif(DEVICE.type != "cpu", reason="on CUDA other functions of PyTorch do it")
def test_flash_on_the_cpu_takes_packed_sequences():
    inputs = draw(20, 33)
    asked = {"cu_seqlens_q": cu_seqlens((5, 0, 15)), "cu_seqlens_k": cu_seqlens((3, 9, 21))}
    for kind in ({}, {"causal": True}):
        expected = run(inputs, implementation="reference", **asked, **kind)
        assert_close(run(inputs, implementation="sdpa_flash", **asked, **kind), expected)


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


# -------------------------------------------------------------------------------- packed sequences

LENGTHS, KEY_LENGTHS = (5, 0, 17, 28), (9, 3, 0, 38)
KINDS = ({}, {"causal": True}, {"window": 9}, {"causal": True, "window": 9})


def of_sequence(x: torch.Tensor, cu: torch.Tensor, s: int) -> torch.Tensor:
    return x[:, :, cu[s] : cu[s + 1]]


@ours
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_packed_sequences_are_each_alone(implementation, kind):
    """Some without queries, some without keys; of grouped heads."""
    inputs = draw(sum(LENGTHS), sum(KEY_LENGTHS), heads=(2, 1))
    cu_q, cu_k = cu_seqlens(LENGTHS), cu_seqlens(KEY_LENGTHS)
    asked = {"implementation": implementation} | kind
    found = run(inputs, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **asked)
    sides = {"o": cu_q, "dq": cu_q, "dk": cu_k, "dv": cu_k}
    for s in range(len(LENGTHS)):
        of_this = {name: of_sequence(x, sides[name], s) for name, x in found.items()}
        alone = [
            of_sequence(x, cu, s) for x, cu in zip(inputs, (cu_q, cu_k, cu_k, cu_q), strict=True)
        ]  # fmt: skip
        if LENGTHS[s] and KEY_LENGTHS[s]:
            assert_close(of_this, run(alone, **asked))
        else:
            assert all((x == 0).all() for x in of_this.values())


def test_packed_sequences_are_each_alone_bit_by_bit_where_tiles_agree():
    """A sequence's tiles begin with it, and the separate backward pass adds in one order."""
    inputs, cu = draw(), cu_seqlens(LENGTHS)
    asked = {"implementation": "separate", "causal": True}
    found = run(inputs, cu_seqlens_q=cu, cu_seqlens_k=cu, **asked)
    for s in (0, 2, 3):
        alone = run([of_sequence(x, cu, s) for x in inputs], **asked)
        for name, x in alone.items():
            assert torch.equal(of_sequence(found[name], cu, s), x), name


@ours
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_sequence_sees_nothing_of_another(implementation, kind):
    """Not even what is not finite there."""
    inputs, cu = draw(), cu_seqlens(LENGTHS)
    asked = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "implementation": implementation} | kind
    before = run(inputs, **asked)
    for x in inputs:
        of_sequence(x, cu, 2)[:] = float("nan")
    after = run(inputs, **asked)
    for s in (0, 3):
        for name in NAMES:
            pair = (of_sequence(x[name], cu, s) for x in (before, after))
            assert torch.equal(*pair), name


@ours
def test_a_batch_is_sequences_of_equal_length(implementation):
    inputs = draw(20, 33, batch=3)
    packed = [x.transpose(0, 1).flatten(1, 2)[None] for x in inputs]
    cu = {"cu_seqlens_q": cu_seqlens([20] * 3), "cu_seqlens_k": cu_seqlens([33] * 3)}
    found = run(packed, causal=True, implementation=implementation, **cu)
    unpacked = {name: x[0].unflatten(1, (3, -1)).transpose(0, 1) for name, x in found.items()}
    assert_close(unpacked, run(inputs, causal=True, implementation=implementation))


@pytest.mark.parametrize("side", ["n_q", "n_k"])
def test_the_table_of_tiles(side):
    """Of each tile its sequence and its first row there. Of more sequences than a program of the
    table reads at a time, among them empty ones, one of a whole tile and one of several.
    """
    lengths = [3, 0, 16, *[0] * 127, 5, 40, 0, 1]
    x, cu = torch.zeros(1, 1, sum(lengths), HEAD_DIM, device=DEVICE), cu_seqlens(lengths)
    inputs = x, x, x, None, cu, cu
    tiles = keys.Tiles(selection.describe(OPERATOR, inputs, (), (), HERE), side, 16)
    table = tiles.pointers(inputs[3:], x)[0].tolist()
    expected = [[s, row] for s, n in enumerate(lengths) for row in range(0, n, 16)]
    assert table[: len(expected)] == expected
    assert table[len(expected) :] == [[-1, 0]] * (tiles.n - len(expected))


@pytest.fixture
def asserting(monkeypatch):
    """Have the interpreter run assertions of kernels, as devices do; it passes them over."""
    builder = interpreter.interpreter_builder
    monkeypatch.setattr(builder, "options", replace(builder.options, debug=True))


@pytest.mark.skipif(DEVICE.type == "cuda", reason="there an assertion ends the CUDA context")
@ours
@pytest.mark.parametrize(
    "ends, sentence",
    [
        ([0, 5, 3, 8], "cu_seqlens decrease"),
        ([1, 2, 3, 8], "must begin with 0"),
        ([0, 2, 3, 7], "must end with all rows"),
        ([0, 2, 3, 9], "name rows that there are not"),
        ([0, -1, 3, 8], "cu_seqlens decrease"),
    ],
    ids=str,
)
def test_cu_seqlens_that_cannot_be_are_found_on_the_device(
    asserting, implementation, ends, sentence
):
    x = torch.zeros(1, 1, 8, HEAD_DIM)
    right, wrong = cu_seqlens([2, 1, 5]), torch.tensor(ends, dtype=torch.int32)
    for pair in ((wrong, right), (right, wrong)):
        given = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), pair, strict=True))
        with pytest.raises(InterpreterError, match=sentence):
            attention(x, x, x, implementation=implementation, **given)


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


@pytest.mark.parametrize("kind", [{"causal": True}, {"causal": True, "window": 3}], ids=str)
def test_lse(kind):
    """To base 2; −inf where a query sees no key."""
    *inputs, _ = draw(N, 20)
    inputs += [None, None, None]
    plan = plans.build(OPERATOR, "separate", tuple(inputs), tuple(kind.items()), ())
    _, (lse,) = plan.forward(tuple(inputs), (SCALE,))
    q, k = (x.double() for x in inputs[:2])
    scores = SCALE * math.log2(math.e) * q @ k.mT
    scores = scores.masked_fill(~visible(q, k, None, None, None, **kind), float("-inf"))
    expected = (scores * math.log(2)).logsumexp(-1) / math.log(2)
    assert (expected[:, :, : N - 20] == float("-inf")).all()
    torch.testing.assert_close(lse.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", [*OURS, "reference"])
@pytest.mark.parametrize("kind", [{}, {"causal": True}, {"window": 3}], ids=str)
@pytest.mark.parametrize("n_k", [20, 300])
def test_lse_is_the_logarithm_of_what_softmax_divides_by(implementation, kind, n_k):
    """And gradients pass through it, alone and beside those of o; −inf and none of it where a query
    sees no key.
    """
    q, k, v, do = (x.requires_grad_() for x in draw(N, n_k))
    dlse = torch.randn(1, 2, N, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    seen = visible(q, k, None, None, None, **kind)
    sees = torch.ones(N, dtype=torch.bool, device=DEVICE) if seen is None else seen.any(1)
    asked = {"implementation": implementation, "lse": True} | kind
    o, lse = attention(q, k, v, **asked)
    scores = SCALE * q @ k.mT
    scores = scores if seen is None else scores.masked_fill(~seen, float("-inf"))
    expected = scores[:, :, sees].logsumexp(-1)
    torch.testing.assert_close(lse[:, :, sees], expected, rtol=1e-5, atol=1e-5)
    assert lse.dtype == torch.float32 and (lse[:, :, ~sees] == float("-inf")).all()
    plain = attention(q, k, v, **asked | {"lse": False})
    assert torch.equal(o, plain)

    alone = torch.autograd.grad(lse, (q, k), dlse, retain_graph=True)
    of_formula = torch.autograd.grad(expected, (q, k), dlse[:, :, sees])
    both = torch.autograd.grad((o, lse), (q, k, v), (do, dlse))
    of_o = torch.autograd.grad(plain, (q, k, v), do)
    for one, right in zip(alone, of_formula, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-5)
    for found, first, second in zip(both, of_o, (*alone, 0 * v), strict=True):
        torch.testing.assert_close(found, first + second, rtol=1e-4, atol=1e-5)


@ours
def test_parts_of_the_keys_are_put_together_by_lse(implementation):
    """Σ e^(lse of a part − lse of all) · o of the part: as ring attention has it."""
    q, k, v, _ = draw(N, 300)
    asked = {"lse": True, "implementation": implementation}
    o, whole = attention(q, k, v, **asked)
    parts = [attention(q, k[:, :, s], v[:, :, s], **asked) for s in (slice(130), slice(130, 300))]
    torch.testing.assert_close(torch.logaddexp(*(lse for _, lse in parts)), whole)
    together = sum(of * (lse - whole).exp()[..., None] for of, lse in parts)
    torch.testing.assert_close(together, o, rtol=1e-4, atol=1e-5)


@ours
def test_no_queries_have_no_lse(implementation):
    q, k, v, _ = draw(0, 8)
    o, lse = attention(q, k, v, lse=True, implementation=implementation)
    assert o.shape == q.shape and lse.shape == q.shape[:3] and lse.dtype == torch.float32


@ours
def test_no_queries_of_packed_sequences(implementation):
    inputs = draw(0, 8)
    cu = {"cu_seqlens_q": cu_seqlens([0, 0]), "cu_seqlens_k": cu_seqlens([3, 5])}
    found = run(inputs, implementation=implementation, **cu)
    assert found["o"].shape == inputs[0].shape and (found["dk"] == 0).all()


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
@each
def test_operators_keep_their_contracts(implementation, kind):
    asked = dict(kind)
    *inputs, _ = draw(20, 20, asked.pop("heads", (1, 1)))
    inputs = [x.requires_grad_() for x in inputs]
    inputs += [asked.pop(name, None) for name in OPERATOR.tensors[3:]]
    require_contracts(OPERATOR, implementation, inputs, tuple(asked.items()))


@ours
@pytest.mark.parametrize("n_k", [20, 300])
def test_lse_as_pytorch_sees_it(implementation, n_k):
    """Compiled in one graph, and as an output of the custom operator."""
    torch._dynamo.reset()
    q, k, v, do = (x.requires_grad_() for x in draw(20, n_k))
    asked = {"lse": True, "implementation": implementation}
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for used in (0, 1):  # each output's gradient alone
        found, expected = (
            torch.autograd.grad(function(q, k, v, **asked)[used].square().sum(), (q, k))
            for function in (compiled, attention)
        )
        for one, right in zip(found, expected, strict=True):
            torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-5)
    inputs = [q, k, v, None, None, None]
    require_contracts(OPERATOR, implementation, inputs, (("lse", True),))


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
