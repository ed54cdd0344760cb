"""What we hand to other packages' attention and what we take back, with stand-ins for them.

The stand-ins have the layouts, arguments and results of fa3-fwd 0.0.3 and flash-attn-4 4.0.0b36.
"""

import sys
import types

import pytest
import torch

from tnp.ops.attention import peers
from tnp.ops.attention.torch_forms import reference

SCALE = 0.3


def attention_reference(q, k, v, scale):
    return reference(q, k, v, None, scale)


def rows_first(q, k, v, softmax_scale):
    """Attention on [B, L, H, D], as both FlashAttentions take and return it."""
    assert all(x.dim() == 4 and x.stride(-1) == 1 for x in (q, k, v))
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return attention_reference(q, k, v, softmax_scale).transpose(1, 2).contiguous()


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
    peers._compiled_flex_attention.cache_clear()
    yield
    peers._compiled_flex_attention.cache_clear()


def qkv(n_q: int = 7, n_k: int = 5) -> list[torch.Tensor]:
    """Views of one projection [B, L, 3, H, D], as in the model; n_heads differs from both sizes."""
    projection = torch.randn(2, max(n_q, n_k), 3, 3, 16, generator=torch.Generator().manual_seed(0))
    q, k, v = projection.permute(2, 0, 3, 1, 4)
    return [q[:, :, :n_q], k[:, :, :n_k], v[:, :, :n_k]]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", peers.PEERS)
def test_layout_and_scale_are_the_packages(packages, name):
    inputs = qkv()
    o = peers.PEERS[name](*inputs, SCALE)
    assert o.shape == inputs[0].shape
    torch.testing.assert_close(o, attention_reference(*inputs, SCALE))


def test_gradients_come_back_through_fa4(packages):
    inputs = [x.requires_grad_() for x in qkv()]
    gradients = torch.autograd.grad(peers.fa4_attention(*inputs, SCALE).square().sum(), inputs)
    expected = torch.autograd.grad(attention_reference(*inputs, SCALE).square().sum(), inputs)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)


@pytest.mark.parametrize("position", range(3))
def test_fa3_refuses_what_wants_a_gradient(packages, position):
    inputs = qkv()
    inputs[position].requires_grad_()
    with pytest.raises(RuntimeError, match="fa3 is forward only") as error:
        peers.fa3_attention(*inputs, SCALE)
    assert "\n" not in str(error.value)
    with torch.no_grad():
        o = peers.fa3_attention(*inputs, SCALE)
    assert not o.requires_grad
