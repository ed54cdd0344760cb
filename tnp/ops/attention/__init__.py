"""Rectangular attention: every query row attends to the key rows of its sample, no mask.

    o = softmax(scale · q kᵀ) v

`implementation` is explicit and never falls back: asking for one that cannot run raises with the
reason; only "auto" chooses (`tnp.ops.auto`). `tnp.ops.registry` lists them. Ours, `separate` and
`fused`, share the forward pass and differ in the backward; which kernel and which tiles run is
`tnp.ops.tuning`'s choice.
"""

import torch

from tnp.inputs import require_number
from tnp.ops import auto, registry, tuning
from tnp.ops.attention.kernels import KERNELS, Problem
from tnp.ops.attention.peers import PEERS
from tnp.ops.attention.primitives import empty_rows
from tnp.ops.attention.reference import attention_reference
from tnp.ops.attention.sdpa import BACKENDS, sdpa_attention

# A fact of the machine: torch.compile asks once instead of tracing into drivers.
_require_supported = torch.compiler.assume_constant_result(registry.check)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OURS = ("separate", "fused")


@torch.library.custom_op("tnp::attention", mutates_args=())
def _attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    n_context: torch.Tensor | None,
    scale: float,
    backward: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and the rows' lse; `backward` names the operation that differentiates it."""
    choice = tuning.choose(Problem.of("forward", q, k, v))
    with torch.cuda.device_of(q):  # where Triton launches
        return KERNELS["forward", choice.kernel].run(q, k, v, n_context, scale, choice.config)


@_attention.register_fake
def _(q, k, v, n_context, scale, backward):
    return empty_rows(q, q.shape[2]), q.new_empty(q.shape[:3], dtype=torch.float32)


@torch.library.custom_op("tnp::attention_backward", mutates_args=())
def _attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    n_context: torch.Tensor | None,
    scale: float,
    backward: str,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    if do.stride(-1) != 1 or 0 in do.stride():
        do = do.contiguous()
    choice = tuning.choose(Problem.of(backward, q, k, v, do))
    with torch.cuda.device_of(q):
        return KERNELS[backward, choice.kernel].run(
            do, q, k, v, o, lse, n_context, scale, choice.config
        )


@_attention_backward.register_fake
def _(do, q, k, v, o, lse, n_context, scale, backward):
    return empty_rows(q, q.shape[2]), empty_rows(k, k.shape[2]), empty_rows(v, v.shape[2])


def _save(ctx, inputs, output) -> None:
    q, k, v, n_context, ctx.scale, ctx.backward = inputs
    o, lse = output
    ctx.save_for_backward(q, k, v, o, lse, n_context)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)  # lse's would be zeros


def _backward(ctx, do, _dlse):
    if do is None:
        return (None,) * 6
    gradients = _attention_backward(do, *ctx.saved_tensors, ctx.scale, ctx.backward)
    return (*gradients, None, None, None)


