"""Tests what other packages' attention is given and returns, with stand-ins for them.

The stand-ins have the layouts, arguments and results of fa3-fwd 0.0.3 and flash-attn-4 4.0.0b36.
"""

import sys
import types

import pytest
import torch

from tnp.dispatch.devices import CPU, named, of_capability
from tnp.dispatch.spec import Call
from tnp.ops.attention import OPERATOR
from tnp.ops.attention.torch_forms import reference
from tnp.ops.buffered_attention.definition import reference as around_a_buffer
from tnp_peers import attention as peers
from tnp_peers import flex

SCALE = 0.3
IN_16_BITS = {
    peer.name: peer for peer in (flex.FLEX, peers.FA3, peers.FA4, peers.FA4_DETERMINISTIC)
}
PEERS = IN_16_BITS | {"fa3_e4m3": peers.FA3_E4M3}
LENGTHS, KEY_LENGTHS = (3, 0, 4, 2), (5, 2, 4, 0)


def of_sequence(q, k, v, scale, causal, window_size):
    """Returns attention in which query i sees keys i + n_k − n_q − left … + right."""
    left, right = (None if side in (None, -1) else side for side in window_size)
    right = 0 if causal else right
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    later = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None]
    later = later - (k.shape[1] - q.shape[1])
    seen = torch.ones_like(later, dtype=torch.bool)
    seen = seen if left is None else seen & (later >= -left)
    seen = seen if right is None else seen & (later <= right)
    weights = (scale * q @ k.mT).exp() * seen
    return (weights / weights.sum(-1, keepdim=True).clamp(min=1e-30) @ v).transpose(0, 1)


def dense(q, k, v, *rest):
    """Attention on [B, L, H, D], as both FlashAttentions take and return it."""
    assert all(x.dim() == 4 and x.stride(-1) == 1 for x in (q, k, v))
    return torch.stack([of_sequence(*sample, *rest) for sample in zip(q, k, v, strict=True)])


def varlen(q, k, v, cu_q, cu_k, longest_q, longest_k, *rest):
    """Attention on packed rows [L, H, D]."""
    assert all(x.dim() == 3 and x.stride(-1) == 1 for x in (q, k, v))
    assert (longest_q, longest_k) == (max(LENGTHS), max(KEY_LENGTHS))
    found = []
    for s in range(len(cu_q) - 1):
        of_q, of_k = (slice(cu[s], cu[s + 1]) for cu in (cu_q, cu_k))
        found.append(of_sequence(q[of_q], k[of_k], v[of_k], *rest))
    return torch.cat(found)


def in_16_bits(x, descale):
    """Returns 8 bits as FlashAttention-3 reads them: with a scale for each head of a sample."""
    assert x.dtype == torch.float8_e4m3fn and descale.dtype == torch.float32
    assert descale.shape == (x.shape[0], x.shape[2])
    return x.float() * descale[:, None, :, None]


def fa3_dense(
    q, k, v, softmax_scale=None, causal=False, q_descale=None, k_descale=None, v_descale=None
):
    descales = q_descale, k_descale, v_descale
    assert all((x is None) == (q.dtype != torch.float8_e4m3fn) for x in descales)
    if q_descale is not None:
        q, k, v = (in_16_bits(*of) for of in zip((q, k, v), descales, strict=True))
    return dense(q, k, v, softmax_scale, causal, (-1, -1))


def fa3_varlen(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale=None,
    causal=False,
):  # fmt: skip
    lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    return varlen(q, k, v, *lengths, softmax_scale, causal, (-1, -1))


@pytest.fixture
def packages(monkeypatch) -> list[bool]:
    """Installs stand-ins. Returns whether each call of FlashAttention-4 was deterministic."""
    asked = []

    def fa4_dense(
        q, k, v, softmax_scale=None, causal=False, window_size=(None, None), deterministic=False
    ):
        asked.append(deterministic)
        return dense(q, k, v, softmax_scale, causal, window_size), None

    def fa4_varlen(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
        softmax_scale=None, causal=False, window_size=(None, None), deterministic=False,
    ):  # fmt: skip
        asked.append(deterministic)
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return varlen(q, k, v, *lengths, softmax_scale, causal, window_size), None

    def install(name: str, **functions) -> None:
        module = types.ModuleType(name)
        vars(module).update(functions)
        monkeypatch.setitem(sys.modules, name, module)

    install("fa3_fwd_interface", flash_attn_func=fa3_dense, flash_attn_varlen_func=fa3_varlen)
    install("flash_attn")
    install("flash_attn.cute", flash_attn_func=fa4_dense, flash_attn_varlen_func=fa4_varlen)
    # Uncompiled on the CPU, where compiling takes ten seconds and is not what is tested.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    compiled = [flex._compiled_flex_attention, flex._compiled_block_mask, peers._compiled_in_8_bits]
    for function in compiled:
        function.cache_clear()
    yield asked
    for function in compiled:
        function.cache_clear()
    flex._masks.clear()


