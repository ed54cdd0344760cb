"""Runs operators on rows of package quack-kernels, in CuTe, from compute capability 9.0 on."""

import torch
from torch import Tensor

from tnp.dispatch.spec import Call, Implementation, Reason, on_cuda
from tnp_peers.support import both, rows, with_contiguous_gradient


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Runs quack.rmsnorm, which takes the weight in any float dtype."""
    from quack.rmsnorm import rmsnorm

    return rmsnorm(x, weight, eps=eps)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Runs quack.rmsnorm with a residual. It returns the sum second."""
    from quack.rmsnorm import rmsnorm

    normalized, total = rmsnorm(update, weight, residual=x, eps=eps, prenorm=True)
    return total, normalized


class _LayerNorm(torch.autograd.Function):
    """Joins quack's two passes."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        from quack.rmsnorm import layernorm_fwd

        y, rstd, mean = layernorm_fwd(x, weight, bias, eps, return_rstd=True, return_mean=True)
        ctx.save_for_backward(x, weight, rstd, mean)
        return y

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        from quack.rmsnorm import layernorm_bwd

        x, weight, rstd, mean = ctx.saved_tensors
        return *layernorm_bwd(x, weight, dy.contiguous(), rstd, mean, has_bias=True), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Runs quack's LayerNorm, which takes only float32 parameters."""
    return _LayerNorm.apply(rows(x), weight.float(), bias.float(), eps).view(x.shape)


def softmax(x: Tensor) -> Tensor:
    """Runs quack.softmax over the last dimension."""
    from quack.softmax import softmax

    return with_contiguous_gradient(softmax(rows(x))).view(x.shape)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Runs quack.cross_entropy without overwriting the logits. Losses are float32."""
    from quack.cross_entropy import cross_entropy

    # A mean loss has an expanded gradient, which its kernel cannot read.
    losses = cross_entropy(logits.contiguous(), target, reduction="none")
    return with_contiguous_gradient(losses).sum() / (target != -100).sum()


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: None = None, *,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Runs quack's rotary embedding: a launch each for q and k, [B, L, H, D] of any strides."""
    from quack.rotary import apply_rotary_emb

    n_tokens = q.shape[2]
    tables = cos[:n_tokens], sin[:n_tokens]
    turned = (apply_rotary_emb(x.transpose(1, 2), *tables, interleaved) for x in (q, k))
    return tuple(with_contiguous_gradient(x).transpose(1, 2) for x in turned)


def _in_eights(call: Call) -> Reason:
    """Refuses head_dims that the kernel cannot read in vectors."""
    head_dim = call.problem["head_dim"]
    if head_dim % 8 or head_dim > 512:
        return f"it takes head_dim up to 512 that 8 divides, not {head_dim}"
    return None


_LIMITS = {"supported": on_cuda(90), "traceable": False}
RMS_NORM = Implementation("quack", run=rms_norm, **_LIMITS)
ADD_RMS_NORM = Implementation("quack", run=add_rms_norm, **_LIMITS)
LAYER_NORM = Implementation("quack", run=layer_norm, **_LIMITS)
SOFTMAX = Implementation("quack", run=softmax, **_LIMITS)
CROSS_ENTROPY = Implementation("quack", run=cross_entropy, **_LIMITS)
ROPE = Implementation(
    "quack",
    run=rope,
    supported=both(on_cuda(90), _in_eights),
    options=("interleaved",),
    traceable=False,
)
