"""Computes RMSNorm, alone or after the residual addition.

    sum = x + update    rstd = 1/√(mean_d sum² + eps)    normalized = sum · rstd · weight

The sum is rounded to x's dtype before it is normalized. The backward pass reads the sum, and
computes rstd again. (Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467.)
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING

from tnp.dispatch.spec import Implementation, Operator, Work
from tnp.ops._shared.declared import (
    by_pytorch,
    by_triton,
    cases_by_dtype,
    draw_rows,
    rows_within,
    triton_to_width,
)
from tnp.util.checks import positive_number, require_equal, require_floats, require_one_device

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["add_rms_norm", "rms_norm"]

EPS = 1e-6
MAX_WIDTH = 16384  # the gate tests widths up to this


def reference(x, weight, eps):
    """Computes the formula in PyTorch, in x's dtype, to which the weight is cast."""
    from torch.nn.functional import rms_norm

    return rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def add_reference(x, update, weight, eps):
    total = x + update
    return total, reference(total, weight, eps)


def eager(x, weight, eps):
    """Computes the formula in single operations, in float32, as Llama's module does."""
    wide = x.float()
    return (wide * (wide.square().mean(-1, True) + eps).rsqrt()).to(x.dtype) * weight.to(x.dtype)


def add_eager(x, update, weight, eps):
    total = x + update
    return total, eager(total, weight, eps)


def describe(x, weight, name="weight") -> dict:
    """Returns the sizes. Raises ValueError that names the weight if tensors do not fit together."""
    if weight.dim() != 1 or x.shape[-1:] != weight.shape or len(weight) == 0:
        raise ValueError(
            f"x is {tuple(x.shape)} and {name} {tuple(weight.shape)}: they must be [..., D] and "
            "[D], with D at least 1"
        )
    require_one_device(x=x, **{name: weight})
    require_floats(x=x, **{name: weight})
    return {"rows": prod(x.shape[:-1]), "width": x.shape[-1]}


def add_describe(x, update, weight, name="weight") -> dict:
    """Does the same as `describe`, with an update like x."""
    sizes = describe(x, weight, name)
    require_equal(x=x, update=update)
    return sizes


def draw(case, random) -> dict:
    import torch

    spread = random(case.problem["width"], dtype=torch.float32)
    return {"x": draw_rows(case, random), "weight": 1 + 0.3 * spread}


def add_draw(case, random) -> dict:
    """Draws the same as `draw`, and an update like x."""
    x_and_weight = draw(case, random)
    weight = x_and_weight.pop("weight")
    return x_and_weight | {"update": draw_rows(case, random), "weight": weight}


def _work(case, read: int, written: int, pass_: str) -> Work:
    """Counts `read` and `written` tensors like x, the float32 weight, and backward its gradient."""
    weight = case.problem["width"] * 4
    size = case.problem["rows"] * case.problem["width"] * case.problem.itemsize
    return Work({}, read * size + weight, written * size + weight * (pass_ == "backward"))


def work(case, pass_) -> Work:
    return _work(case, 1 if pass_ == "forward" else 2, 1, pass_)


def add_work(case, pass_) -> Work:
    """Counts x, update → sum, normalized, or sum and both gradients → dx = dupdate."""
    return _work(case, *((2, 2) if pass_ == "forward" else (3, 1)), pass_)


# Rows and width, and how they are drawn: both sides of a tile's rows at a width, more tiles than
# programs, padded widths, one column, and widths beyond a warp and a backward program.
_GPU = {
    "bfloat16": (
        (36_096, 512, {"batch": 64}),
        (44_000, 512, {"batch": 4}),
        (4_000, 512, {"batch": 4, "start": 10_000}),
        *((rows, 512, {}) for rows in (1, 3, 4, 5, 33, 205_000)),
        (2331, 1024, {"batch": 3}),
        (231, 384, {"batch": 3}),
        (231, 100, {"batch": 3, "start": 5}),
        (33, 1, {}),
        *((777, width, {"batch": 3, "start": 1}) for width in (768, 2048, 4096, 8192, 16_384)),
        *((131, width, {}) for width in (1025, 4097, 8200, 16_383)),
        (16_384, 4096, {}),
    ),
    "float16": ((2000, 512, {"batch": 2}), (128, 4096, {}), (77, 16_384, {})),
    "float32": (
        (2000, 512, {"batch": 2, "start": 7}),
        *((200, 512, {"batch": 2, "magnitude": magnitude}) for magnitude in (1e-4, 1e4)),
        *((131, width, {"start": 1}) for width in (1000, 2048, 4096, 8192, 16_384)),
    ),
}
_INTERPRETED = {
    "bfloat16": ((14, 48, {"batch": 2, "start": 2}),),
    "float16": ((5, 64, {}),),
    "float32": (
        (1, 1, {}),
        (51, 48, {"batch": 3, "start": 1}),
        (33, 100, {}),
        (9, 64, {"magnitude": 1e-4}),
        (3, 1100, {"start": 1}),
        (2, 8200, {}),
    ),
}


