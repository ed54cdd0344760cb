"""The first embedding layer: context points and targets as rows of one tensor.

    tokens = (x, y, −1) for context and (x, 0, +1) for targets    out = silu(tokens @ weightᵀ)

In float32, rounded once at the end: bfloat16 cannot tell neighbouring pixels of a 512-pixel row
apart. The flag is never zero: it doubles as the bias that the layer lacks.
"""

import torch
import torch.nn.functional as F

from tnp.inputs import require_floats
from tnp.ops import auto, registry, triton_embedding

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 8  # of a token: its gradients are accumulated in registers
# A fact of the machine: torch.compile asks once instead of tracing into drivers.
_require_supported = torch.compiler.assume_constant_result(registry.check)


@torch.library.custom_op("tnp::embed_rows", mutates_args=())
def _embed_rows(
    x_context: torch.Tensor | None,
    y_context: torch.Tensor | None,
    x_target: torch.Tensor | None,
    weight: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    with torch.cuda.device_of(weight):  # where Triton launches
        return triton_embedding.forward(x_context, y_context, x_target, weight, dtype)


@_embed_rows.register_fake
def _(x_context, y_context, x_target, weight, dtype):
    batch, n_context, n_target = triton_embedding.sizes(x_context, x_target)
    return weight.new_empty(batch, n_context + n_target, weight.shape[0], dtype=dtype)


@torch.library.custom_op("tnp::embed_rows_backward", mutates_args=())
def _embed_rows_backward(
    dout: torch.Tensor,
    x_context: torch.Tensor | None,
    y_context: torch.Tensor | None,
    x_target: torch.Tensor | None,
    weight: torch.Tensor,
) -> torch.Tensor:
    """dweight in float32."""
    with torch.cuda.device_of(weight):
        return triton_embedding.backward(dout, x_context, y_context, x_target, weight)


@_embed_rows_backward.register_fake
def _(dout, x_context, y_context, x_target, weight):
    return weight.new_empty(weight.shape)


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[:-1])


def _backward(ctx, dout):
    return None, None, None, _embed_rows_backward(dout, *ctx.saved_tensors), None


_embed_rows.register_autograd(_backward, setup_context=_save)


def embed_rows(
    x_context: torch.Tensor | None,
    y_context: torch.Tensor | None,
    x_target: torch.Tensor | None,
    weight: torch.Tensor,
    dtype: torch.dtype,
    *,
    implementation: str = "torch",
) -> torch.Tensor:
    """silu(tokens @ weightᵀ), context first and then targets.

    Args:
        x_context, y_context: [B, M, d_x] and [B, M, d_y], any strides; both None for targets alone.
        x_target: [B, N, d_x], any strides; None for context alone.
        weight: [d_model, d_x + d_y + 1], float32; another float dtype for `torch` only, which
            computes in it.
        dtype: of the result; bfloat16, float16 or float32 (`torch`: any float dtype).
        implementation: a name of `tnp.ops.registry.names("embedding")`.

    Returns:
        [B, M + N, d_model] in `dtype`, contiguous. x and y get no gradient from `fused`.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together; from `fused`, an x or y that
            requires a gradient.
        RuntimeError: the implementation cannot run on this device and dtype.
    """
    _check(x_context, y_context, x_target, weight, dtype)
    if implementation == "auto":
        implementation = _chosen(x_context, y_context, x_target, weight, dtype)
    _require_supported("embedding", implementation, weight.device, dtype)
    if implementation == "torch":
        return _torch_embed_rows(x_context, y_context, x_target, weight, dtype)
    _check_fused(x_context, y_context, x_target, weight, dtype, implementation)
    return _embed_rows(x_context, y_context, x_target, weight, dtype)


def _chosen(
    x_context: torch.Tensor | None,
    y_context: torch.Tensor | None,
    x_target: torch.Tensor | None,
    weight: torch.Tensor,
    dtype: torch.dtype,
) -> str:
    given = [x for x in (x_context, y_context, x_target) if x is not None]
    unserved = ""
    if weight.dtype != torch.float32 or not weight.is_contiguous():
        unserved = f"weight is {weight.dtype} with strides {weight.stride()}"
    elif any(x.requires_grad or x.dtype not in DTYPES for x in given):
        unserved = f"x or y wants a gradient or is not one of {_names()}"
    d_model, width = weight.shape
    return auto.resolve(
        "embedding", weight.device, dtype, unserved=unserved, d_model=d_model, width=width
    )


