"""Runs operators of package liger-kernel, in Triton.

To save memory, several of its kernels write over their inputs: logits, the inputs of SwiGLU, q and
k of the rotary embedding, and gradients. These kernels get copies.
"""

import torch
from torch import Tensor

from tnp.dispatch.spec import Call, Implementation, Reason, on_cuda
from tnp_peers.support import both, cuda_to

MAX_WIDTH = 65536  # a program holds rows up to this width (its ops/utils.py)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Runs LigerRMSNormFunction in its default mode, "llama". The gradient is not overwritten."""
    from liger_kernel.transformers.functional import liger_rms_norm

    return liger_rms_norm(x, weight, eps, in_place=False)


def add_rms_norm(x: Tensor, update: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Runs LigerFusedAddRMSNormFunction, which returns the sum second."""
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    normalized, total = liger_fused_add_rms_norm(update, x, weight, eps, in_place=False)
    return total, normalized


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Runs LigerLayerNormFunction."""
    from liger_kernel.transformers.functional import liger_layer_norm

    return liger_layer_norm(x, weight, bias, eps)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Runs LigerSiLUMulFunction on copies: its backward writes gradients over gate and up."""
    from liger_kernel.transformers.functional import liger_swiglu

    if torch.is_grad_enabled() and (gate.requires_grad or up.requires_grad):
        gate, up = _copy(gate), _copy(up)
    return liger_swiglu(gate, up)


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _copy_by_tokens(x: Tensor) -> Tensor:
    """Returns a copy of [B, H, L, D] stored as [B, L, H, D], which Liger copies no further."""
    return _copy(x.transpose(1, 2)).transpose(1, 2)


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: None = None
) -> tuple[Tensor, Tensor]:
    """Runs LigerRopeFunction with Hugging Face's pairing, on copies: it turns its inputs in place.

    It also turns gradients in place. Tables have half the width, which rotary_dim says.
    """
    from liger_kernel.transformers.functional import liger_rope

    n_tokens, head_dim = q.shape[2:]
    turned = liger_rope(
        *map(_copy_by_tokens, (q, k)), cos[:n_tokens], sin[:n_tokens], rotary_dim=head_dim
    )
    for x in turned:
        if x.requires_grad:
            x.register_hook(_copy_by_tokens)
    return turned


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Runs LigerCrossEntropyFunction on a copy: it writes the gradient over the logits.

    It keeps losses in the logits' dtype until they are summed. It waits for the device to count
    targets, so it cannot be captured.
    """
    from liger_kernel.transformers.functional import liger_cross_entropy

    if torch.is_grad_enabled() and logits.requires_grad:
        logits = _copy(logits)
    return liger_cross_entropy(logits, target).float()


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    """Runs LigerFusedLinearCrossEntropyFunction, a chunk of rows at a time.

    Gradients of the weight are summed in float32. It waits for the device to count targets.
    """
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return liger_fused_linear_cross_entropy(x, weight, target, accum_dtype=torch.float32)


def _with_gradient_of_x(call: Call) -> Reason:
    """Refuses the weight's gradient alone: gradients are made only if x needs one."""
    if call.wanted == ("weight",):
        return "it gives the gradient of weight only together with the gradient of x"
    return None


_ROWS = {"supported": cuda_to(80, "width", MAX_WIDTH), "traceable": False}
_CUDA = {"supported": on_cuda(80), "traceable": False}
RMS_NORM = Implementation("liger", run=rms_norm, **_ROWS)
ADD_RMS_NORM = Implementation("liger", run=add_rms_norm, **_ROWS)
LAYER_NORM = Implementation("liger", run=layer_norm, **_ROWS)
SWIGLU = Implementation("liger", run=swiglu, **_ROWS)
ROPE = Implementation("liger", run=rope, **_CUDA)
CROSS_ENTROPY = Implementation("liger", run=cross_entropy, **_CUDA)
LINEAR_CROSS_ENTROPY = Implementation(
    "liger",
    run=linear_cross_entropy,
    supported=both(on_cuda(80), _with_gradient_of_x),
    traceable=False,
)
