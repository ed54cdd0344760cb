"""Tests what quack, Liger and Cut Cross-Entropy are given and return, with stand-ins for them.

The stand-ins have the arguments, results and habits of quack-kernels 0.6.5, liger-kernel 0.8.5 and
cut-cross-entropy 25.1.1: they write over what those write over.
"""

import sys
import types
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tnp.dispatch.devices import Target
from tnp.dispatch.spec import Call
from tnp.ops import rope
from tnp_peers import cut_cross_entropy, liger, quack

WIDTH, EPS = 24, 1e-3


class OverItsInputs(torch.autograd.Function):
    """Overwrites its inputs when its gradients are made, as Liger's SwiGLU does."""

    @staticmethod
    def forward(ctx, function, *inputs):
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            leaves = [x.detach().clone().requires_grad_() for x in ctx.saved_tensors]
            found = torch.autograd.grad(ctx.function(*leaves), leaves, gradient)
        for x, new in zip(ctx.saved_tensors, found, strict=True):
            x.detach().copy_(new)
        return None, *found


class Turn(torch.autograd.Function):
    """Turns in place, as Liger's rotary embedding does, gradients too."""

    @staticmethod
    def forward(ctx, q, k, cos, sin):
        ctx.save_for_backward(cos, sin)
        return tuple(turn(x, cos, sin) for x in (q, k))

    @staticmethod
    def backward(ctx, *gradients):
        cos, sin = ctx.saved_tensors
        return *(turn(x, cos, -sin) for x in gradients), None, None


def turn(x, cos, sin):
    x = x.transpose(1, 2).contiguous()
    a, b = x.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x.copy_(torch.cat((a * cos - b * sin, b * cos + a * sin), -1))
    return x.transpose(1, 2)


