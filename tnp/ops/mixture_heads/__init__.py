"""Mixture heads: one small MLP for each of K components, all of the same input.

    out_k = silu(x up_kᵀ) down_kᵀ        out [..., K, O], O = 1 + 2·d_y

`implementation` is explicit and never falls back: asking for one that cannot run raises with the
reason; only "auto" chooses (`tnp.ops.auto`). `torch` multiplies with all heads' up at once, `loop`
head by head, `bmm` as a batch, `grouped_mm` through PyTorch's grouped matmul; their results are in
x's dtype. `fused` is ours (`hopper`, `triton_heads`): the hidden rows, K · F wide, stay on the
chip, and its result is float32, as it was summed. Weights are float32 parameters, cast to x's dtype
(`tnp.ops.casting`).
"""

import math
from types import ModuleType

import torch
import torch.nn.functional as F

from tnp.inputs import require_floats
from tnp.ops import auto, registry
from tnp.ops.matmul import cast_weights, weight_gradients
from tnp.ops.mixture_heads import hopper, triton_heads

# A fact of the machine: torch.compile asks once instead of tracing into drivers.
_require_supported = torch.compiler.assume_constant_result(registry.check)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Elements of the 16 bytes that grouped_mm wants rows to be multiples of.
GROUPED_MULTIPLE = 8


def _kernels(x: torch.Tensor, down: torch.Tensor) -> ModuleType:
    return hopper if hopper.serves(x, down) else triton_heads


@torch.library.custom_op("tnp::mixture_heads", mutates_args=())
def _mixture_heads(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    with torch.cuda.device_of(x):  # where Triton launches
        weights = cast_weights(up, down, x.dtype)
        return _kernels(x, weights[1]).forward(x, *weights)


@_mixture_heads.register_fake
def _(x, up, down):
    return x.new_empty(x.shape[0], *down.shape[:2], dtype=torch.float32)


@torch.library.custom_op("tnp::mixture_heads_backward", mutates_args=())
def _mixture_heads_backward(
    dout: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    with torch.cuda.device_of(x):
        weights = cast_weights(up, down, x.dtype)
        kernels = _kernels(x, weights[1])
        dx, dup, ddown = kernels.backward(dout.contiguous(), x, *weights)
    return dx, *weight_gradients(dup, ddown, up, down)


@_mixture_heads_backward.register_fake
def _(dout, x, up, down):
    return tuple(inputs.new_empty(inputs.shape) for inputs in (x, up, down))


def _save(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, dout):
    return _mixture_heads_backward(dout, *ctx.saved_tensors)


_mixture_heads.register_autograd(_backward, setup_context=_save)


def _fused(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(-1) != 1:
        rows = rows.contiguous()
    return _mixture_heads(rows, up, down).view(*x.shape[:-1], *down.shape[:2])


def mixture_heads_reference(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """The formula in x's dtype, with one matmul for all heads' hidden rows."""
    hidden = F.silu(F.linear(x, up.flatten(0, 1).to(x.dtype))).unflatten(-1, up.shape[:2])
    return torch.einsum("...kf,kof->...ko", hidden, down.to(x.dtype))


def _loop(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    up, down = up.to(x.dtype), down.to(x.dtype)
    heads = [
        F.linear(F.silu(F.linear(x, up_k)), down_k) for up_k, down_k in zip(up, down, strict=True)
    ]
    return torch.stack(heads, dim=-2)


def _bmm(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1]).expand(len(up), -1, -1)
    hidden = F.silu(torch.bmm(rows, up.to(x.dtype).mT))
    out = torch.bmm(hidden, down.to(x.dtype).mT)
    return out.transpose(0, 1).reshape(*x.shape[:-1], *down.shape[:2])


def _grouped_mm(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """As `_bmm`; O is zero-padded to the width that grouped_mm wants rows to be multiples of."""
    n_out = down.shape[1]
    rows = x.reshape(-1, x.shape[-1]).expand(len(up), -1, -1)
    hidden = F.silu(F.grouped_mm(rows, up.to(x.dtype).mT))
    down = F.pad(down.to(x.dtype), (0, 0, 0, -n_out % GROUPED_MULTIPLE))
    out = F.grouped_mm(hidden, down.mT)[..., :n_out]
    return out.transpose(0, 1).reshape(*x.shape[:-1], len(up), n_out)


IMPLEMENTATIONS = {
    "torch": mixture_heads_reference,
    "loop": _loop,
    "bmm": _bmm,
    "grouped_mm": _grouped_mm,
    "fused": _fused,
}


def mixture_heads(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, *, implementation: str = "torch"
) -> torch.Tensor:
    """silu(x up_kᵀ) down_kᵀ of every head k.

    Args:
        x: [..., D]; bfloat16, float16 or float32 for `fused`, bfloat16 for `grouped_mm`, any float
            dtype otherwise.
        up: [K, F, D], down: [K, O, F]; any float dtype, as a rule float32 parameters. O is at most
            16 for `fused`; D and F are multiples of 8 for `grouped_mm`.
        implementation: a name of `tnp.ops.registry.names("mixture_heads")`.

    Returns:
        [..., K, O], float32 for `fused`, elsewhere in x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
        RuntimeError: the implementation cannot run on this device and dtype.
    """
    if implementation == "auto":
        _check(x, up, down, "torch")
        sizes = dict(zip(("n_components", "d_ff", "d_model"), up.shape, strict=True))
        sizes |= {"rows": math.prod(x.shape[:-1]), "n_outputs": down.shape[1]}
        implementation = auto.resolve("mixture_heads", x.device, x.dtype, **sizes)
    _check(x, up, down, implementation)
    _require_supported("mixture_heads", implementation, x.device, x.dtype)
    if x.numel() == 0:
        out = mixture_heads_reference(x, up, down)
        return out.float() if implementation == "fused" else out
    return IMPLEMENTATIONS[implementation](x, up, down)


def _check(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, implementation: str) -> None:
    if up.dim() != 3 or down.dim() != 3 or down.shape[::2] != up.shape[:2]:
        raise ValueError(
            f"up is {tuple(up.shape)} and down {tuple(down.shape)}: "
            "they must be [K, F, D] and [K, O, F]"
        )
    d = up.shape[2]
    if x.dim() == 0 or x.shape[-1] != d:
        raise ValueError(f"x is {tuple(x.shape)}: it must be [..., D] with D = {d} of up")
    require_floats(x=x, up=up, down=down)
    for name, weight in (("up", up), ("down", down)):
        if weight.device != x.device:
            raise ValueError(
                f"{name} is on {weight.device} and x on {x.device}: they must be equal"
            )
    if implementation == "fused":
        if x.dtype not in DTYPES:
            raise ValueError(f"x is {x.dtype}: it must be one of {', '.join(map(str, DTYPES))}")
        if down.shape[1] > triton_heads.MAX_OUTPUTS.value:
            raise ValueError(
                f"O is {down.shape[1]}: implementation 'fused' takes at most "
                f"{triton_heads.MAX_OUTPUTS.value} outputs a head"
            )
    if implementation == "grouped_mm" and (d % GROUPED_MULTIPLE or up.shape[1] % GROUPED_MULTIPLE):
        raise ValueError(
            f"up is {tuple(up.shape)}: implementation 'grouped_mm' takes F and D that are "
            f"multiples of {GROUPED_MULTIPLE}"
        )