def _sizes(target):
    return _GPU if target.kind == "cuda" else _INTERPRETED


def _within(operator: Operator, model, run):
    """Returns the problem of the norms of a neural process, or of a model with RMSNorm."""
    if model.get("norm", "rms") != "rms":
        return None
    return operator.problem(run["dtype"], rows=rows_within(run), width=model["d_model"])


def _implementations(name: str, plain, written_out) -> tuple[Implementation, ...]:
    ours = by_triton(
        "fused",
        name,
        "tnp.ops.rms_norm.triton_rms_norm",
        forward=("FORWARD", "WIDE_FORWARD"),
        backward=("BACKWARD", "WIDE_BACKWARD"),
        supported=triton_to_width(MAX_WIDTH),
    )
    return *by_pytorch(plain, eager=written_out), ours


def _without_residual_gradient(x, update, weight, eps):
    total, normalized = add_reference(x, update, weight, eps)
    return total.detach() + 0 * (x + update), normalized


RMS_NORM = Operator(
    "rms_norm",
    inputs=("x", "weight"),
    outputs=("normalized",),
    sizes=("rows", "width"),
    family="rms_norm",
    differentiated=("x", "weight"),
    scalars={"eps": EPS},
    implementations=_implementations("rms_norm", reference, eager),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=lambda target: cases_by_dtype(RMS_NORM, _sizes(target)),
    within=lambda model, run: _within(RMS_NORM, model, run),
    controls={
        "eps too large": lambda x, weight, eps: reference(x, weight, 1e-2),
        "rows of another view": lambda x, weight, eps: reference(x.roll(1, -2), weight, eps),
        "weight missing": lambda x, weight, eps: reference(x, 0 * weight + 1, eps),
        "mean taken off": lambda x, weight, eps: reference(x - x.mean(-1, True), weight, eps),
    },
)
ADD_RMS_NORM = Operator(
    "add_rms_norm",
    inputs=("x", "update", "weight"),
    outputs=("sum", "normalized"),
    sizes=("rows", "width"),
    family="rms_norm",
    differentiated=("x", "update", "weight"),
    scalars={"eps": EPS},
    keeps=("sum", "weight"),
    implementations=_implementations("add_rms_norm", add_reference, add_eager),
    describe=add_describe,
    draw=add_draw,
    reference=add_reference,
    work=add_work,
    cases=lambda target: cases_by_dtype(ADD_RMS_NORM, _sizes(target)),
    within=lambda model, run: _within(ADD_RMS_NORM, model, run),
    controls={
        "eps too large": lambda x, update, weight, eps: add_reference(x, update, weight, 1e-2),
        "rows of another view": lambda x, update, weight, eps: add_reference(
            x.roll(1, -2), update, weight, eps
        ),
        "weight missing": lambda x, update, weight, eps: add_reference(
            x, update, 0 * weight + 1, eps
        ),
        "residual gradient missing": _without_residual_gradient,
    },
)
OPERATORS = (RMS_NORM, ADD_RMS_NORM)


def rms_norm(
    x: Tensor, weight: Tensor, *, eps: float = EPS, implementation: str = "torch"
) -> Tensor:
    """Returns x / √(mean_d x² + eps) · weight.

    Args:
        x: [..., D], any strides. A tensor with contiguous rows, such as h[:, n:], is not copied.
            `fused` takes bfloat16, float16 or float32, and D up to 16,384.
        weight: [D], any float dtype. `torch` casts it to x's dtype.
        eps: a number, positive and finite.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [..., D] in x's dtype, contiguous from `fused`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch.call as dispatch

    if type(eps) is not float or not 0.0 < eps < inf:
        eps = positive_number("eps", eps)
    return dispatch.call(RMS_NORM, implementation, (x, weight), (eps,))


def add_rms_norm(
    x: Tensor, update: Tensor, weight: Tensor, *, eps: float = EPS, implementation: str = "torch"
) -> tuple[Tensor, Tensor]:
    """Returns x + update, and its `rms_norm`: the residual stream and the next layer's input.

    Args:
        x, update: [..., D], equal in shape, dtype and device, each with any strides.
        weight, eps, implementation: as for `rms_norm`.

    Returns:
        Both results are [..., D] in x's dtype.

    Raises:
        ValueError, RuntimeError: as `rms_norm`.
    """
    import tnp.dispatch.call as dispatch

    if type(eps) is not float or not 0.0 < eps < inf:
        eps = positive_number("eps", eps)
    return dispatch.call(ADD_RMS_NORM, implementation, (x, update, weight), (eps,))