def qkv(n_q: int = 7, n_k: int = 5, heads=(3, 3), batch: int = 2) -> list[torch.Tensor]:
    """Returns views of one projection [B, L, H + 2 H_kv, D], as in the model."""
    generator = torch.Generator().manual_seed(0)
    sizes = batch, max(n_q, n_k), heads[0] + 2 * heads[1], 16
    projection = torch.randn(sizes, generator=generator, dtype=torch.float64).transpose(1, 2)
    q, k, v = projection.split((heads[0], heads[1], heads[1]), 1)
    return [q[:, :, :n_q], k[:, :, :n_k], v[:, :, :n_k]]


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


COUNTED = {"n_keys": numbers(2, 5)}
PACKED = {
    name: numbers(0, *torch.tensor(lengths).cumsum(0))
    for name, lengths in (("cu_seqlens_q", LENGTHS), ("cu_seqlens_k", KEY_LENGTHS))
}
KINDS = {  # heads of queries and of keys, lengths, options of a call
    "plain": ((3, 3), {}, {}),
    "base2": ((3, 3), {}, {"base2": True}),
    "causal": ((3, 3), {}, {"causal": True}),  # the first two queries see no key
    "window": ((3, 3), {}, {"window": 2}),
    "causal window": ((3, 3), {}, {"causal": True, "window": 3}),
    "grouped": ((4, 2), {}, {"causal": True}),
    "packed": ((4, 2), PACKED, {}),
    "packed causal": ((3, 3), PACKED, {"causal": True}),
    "packed window": ((3, 3), PACKED, {"window": 2}),
    "counted": ((3, 1), COUNTED, {}),
    "counted causal": ((3, 3), COUNTED, {"causal": True}),
}
WINDOWS = {kind for kind in KINDS if "window" in kind}
COUNTS = {kind for kind in KINDS if "counted" in kind}
REFUSED = {"flex": set(), "fa3": WINDOWS | COUNTS, "fa4": COUNTS, "fa4_deterministic": COUNTS}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", IN_16_BITS)
def test_a_kind_is_refused_or_right(packages, name, kind):
    """The output, and gradients where there are any."""
    (n_heads, n_kv_heads), lengths, options = KINDS[kind]
    problem = options | dict.fromkeys(lengths, True)
    problem |= {"n_kv_heads": n_kv_heads} if n_kv_heads != n_heads else {}
    problem |= {"n_sequences": len(LENGTHS)} if lengths is PACKED else {}
    reason = PEERS[name].refuses(call(options=problem))
    assert (reason is not None) == (kind in REFUSED[name])
    if reason is not None:
        return
    sizes = (sum(LENGTHS), sum(KEY_LENGTHS)) if lengths is PACKED else (7, 5)
    inputs = qkv(*sizes, (n_heads, n_kv_heads), batch=1 if lengths is PACKED else 2)
    trains = PEERS[name].differentiable and name != "flex"  # which PyTorch differentiates on GPUs
    inputs = [x.requires_grad_(trains) for x in inputs]
    arguments = [lengths.get(one) for one in ("n_keys", "cu_seqlens_q", "cu_seqlens_k")] + [SCALE]
    o = PEERS[name].run(*inputs, *arguments, **options)
    expected = reference(*inputs, *arguments, **options)
    torch.testing.assert_close(o, expected)
    if trains:
        gradients = torch.autograd.grad(o.square().sum(), inputs)
        wanted = torch.autograd.grad(expected.square().sum(), inputs)
        for gradient, exact in zip(gradients, wanted, strict=True):
            torch.testing.assert_close(gradient, exact)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("lengths", [None, numbers(2, 3)], ids=["whole", "counted"])
def test_flex_sees_what_the_formula_sees_around_a_buffer(packages, lengths):
    inputs = (*qkv(3 + 4 + 4 + 2, 3 + 4), lengths, SCALE)  # context, buffer, followers, others
    options = {"n_buffer": 4, "n_groups": 1, "all_rows": True}
    o = flex.BUFFERED.run(*inputs, **options)
    torch.testing.assert_close(o, around_a_buffer(*inputs, **options))


def test_gradients_are_asked_for_as_the_name_says(packages):
    lengths = None, None, None, SCALE
    packed = qkv(sum(LENGTHS), sum(KEY_LENGTHS), batch=1)
    for name, wanted in (("fa4", False), ("fa4_deterministic", True)):
        packages.clear()
        PEERS[name].run(*qkv(), *lengths)
        PEERS[name].run(*packed, None, *PACKED.values(), SCALE)
        assert packages == [wanted] * 2
        assert bool(PEERS[name].nondeterministic) != wanted