def liger_rope(q, k, cos, sin, position_ids=None, unsqueeze_dim=1, rotary_dim=None):
    assert cos.shape == (q.shape[2], rotary_dim // 2)
    return Turn.apply(q, k, cos, sin)


def quack_rotary(x, cos, sin, interleaved=False, inplace=False):
    """Rotates x [B, L, H, D] into new memory."""
    assert not inplace and cos.shape == (x.shape[1], x.shape[3] // 2)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    a, b = (x[..., ::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    y = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return ReadsContiguous.apply(y)


def rms(x, weight, eps):
    return F.rms_norm(x, weight.shape, weight, eps)


def rmsnorm(x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None,
            eps=1e-6, prenorm=False, weight_offset=0.0):  # fmt: skip
    total = x if residual is None else x + residual
    return (rms(total, weight, eps), total) if prenorm else rms(total, weight, eps)


def layernorm_fwd(x, weight, bias=None, eps=1e-6, return_rstd=False, return_mean=False):
    assert x.dim() == 2 and weight.dtype == bias.dtype == torch.float32
    mean, rstd = x.mean(-1), (x.var(-1, correction=0) + eps).rsqrt()
    return F.layer_norm(x, weight.shape, weight, bias, eps), rstd, mean


def layernorm_bwd(x, weight, dout, rstd, mean, has_bias=True):
    assert dout.is_contiguous() and has_bias
    normalized = (x - mean[:, None]) * rstd[:, None]
    wdy = dout * weight
    c1, c2 = (wdy * normalized).mean(-1, True), wdy.mean(-1, True)
    return (wdy - normalized * c1 - c2) * rstd[:, None], (dout * normalized).sum(0), dout.sum(0)


def quack_softmax(x):
    assert x.dim() == 2 and x.is_contiguous()
    return ReadsContiguous.apply(torch.softmax(x, -1))


class ReadsContiguous(torch.autograd.Function):
    """Checks which gradients quack's kernels take."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, gradient):
        assert gradient.is_contiguous()
        return gradient


def quack_cross_entropy(x, target, lse_partial=None, weight=None, ignore_index=-100,
                        reduction="mean", inplace_backward=False):  # fmt: skip
    assert x.is_contiguous() and not inplace_backward
    losses = F.cross_entropy(x, target, reduction="none", ignore_index=ignore_index)
    losses = ReadsContiguous.apply(losses)
    return losses if reduction == "none" else losses.sum() / (target != ignore_index).sum()


def liger_cross_entropy(input, target, weight=None, size_average=None, ignore_index=-100):
    return OverItsInputs.apply(lambda x: F.cross_entropy(x, target), input)


def liger_rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    assert not in_place
    return rms(X, W, eps)


def liger_fused_add_rms_norm(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=True):
    assert not in_place
    return rms(X + R, W, eps), X + R


def liger_fused_linear_cross_entropy(input, weight, target, bias=None, accum_dtype=None):
    return F.cross_entropy(input @ weight.T, target)


def cce(e, c, targets, ignore_index=-100, softcap=None, reduction="mean"):
    assert c.is_contiguous()
    return F.cross_entropy(e @ c.T, targets)


@pytest.fixture(autouse=True)
def packages(monkeypatch):
    functional = {
        "liger_swiglu": lambda a, b: OverItsInputs.apply(lambda a, b: F.silu(a) * b, a, b),
        "liger_layer_norm": lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps),
    }
    functional |= {
        f.__name__: f
        for f in (
            liger_rms_norm, liger_fused_add_rms_norm, liger_rope, liger_cross_entropy,
            liger_fused_linear_cross_entropy,
        )
    }  # fmt: skip
    modules = {
        "quack": {},
        "quack.rmsnorm": {
            "rmsnorm": rmsnorm, "layernorm_fwd": layernorm_fwd, "layernorm_bwd": layernorm_bwd,
        },
        "quack.rotary": {"apply_rotary_emb": quack_rotary},
        "quack.softmax": {"softmax": quack_softmax},
        "quack.cross_entropy": {"cross_entropy": quack_cross_entropy},
        "liger_kernel": {},
        "liger_kernel.transformers": {},
        "liger_kernel.transformers.functional": functional,
        "cut_cross_entropy": {"linear_cross_entropy": cce},
    }  # fmt: skip
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def tensors(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


X, UPDATE, WEIGHT, BIAS = tensors((2, 5, WIDTH), (2, 5, WIDTH), WIDTH, WIDTH)
Q, K, COS, SIN = tensors((2, 7, 4, 16), (2, 7, 2, 16), (9, 8), (9, 8))
LOGITS, ROWS, CLASSES = tensors((6, 35), (6, WIDTH), (33, WIDTH))
TARGET = torch.tensor([1, 2, -100, 32, 0, 5])
NORM = (X, WEIGHT, EPS), lambda x, w, eps: rms(x, w, eps), 2
ADD_NORM = (X, UPDATE, WEIGHT, EPS), lambda x, u, w, e: (x + u, rms(x + u, w, e)), 3
LAYER = (X, WEIGHT, BIAS, EPS), lambda x, w, b, eps: F.layer_norm(x, w.shape, w, b, eps), 3
LOSS = (LOGITS[:, :33], TARGET), F.cross_entropy, 1
LINEAR = (ROWS, CLASSES, TARGET), lambda x, w, target: F.cross_entropy(x @ w.T, target), 2
TURNED = (Q.transpose(1, 2), K.transpose(1, 2), COS, SIN, None), rope.reference, 2
# Implementation, arguments, the reference, and how many of the arguments want a gradient.
CASES = {
    "quack rms_norm": (quack.RMS_NORM, *NORM),
    "quack add_rms_norm": (quack.ADD_RMS_NORM, *ADD_NORM),
    "quack layer_norm": (quack.LAYER_NORM, *LAYER),
    "quack softmax": (quack.SOFTMAX, (X,), lambda x: torch.softmax(x, -1), 1),
    "quack cross_entropy": (quack.CROSS_ENTROPY, *LOSS),
    "quack rope": (quack.ROPE, *TURNED),
    "quack rope, interleaved": (
        replace(quack.ROPE, run=partial(quack.ROPE.run, interleaved=True)), TURNED[0],
        partial(rope.reference, interleaved=True), 2,
    ),
    "liger rms_norm": (liger.RMS_NORM, *NORM),
    "liger add_rms_norm": (liger.ADD_RMS_NORM, *ADD_NORM),
    "liger layer_norm": (liger.LAYER_NORM, *LAYER),
    "liger swiglu": (liger.SWIGLU, (X, UPDATE), lambda gate, up: F.silu(gate) * up, 2),
    "liger rope": (liger.ROPE, *TURNED),
    "liger cross_entropy": (liger.CROSS_ENTROPY, *LOSS),
    "liger linear_cross_entropy": (liger.LINEAR_CROSS_ENTROPY, *LINEAR),
    "cce linear_cross_entropy": (cut_cross_entropy.LINEAR_CROSS_ENTROPY, *LINEAR),
}  # fmt: skip


def results(run, arguments, n_wanted, draw):
    """Returns outputs and gradients. Asserts that inputs and incoming gradients are unchanged."""
    leaves = [x.detach().clone().requires_grad_() for x in arguments[:n_wanted]]
    # Not leaves: a package may write to what autograd allows it to.
    inputs = [x.expand_as(x) for x in leaves]
    outputs = run(*inputs, *arguments[n_wanted:])
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients = [draw(y) for y in outputs]
    before = [x.detach().clone() for x in (*leaves, *gradients)]
    found = torch.autograd.grad(outputs, leaves, gradients)
    for x, was in zip((*leaves, *gradients), before, strict=True):
        assert torch.equal(x, was), "it wrote over what it was given"
    return [*(y.detach() for y in outputs), *found]


def rows_last(y):
    """Returns a gradient that lies as [B, L, H, D], or is contiguous."""
    gradient = torch.linspace(-1, 1, y.numel()).view(y.shape)
    if y.dim() == 4:
        return gradient.transpose(1, 2).contiguous().transpose(1, 2)
    return gradient


def expanded(y):
    return torch.full((), 0.5).expand(y.shape)


@pytest.mark.parametrize("draw", [rows_last, expanded])
@pytest.mark.parametrize("name", CASES)
def test_arguments_and_results_are_the_packages_and_inputs_stay(name, draw):
    implementation, arguments, reference, n_wanted = CASES[name]
    found = results(implementation.run, arguments, n_wanted, draw)
    expected = results(reference, arguments, n_wanted, draw)
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted)


def test_limits_of_quacks_rotary_embedding():
    def refusal(head_dim, capability=90, **options):
        sizes = {"batch": 1, "heads": 2, "kv_heads": 2, "n_tokens": 4, "head_dim": head_dim}
        problem = rope.ROPE.problem("bfloat16", **sizes, **options)
        target = Target("cuda", "nvidia-h200", capability)
        return quack.ROPE.refuses(Call(problem, target))

    assert refusal(128) is None and refusal(64, interleaved=True) is None
    assert refusal(6) == "it takes head_dim up to 512 that 8 divides, not 6"
    assert "9.0" in refusal(64, 80) and "positions" in refusal(64, positions=True)