_attention.register_autograd(_backward, setup_context=_save)


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float | None = None,
    n_context: torch.Tensor | None = None,
    implementation: str = "sdpa_flash",
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v.

    Args:
        q: [B, H, n_q, D]; bfloat16, float16 or float32, D one of 16, 32, 64, 128. Any strides
            with the last dimension contiguous, such as views of a fused projection.
        k, v: [B, H, n_k, D], n_k ≥ 1, like q in dtype and device.
        scale: a number, positive and finite; 1/√D where None.
        n_context: int32 [B] on q's device, each from 1 to n_k, or None for n_k everywhere: sample b
            has keys 0 … n_context[b] − 1. Rows of k and v past them are padding: any finite
            values, of weight exactly 0 and gradient exactly 0. Only `separate`, `fused` and
            `reference` take it.
        implementation: a name of `tnp.ops.registry.names("attention")`; "auto" with an n_context
            is `fused`.

    Returns:
        [B, H, n_q, D] in q's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
        RuntimeError: the implementation cannot run on this device and dtype. An n_context out of
            range is found where it lies: on CUDA as a device-side assertion, at the next
            synchronization.
    """
    _check(q, k, v, scale, any_type=implementation == "reference")
    if implementation == "auto":
        # Of the candidates only ours take padding.
        padded = n_context is not None
        implementation = "fused" if padded else _chosen(q, k)
    if n_context is not None:
        _check_n_context(n_context, q, k, implementation)
    if implementation == "reference":
        return attention_reference(q, k, v, scale, n_context)
    _require_supported("attention", implementation, q.device, q.dtype)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if q.numel() == 0:
        return q * 0.0 + (k.sum() + v.sum()) * 0.0
    if implementation in BACKENDS:
        return sdpa_attention(q, k, v, scale, implementation)
    if implementation in PEERS:
        return PEERS[implementation](q, k, v, scale)
    return _attention(q, k, v, n_context, scale, implementation)[0]


def describe_launch(
    q: torch.Tensor, k: torch.Tensor, pass_: str, implementation: str
) -> str | None:
    """What runs in a "forward" or "backward" pass, kernel and configuration as JSON.

    None for what is not ours.
    """
    if implementation not in OURS:
        return None
    operation = "forward" if pass_ == "forward" else implementation
    return tuning.choose(Problem.of(operation, q, k)).describe()


def _chosen(q: torch.Tensor, k: torch.Tensor) -> str:
    batch, n_heads, n_q, head_dim = q.shape
    sizes = {"n_q": n_q, "n_k": k.shape[2], "head_dim": head_dim}
    return auto.resolve("attention", q.device, q.dtype, batch_heads=batch * n_heads, **sizes)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, *, any_type: bool
) -> None:
    """Raises ValueError; `any_type` allows every dtype, head_dim and stride."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be [B, H, L, D]")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}: they must be equal")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}: they must be equal")
        if x.stride(-1) != 1 and x.shape[-1] > 1 and not any_type:
            raise ValueError(
                f"{name} has strides {x.stride()}: its last dimension must be contiguous"
            )
    if q.dtype not in DTYPES and not any_type:
        raise ValueError(f"q is {q.dtype}: it must be one of {', '.join(map(str, DTYPES))}")
    if q.shape[-1] not in registry.HEAD_DIMS and not any_type:
        raise ValueError(f"head_dim is {q.shape[-1]}: it must be one of {registry.HEAD_DIMS}")
    if k.shape != v.shape:
        raise ValueError(f"k is {tuple(k.shape)} and v {tuple(v.shape)}: they must be equal")
    if (q.shape[0], q.shape[1], q.shape[3]) != (k.shape[0], k.shape[1], k.shape[3]):
        raise ValueError(
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}: "
            "they must agree in batch, heads and head_dim"
        )
    if k.shape[2] == 0:
        raise ValueError("n_k is 0: attention needs at least one key")
    require_number("scale", scale)
    if scale is not None and not 0 < scale < float("inf"):
        raise ValueError(f"scale is {scale}: it must be positive and finite")


def _check_n_context(
    n_context: torch.Tensor, q: torch.Tensor, k: torch.Tensor, implementation: str
) -> None:
    takes_it = (*OURS, "reference")
    if implementation not in takes_it:
        raise ValueError(
            f"n_context needs implementation {', '.join(takes_it)}, not {implementation!r}"
        )
    if not isinstance(n_context, torch.Tensor):
        raise ValueError(f"n_context is {n_context!r}: it must be an int32 tensor")
    if n_context.shape != q.shape[:1] or n_context.dtype != torch.int32:
        raise ValueError(
            f"n_context is {n_context.dtype} {tuple(n_context.shape)}: "
            f"it must be int32 of shape ({q.shape[0]},)"
        )
    if n_context.device != q.device:
        raise ValueError(f"n_context is on {n_context.device} and q on {q.device}")
    inside = ((n_context >= 1) & (n_context <= k.shape[2])).all()
    torch._assert_async(inside, f"n_context must lie between 1 and n_k = {k.shape[2]}")
