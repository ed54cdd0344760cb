"""Rectangular attention: every query row attends to every key row, no mask.

    o = softmax(scale · q kᵀ) v

`implementation` is explicit and never falls back: asking for one that cannot run raises with the
reason. `tnp.ops.registry` lists them.
"""

import torch

from tnp.ops import registry
from tnp.ops.attention.primitives import empty_rows
from tnp.ops.attention.reference import attention_reference
from tnp.ops.attention.sdpa import BACKENDS, sdpa_attention
from tnp.ops.attention.triton_backward import attention_backward
from tnp.ops.attention.triton_forward import attention_forward

HEAD_DIMS = (16, 32, 64, 128)
# A fact of the machine: torch.compile asks once instead of tracing into drivers.
_require_supported = torch.compiler.assume_constant_result(registry.check)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.library.custom_op("tnp::attention_separate", mutates_args=())
def _separate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.cuda.device_of(q):  # where Triton launches
        return attention_forward(q, k, v, scale)


@_separate.register_fake
def _(q, k, v, scale):
    return empty_rows(q, q.shape[2]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tnp::attention_separate_backward", mutates_args=())
def _separate_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.cuda.device_of(q):
        return attention_backward(do, q, k, v, o, lse, scale)


@_separate_backward.register_fake
def _(do, q, k, v, o, lse, scale):
    return empty_rows(q, q.shape[2]), empty_rows(k, k.shape[2]), empty_rows(v, v.shape[2])


def _save(ctx, inputs, output) -> None:
    q, k, v, ctx.scale = inputs
    o, lse = output
    ctx.save_for_backward(q, k, v, o, lse)
    ctx.mark_non_differentiable(lse)


def _backward(ctx, do, _dlse):
    return (*_separate_backward(do, *ctx.saved_tensors, ctx.scale), None)


_separate.register_autograd(_backward, setup_context=_save)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    implementation: str = "sdpa_flash",
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v.

    Args:
        q: [B, H, n_q, D]; bfloat16, float16 or float32, D one of 16, 32, 64, 128. Any strides
            with the last dimension contiguous, such as views of a fused projection.
        k, v: [B, H, n_k, D], n_k ≥ 1, like q in dtype and device.
        scale: positive and finite; 1/√D where None.
        implementation: a name of `tnp.ops.registry.names("attention")`.

    Returns:
        [B, H, n_q, D] in q's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
        RuntimeError: the implementation cannot run on this device and dtype.
    """
    if implementation == "reference":
        return attention_reference(q, k, v, scale)
    _check(q, k, v, scale)
    _require_supported("attention", implementation, q.device, q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if q.numel() == 0:
        return q * 0.0 + (k.sum() + v.sum()) * 0.0
    if implementation in BACKENDS:
        return sdpa_attention(q, k, v, scale, implementation)
    return _separate(q, k, v, scale)[0]


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be [B, H, L, D]")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}: they must be equal")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}: they must be equal")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(
                f"{name} has strides {x.stride()}: its last dimension must be contiguous"
            )
    if q.dtype not in DTYPES:
        raise ValueError(f"q is {q.dtype}: it must be one of {', '.join(map(str, DTYPES))}")
    if q.shape[-1] not in HEAD_DIMS:
        raise ValueError(f"head_dim is {q.shape[-1]}: it must be one of {HEAD_DIMS}")
    if k.shape != v.shape:
        raise ValueError(f"k is {tuple(k.shape)} and v {tuple(v.shape)}: they must be equal")
    if (q.shape[0], q.shape[1], q.shape[3]) != (k.shape[0], k.shape[1], k.shape[3]):
        raise ValueError(
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}: "
            "they must agree in batch, heads and head_dim"
        )
    if k.shape[2] == 0:
        raise ValueError("n_k is 0: attention needs at least one key")
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"scale is {scale}: it must be positive and finite")