def test_a_mask_of_flex_is_made_once_for_lengths_as_they_stand(packages):
    q, k, _ = qkv()
    n_keys = numbers(2, 5)
    first, same = (flex._block_mask(q, k, (n_keys, None, None), True, 0) for _ in range(2))
    n_keys.data[0] = 3  # as a replayed graph does, which counts no version
    assert first is same is not flex._block_mask(q, k, (n_keys, None, None), True, 0)
    assert first is flex._block_mask(q, k, (numbers(2, 5), None, None), True, 0)
    for n in range(2 * flex.MOST_MASKS):
        flex._block_mask(q, k, (None, None, None), True, n)
    assert len(flex._masks) == flex.MOST_MASKS


def test_packed_sequences_of_inference_mode(packages):
    """Takes tensors without a version, by which the longest sequence would be known again."""
    with torch.inference_mode():
        arguments = *qkv(sum(LENGTHS), sum(KEY_LENGTHS), batch=1), None
        arguments += *(x.clone() for x in PACKED.values()), SCALE
        for name in ("fa3", "fa4"):
            torch.testing.assert_close(PEERS[name].run(*arguments), reference(*arguments))


def test_a_window_is_no_longer_than_rows(packages):
    """The package takes it in 32 bits."""
    arguments = *qkv(), None, None, None, SCALE
    found = PEERS["fa4"].run(*arguments, window=2**70)
    torch.testing.assert_close(found, reference(*arguments))


def in_8_bits(q, k, v):
    return PEERS["fa3_e4m3"].run(q, k, v, None, None, None, SCALE)


@pytest.mark.parametrize("magnitude", [1e-20, 1e-3, 1.0, 1e4])
def test_heads_are_scaled_to_the_range_of_8_bits(packages, magnitude):
    q, k, v = qkv()
    v = v * magnitude
    v[0, 1] *= 1e3  # other heads lose nothing by it
    found, wanted = in_8_bits(q, k, v), reference(q, k, v, None, None, None, SCALE)
    error = (found - wanted).norm(dim=(2, 3)) / wanted.norm(dim=(2, 3))
    assert error.max() < 0.08


def test_zeros_stay_zeros_in_8_bits(packages):
    q, k, v = qkv()
    assert (in_8_bits(q * 0, k, v * 0) == 0).all()


def test_8_bits_of_another_are_chosen_by_name_alone():
    assert not peers.FA3_E4M3.chosen_from and not peers.FA3_E4M3.selectable


def call(dtype="bfloat16", head_dim=64, target=None, options=None, wanted=()) -> Call:
    sizes = {"batch": 2, "n_heads": 8, "n_q": 7, "n_k": 5, "head_dim": head_dim}
    problem = OPERATOR.problem(dtype, **sizes, **options or {})
    return Call(problem, target or named("H200"), wanted)


@pytest.mark.parametrize(
    ("name", "asked", "reason"),
    [
        ("flex", {"target": named("T4")}, "compute capability 8.0 or newer"),
        ("flex", {"target": CPU}, "needs a CUDA device"),
        ("flex", {"head_dim": 40}, "96, 128, 192, 256, not 40"),
        ("fa3", {"wanted": ("k",)}, "it is forward only"),
        ("fa3", {"dtype": "float16"}, "it takes bfloat16, not float16"),
        ("fa3", {"target": named("B200")}, "older than 10.0"),
        ("fa3", {"options": {"window": 3}}, "fa3-fwd is built without windows"),
        ("fa3_e4m3", {"wanted": ("k",)}, "it is forward only"),
        ("fa3_e4m3", {"target": named("A100")}, "compute capability 9.0 or newer"),
        ("fa3_e4m3", {"target": named("B200")}, "older than 10.0"),
        ("fa3_e4m3", {"head_dim": 32}, "it takes head_dim 64, 128, not 32"),
        ("fa3_e4m3", {"options": {"n_keys": True}}, "it does not take n_keys=True"),
        ("fa4", {"dtype": "float32"}, "it takes bfloat16, float16, not float32"),
        ("fa4", {"target": named("A100")}, "compute capability 9.0 or newer"),
        ("fa4", {"options": {"n_keys": True}}, "it does not take n_keys=True"),
        ("fa4", {"target": named("B200"), "head_dim": 192}, "it takes head_dim up to 128, not 192"),
        ("fa4_deterministic", {"target": of_capability(120)}, "older than 12.0"),
    ],
)
def test_limits_are_the_packages(name, asked, reason):
    assert PEERS[name].refuses(call()) is None
    assert reason in PEERS[name].refuses(call(**asked))
