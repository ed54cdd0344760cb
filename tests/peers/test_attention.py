"""What we hand to other packages' attention and what we take back, with stand-ins for them.

The stand-ins have the layouts, arguments and results of fa3-fwd 0.0.3 and flash-attn-4 4.0.0b36.
"""

import math
import sys
import types

import pytest
import torch

from tnp.contract import Call, Problem
from tnp.targets import CPU, named
from tnp_peers import attention as peers

SCALE = 0.3
IN_16_BITS = {peer.name: peer for peer in (peers.FLEX, peers.FA3, peers.FA4)}
PEERS = IN_16_BITS | {"fa3_e4m3": peers.FA3_E4M3}


def exact(q, k, v):
    return torch.softmax(SCALE * q @ k.mT, -1) @ v


def rows_first(q, k, v, softmax_scale, **descales):
    """Attention on [B, L, H, D], as both FlashAttentions take and return it."""
    assert all(x.dim() == 4 and x.stride(-1) == 1 for x in (q, k, v))
    assert bool(descales) == (q.dtype == torch.float8_e4m3fn)
    if descales:
        q, k, v = (
            in_16_bits(x, descales[f"{name}_descale"])
            for name, x in zip("qkv", (q, k, v), strict=True)
        )
    assert math.isclose(softmax_scale, SCALE)
    return exact(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2).contiguous()


def in_16_bits(x, descale):
    """What FlashAttention-3 makes of 8 bits: a scale for each head of a sample."""
    assert x.dtype == torch.float8_e4m3fn and descale.dtype == torch.float32
    assert descale.shape == (x.shape[0], x.shape[2])
    return x.float() * descale[:, None, :, None]


def install(monkeypatch, name: str, function) -> None:
    module = types.ModuleType(name)
    module.flash_attn_func = function
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def packages(monkeypatch):
    install(monkeypatch, "fa3_fwd_interface", rows_first)
    monkeypatch.setitem(sys.modules, "flash_attn", types.ModuleType("flash_attn"))
    with_lse = lambda *qkv, softmax_scale: (rows_first(*qkv, softmax_scale), None)  # noqa: E731
    install(monkeypatch, "flash_attn.cute", with_lse)
    # Uncompiled on the CPU, where compiling takes ten seconds and is not what is tested.
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    compiled = peers._compiled_flex_attention, peers._compiled_in_8_bits
    for function in compiled:
        function.cache_clear()
    yield
    for function in compiled:
        function.cache_clear()


def qkv(n_q: int = 7, n_k: int = 5) -> list[torch.Tensor]:
    """Views of one projection [B, L, 3, H, D], as in the model; n_heads differs from both sizes."""
    projection = torch.randn(2, max(n_q, n_k), 3, 3, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = projection.permute(2, 0, 3, 1, 4)
    return [q[:, :, :n_q], k[:, :, :n_k], v[:, :, :n_k]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", IN_16_BITS)
def test_layout_and_scale_are_the_packages(packages, name):
    inputs = qkv()
    o = PEERS[name].run(*inputs, None, SCALE)
    assert o.shape == inputs[0].shape
    torch.testing.assert_close(o, exact(*inputs))


@pytest.mark.parametrize("magnitude", [1e-20, 1e-3, 1.0, 1e4])
def test_heads_are_scaled_to_what_8_bits_hold(packages, magnitude):
    q, k, v = qkv()
    v = v * magnitude
    v[0, 1] *= 1e3  # other heads lose nothing by it
    found, wanted = PEERS["fa3_e4m3"].run(q, k, v, None, SCALE), exact(q, k, v)
    error = (found - wanted).norm(dim=(2, 3)) / wanted.norm(dim=(2, 3))
    assert error.max() < 0.08


def test_zeros_stay_zeros_in_8_bits(packages):
    q, k, v = qkv()
    assert (PEERS["fa3_e4m3"].run(q * 0, k, v * 0, None, SCALE) == 0).all()


def test_8_bits_of_another_are_chosen_by_name_alone():
    assert not peers.FA3_E4M3.chosen_from and not peers.FA3_E4M3.selectable


def test_gradients_come_back_through_fa4(packages):
    inputs = [x.requires_grad_() for x in qkv()]
    run = PEERS["fa4"].run
    gradients = torch.autograd.grad(run(*inputs, None, SCALE).square().sum(), inputs)
    expected = torch.autograd.grad(exact(*inputs).square().sum(), inputs)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


def call(dtype="bfloat16", head_dim=64, gpu="H200", options=(), wanted=()) -> Call:
    sizes = {"batch": 2, "n_heads": 8, "n_q": 7, "n_k": 5, "head_dim": head_dim}
    problem = Problem("attention", dtype, tuple(sizes.items()), options)
    return Call(problem, named(gpu) if gpu else CPU, wanted)


@pytest.mark.parametrize(
    ("name", "asked", "reason"),
    [
        ("flex", {"gpu": "T4"}, "compute capability 8.0 or newer"),
        ("flex", {"gpu": None}, "needs a CUDA device"),
        ("flex", {"head_dim": 48}, "it takes head_dim 16, 32, 64, 128, not 48"),
        ("fa3", {"wanted": ("k",)}, "it is forward only"),
        ("fa3", {"dtype": "float16"}, "it takes bfloat16, not float16"),
        ("fa3", {"gpu": "B200"}, "older than 10.0"),
        ("fa3_e4m3", {"wanted": ("k",)}, "it is forward only"),
        ("fa3_e4m3", {"gpu": "A100"}, "compute capability 9.0 or newer"),
        ("fa3_e4m3", {"gpu": "B200"}, "older than 10.0"),
        ("fa3_e4m3", {"head_dim": 32}, "it takes head_dim 64, 128, not 32"),
        ("fa3_e4m3", {"options": (("n_keys", True),)}, "it does not take n_keys=True"),
        ("fa4", {"dtype": "float32"}, "it takes bfloat16, float16, not float32"),
        ("fa4", {"gpu": "A100"}, "compute capability 9.0 or newer"),
        ("fa4", {"options": (("n_keys", True),)}, "it does not take n_keys=True"),
    ],
)
def test_limits_are_the_packages(name, asked, reason):
    assert PEERS[name].refuses(call()) is None
    assert reason in PEERS[name].refuses(call(**asked))