def _torch_embed_rows(
    x_context: torch.Tensor | None,
    y_context: torch.Tensor | None,
    x_target: torch.Tensor | None,
    weight: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows = []
    if x_context is not None:
        flag = x_context.new_full((*x_context.shape[:-1], 1), -1.0)
        rows.append(torch.cat([x_context, y_context, flag], dim=-1))
    if x_target is not None:
        d_y = weight.shape[1] - x_target.shape[-1] - 1
        y = x_target.new_zeros(*x_target.shape[:-1], d_y)
        rows.append(torch.cat([x_target, y, x_target.new_ones(*x_target.shape[:-1], 1)], dim=-1))
    tokens = torch.cat(rows, dim=1).to(weight.dtype)
    return F.silu(F.linear(tokens, weight)).to(dtype)


def _check(
    x_context: torch.Tensor | None,
    y_context: torch.Tensor | None,
    x_target: torch.Tensor | None,
    weight: torch.Tensor,
    dtype: torch.dtype,
) -> None:
    require_floats(x_context=x_context, y_context=y_context, x_target=x_target, weight=weight)
    if not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}: it must be a float dtype")
    if (x_context is None) != (y_context is None):
        raise ValueError("one of x_context and y_context is None: they must be given together")
    if x_context is None and x_target is None:
        raise ValueError("x_context and x_target are None: one of them must be given")
    if weight.dim() != 2:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: it must be [d_model, d_x + d_y + 1]"
        )
    given = {"x_context": x_context, "y_context": y_context, "x_target": x_target}
    for name, x in given.items():
        if x is not None and x.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be [B, L, d]")
        if x is not None and x.device != weight.device:
            raise ValueError(
                f"{name} is on {x.device} and weight on {weight.device}: they must be equal"
            )
    if x_context is not None:
        if x_context.shape[:2] != y_context.shape[:2]:
            raise ValueError(
                f"x_context is {tuple(x_context.shape)} and y_context {tuple(y_context.shape)}: "
                "they must agree in batch and points"
            )
        width = x_context.shape[-1] + y_context.shape[-1] + 1
        if width != weight.shape[1]:
            raise ValueError(
                f"weight is {tuple(weight.shape)} and tokens have {width} features: "
                "they must be [d_model, d_x + d_y + 1]"
            )
    if x_target is not None:
        if x_context is not None and (x_context.shape[0], x_context.shape[2]) != (
            x_target.shape[0],
            x_target.shape[2],
        ):
            raise ValueError(
                f"x_context is {tuple(x_context.shape)} and x_target {tuple(x_target.shape)}: "
                "they must agree in batch and d_x"
            )
        if x_target.shape[-1] + 1 > weight.shape[1]:
            raise ValueError(
                f"weight is {tuple(weight.shape)} and x_target {tuple(x_target.shape)}: "
                "weight must be [d_model, d_x + d_y + 1]"
            )


def _check_fused(
    x_context: torch.Tensor | None,
    y_context: torch.Tensor | None,
    x_target: torch.Tensor | None,
    weight: torch.Tensor,
    dtype: torch.dtype,
    implementation: str,
) -> None:
    given = {"x_context": x_context, "y_context": y_context, "x_target": x_target}
    for name, x in given.items():
        if x is not None and x.requires_grad:
            raise ValueError(
                f"{name} requires a gradient: {implementation!r} has none for x and y; "
                "detach it, or use 'torch'"
            )
        if x is not None and x.dtype not in DTYPES:
            raise ValueError(f"{name} is {x.dtype}: it must be one of {_names()}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype}: it must be one of {_names()}")
    if weight.dtype != torch.float32:
        raise ValueError(f"weight is {weight.dtype}: it must be torch.float32")
    if not weight.is_contiguous():
        raise ValueError(f"weight has strides {weight.stride()}: it must be contiguous")
    if weight.shape[1] > MAX_WIDTH:
        raise ValueError(
            f"tokens have {weight.shape[1]} features: {implementation!r} takes at most {MAX_WIDTH}"
        )


def _names() -> str:
    return ", ".join(map(str, DTYPES))
