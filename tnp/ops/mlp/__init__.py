"""Feed-forward layer without biases, every row for itself.

    y = silu(x upᵀ) downᵀ

`implementation` is explicit and never falls back: asking for one that cannot run raises with the
reason; only "auto" chooses (`tnp.ops.auto`). `torch` is the formula in PyTorch, `fused` puts SiLU
into the matmuls' epilogues (`triton_mlp`), `single` is one kernel, for few rows (`single`). Weights
are float32 parameters, cast to x's dtype (`tnp.ops.casting`); ours accumulate their gradients in
float32.
"""

import math

import torch
import torch.nn.functional as F

from tnp.inputs import require_floats
from tnp.ops import auto, registry
from tnp.ops.matmul import cast_weights, hidden_width, saved_shape, weight_gradients
from tnp.ops.mlp import single, triton_mlp

# A fact of the machine: torch.compile asks once instead of tracing into drivers.
_require_supported = torch.compiler.assume_constant_result(registry.check)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@torch.library.custom_op("tnp::mlp", mutates_args=())
def _mlp(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, save: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, and for the backward pass h and what `matmul_silu` saves, empty unless `save`."""
    with torch.cuda.device_of(x):  # where Triton launches
        weights = cast_weights(up, down, x.dtype)
        if save:
            return triton_mlp.forward_saving(x, *weights)
        return triton_mlp.forward(x, *weights), x.new_empty(0), x.new_empty(0)


@_mlp.register_fake
def _(x, up, down, save):
    if not save:
        return x.new_empty(x.shape), x.new_empty(0), x.new_empty(0)
    width = hidden_width(up.shape[0])
    h, saved = x.new_empty(x.shape[0], width), x.new_empty(saved_shape(x, width))
    return x.new_empty(x.shape), h, saved


@torch.library.custom_op("tnp::mlp_backward", mutates_args=())
def _mlp_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    h: torch.Tensor,
    saved: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.cuda.device_of(x):
        weights = cast_weights(up, down, x.dtype)
        if h.numel():
            dx, dup, ddown = triton_mlp.backward(dy.contiguous(), x, *weights, h, saved)
        else:
            dx, dup, ddown = triton_mlp.backward_again(dy.contiguous(), x, *weights)
    return dx, *weight_gradients(dup, ddown, up, down)


@torch.library.custom_op("tnp::mlp_single", mutates_args=())
def _mlp_single(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    with torch.cuda.device_of(x):
        return single.forward(x, *cast_weights(up, down, x.dtype))


@_mlp_single.register_fake
def _(x, up, down):
    return x.new_empty(x.shape)


@torch.library.custom_op("tnp::mlp_single_backward", mutates_args=())
def _mlp_single_backward(
    dy: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.cuda.device_of(x):
        dx, dup, ddown = triton_mlp.backward_again(
            dy.contiguous(), x, *cast_weights(up, down, x.dtype)
        )
    return dx, *weight_gradients(dup, ddown, up, down)


def _gradients_fake(dy, x, up, down, *_):
    return tuple(inputs.new_empty(inputs.shape) for inputs in (x, up, down))


_mlp_backward.register_fake(_gradients_fake)
_mlp_single_backward.register_fake(_gradients_fake)


def _save(ctx, inputs, output) -> None:
    x, up, down, _save = inputs
    _y, h, saved = output
    ctx.save_for_backward(x, up, down, h, saved)
    ctx.mark_non_differentiable(h, saved)
    ctx.set_materialize_grads(False)  # their gradients would be zeros of their size


def _backward(ctx, dy, _dh, _dsaved):
    if dy is None:
        return None, None, None, None
    return *_mlp_backward(dy, *ctx.saved_tensors), None


def _save_single(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward_single(ctx, dy):
    return _mlp_single_backward(dy, *ctx.saved_tensors)


_mlp.register_autograd(_backward, setup_context=_save)
_mlp_single.register_autograd(_backward_single, setup_context=_save_single)


def mlp_reference(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The formula, in x's dtype."""
    return F.linear(F.silu(F.linear(x, up.to(x.dtype))), down.to(x.dtype))


def mlp(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *, implementation: str = "torch"
) -> torch.Tensor:
    """silu(x upᵀ) downᵀ.

    Args:
        x: [..., D]; bfloat16, float16 or float32 (`torch`: any float dtype).
        up: [F, D], down: [D, F]; any float dtype, as a rule float32 parameters. D must be a power
            of two from 16 to 512 for `single`.
        implementation: a name of `tnp.ops.registry.names("mlp")`.

    Returns:
        [..., D] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
        RuntimeError: the implementation cannot run on this device and dtype.
    """
    if implementation == "auto":
        _check(x, up, down, "torch")
        sizes = {"rows": math.prod(x.shape[:-1]), "d_model": up.shape[1], "d_ff": up.shape[0]}
        implementation = auto.resolve("mlp", x.device, x.dtype, **sizes)
    _check(x, up, down, implementation)
    _require_supported("mlp", implementation, x.device, x.dtype)
    if implementation == "torch" or x.numel() == 0:
        return mlp_reference(x, up, down)
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    if implementation == "single":
        return _mlp_single(rows, up, down).view(x.shape)
    wanted = torch.is_grad_enabled() and any(t.requires_grad for t in (x, up, down))
    save = wanted and len(rows) <= triton_mlp.SAVED_ROWS
    return _mlp(rows, up, down, save)[0].view(x.shape)


def _check(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, implementation: str) -> None:
    if up.dim() != 2 or down.shape != up.shape[::-1]:
        raise ValueError(
            f"up is {tuple(up.shape)} and down {tuple(down.shape)}: they must be [F, D] and [D, F]"
        )
    if x.dim() == 0 or x.shape[-1] != up.shape[1]:
        raise ValueError(f"x is {tuple(x.shape)}: it must be [..., D] with D = {up.shape[1]} of up")
    require_floats(x=x, up=up, down=down)
    for name, weight in (("up", up), ("down", down)):
        if weight.device != x.device:
            raise ValueError(
                f"{name} is on {weight.device} and x on {x.device}: they must be equal"
            )
    if implementation != "torch" and x.dtype not in DTYPES:
        raise ValueError(f"x is {x.dtype}: it must be one of {', '.join(map(str, DTYPES))}")
    if implementation == "single" and not single.serves(up.shape[1]):
        raise ValueError(
            f"D is {up.shape[1]}: implementation 'single' takes a power of two from "
            f"{single.MIN_D} to {single.MAX_D}"
        )
