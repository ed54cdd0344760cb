"""RMSNorm, alone or with the residual addition in front of it.

    sum = x + update    rstd = 1/√(mean_d sum² + eps)    normalized = sum · rstd · weight

The sum is rounded to x's dtype before it is normalized: it is what the backward pass reads, which
computes rstd again. (Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467.)
"""

import math

import torch
import torch.nn.functional as F

from tnp.inputs import require_floats, require_number
from tnp.ops import auto, registry, triton_rms_norm

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 1024  # a whole row lies in registers
# A fact of the machine: torch.compile asks once instead of tracing into drivers.
_require_supported = torch.compiler.assume_constant_result(registry.check)


@torch.library.custom_op("tnp::rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    with torch.cuda.device_of(x):  # where Triton launches
        return triton_rms_norm.forward(x, None, weight, eps)[1]


@_rms_norm.register_fake
def _(x, weight, eps):
    return x.new_empty(x.shape)


@torch.library.custom_op("tnp::add_rms_norm", mutates_args=())
def _add_rms_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.cuda.device_of(x):
        return triton_rms_norm.forward(x, update, weight, eps)


@_add_rms_norm.register_fake
def _(x, update, weight, eps):
    return x.new_empty(x.shape), x.new_empty(x.shape)


@torch.library.custom_op("tnp::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    dnormalized: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx, with the residual stream's gradient `dsum` added where given, and dweight."""
    with torch.cuda.device_of(x):
        return triton_rms_norm.backward(dnormalized, dsum, x, weight, eps)


@_rms_norm_backward.register_fake
def _(dnormalized, dsum, x, weight, eps):
    return x.new_empty(x.shape), torch.empty_like(weight)


def _save(ctx, inputs, output) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)


def _backward(ctx, dnormalized):
    return *_rms_norm_backward(dnormalized, None, *ctx.saved_tensors, ctx.eps), None


_rms_norm.register_autograd(_backward, setup_context=_save)


def _save_sum(ctx, inputs, output) -> None:
    _x, _update, weight, ctx.eps = inputs
    ctx.save_for_backward(output[0], weight)
    ctx.set_materialize_grads(False)  # an output that nobody used has no gradient to read


def _backward_sum(ctx, dsum, dnormalized):
    if dnormalized is None:
        return dsum, dsum, None, None
    dx, dweight = _rms_norm_backward(dnormalized, dsum, *ctx.saved_tensors, ctx.eps)
    return dx, dx, dweight, None


_add_rms_norm.register_autograd(_backward_sum, setup_context=_save_sum)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, *, eps: float = 1e-6, implementation: str = "torch"
) -> torch.Tensor:
    """x / √(mean_d x² + eps) · weight.

    Args:
        x: [..., D]; bfloat16, float16 or float32. Rows may lie apart, as in h[:, n:]; each is
            contiguous. D at most 1024 for `fused`.
        weight: [D], float32; another float dtype for `torch` only, which casts it to x's.
        eps: a number, positive and finite.
        implementation: a name of `tnp.ops.registry.names("rms_norm")`.

    Returns:
        [..., D] in x's dtype, contiguous from `fused`.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not go together.
        RuntimeError: the implementation cannot run on this device and dtype.
    """
    if implementation == "auto":
        implementation = _chosen((x,), weight, eps)
    _check(x, weight, eps, implementation)
    if implementation == "torch":
        return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)
    return _rms_norm(x, weight, float(eps))


def add_rms_norm(
    x: torch.Tensor,
    update: torch.Tensor,
    weight: torch.Tensor,
    *,
    eps: float = 1e-6,
    implementation: str = "torch",
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + update, and its `rms_norm`: the residual stream and the next layer's input.

    Args:
        x, update: [..., D], equal in shape, dtype and device, each with strides of its own.
        weight, eps, implementation: as for `rms_norm`.

    Returns:
        Both [..., D] in x's dtype.

    Raises:
        ValueError, RuntimeError: as `rms_norm`.
    """
    if implementation == "auto":
        implementation = _chosen((x, update), weight, eps)
    _check(x, weight, eps, implementation)
    if update.shape != x.shape or update.dtype != x.dtype or update.device != x.device:
        raise ValueError(
            f"update is {update.dtype} {tuple(update.shape)} on {update.device} and x {x.dtype} "
            f"{tuple(x.shape)} on {x.device}: they must be equal"
        )
    if implementation == "torch":
        total = x + update
        return total, F.rms_norm(total, weight.shape, weight.to(x.dtype), eps)
    _check_rows("update", update)
    return _add_rms_norm(x, update, weight, float(eps))


def _chosen(rows: tuple[torch.Tensor, ...], weight: torch.Tensor, eps: float) -> str:
    _check(rows[0], weight, eps, "torch")
    unserved = ""
    if weight.dtype != torch.float32:
        unserved = f"weight is {weight.dtype}"
    elif not weight.is_contiguous() or any(x.stride(-1) != 1 for x in rows):
        unserved = "weight or a row is not contiguous"
    *leading, d_model = rows[0].shape
    return auto.resolve(
        "rms_norm", rows[0].device, rows[0].dtype,
        unserved=unserved, rows=math.prod(leading), d_model=d_model,
    )  # fmt: skip


def _check(x: torch.Tensor, weight: torch.Tensor, eps: float, implementation: str) -> None:
    if weight.dim() != 1 or x.shape[-1:] != weight.shape or len(weight) == 0:
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}: they must be [..., D] and "
            "[D], with D at least 1"
        )
    if weight.device != x.device:
        raise ValueError(f"weight is on {weight.device} and x on {x.device}: they must be equal")
    require_floats(x=x, weight=weight)
    require_number("eps", eps)
    if not 0 < eps < float("inf"):
        raise ValueError(f"eps is {eps}: it must be positive and finite")
    _require_supported("rms_norm", implementation, x.device, x.dtype)
    if implementation == "torch":
        return
    if x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}: it must be one of {', '.join(map(str, DTYPES))}")
    if weight.dtype != torch.float32:
        raise ValueError(f"weight is {weight.dtype}: it must be torch.float32")
    if len(weight) > MAX_WIDTH:
        raise ValueError(f"D is {len(weight)}: {implementation!r} takes at most {MAX_WIDTH}")
    if not weight.is_contiguous():
        raise ValueError(f"weight has stride {weight.stride(0)}: it must be contiguous")
    _check_rows("x", x)


def _check_rows(name: str, x: torch.Tensor) -> None:
    if x.stride(-1) != 1 and x.shape[-1] > 1:
        raise ValueError(f"{name} has strides {x.stride()}: its last dimension must be contiguous")
