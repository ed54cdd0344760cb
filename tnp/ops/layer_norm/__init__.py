"""Computes LayerNorm.

    mean = mean_d x    rstd = 1/√(mean_d (x − mean)² + eps)    y = (x − mean) · rstd · weight + bias

(Ba, Kiros and Hinton, Layer Normalization, arXiv 1607.06450.)
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING

from tnp.dispatch.spec import Operator, Work
from tnp.ops._shared.declared import (
    by_pytorch,
    by_triton,
    cases_by_dtype,
    draw_rows,
    rows_within,
    triton_to_width,
)
from tnp.util.checks import positive_number, require_floats, require_one_device

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["layer_norm"]

EPS = 1e-5
MAX_WIDTH = 16384  # a whole row lies in registers of the forward kernel


def reference(x, weight, bias, eps):
    """Computes the formula in PyTorch, in x's dtype, to which the parameters are cast."""
    from torch.nn.functional import layer_norm

    return layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)


def eager(x, weight, bias, eps):
    """Computes the formula in single operations, in float32."""
    wide = x.float()
    centred = wide - wide.mean(-1, True)
    y = centred * (centred.square().mean(-1, True) + eps).rsqrt() * weight + bias
    return y.to(x.dtype)


def describe(x, weight, bias) -> dict:
    same = x.shape[-1:] == weight.shape == bias.shape
    if not same or weight.dim() != 1 or len(weight) == 0:
        raise ValueError(
            f"x is {tuple(x.shape)}, weight {tuple(weight.shape)} and bias {tuple(bias.shape)}: "
            "they must be [..., D], [D] and [D], with D at least 1"
        )
    require_one_device(x=x, weight=weight, bias=bias)
    require_floats(x=x, weight=weight, bias=bias)
    return {"rows": prod(x.shape[:-1]), "width": x.shape[-1]}


def draw(case, random) -> dict:
    """Draws normal numbers around the case's `offset`, weights around 1 and biases around 0."""
    import torch

    width = case.problem["width"]
    weight, bias = (random(width, dtype=torch.float32) for _ in range(2))
    x = draw_rows(case, random) + case["offset"]
    return {"x": x, "weight": 1 + 0.3 * weight, "bias": 0.3 * bias}


def work(case, pass_) -> Work:
    """Counts x and y, or x, dy and dx, and the float32 parameters and backward their gradients."""
    parameters = 2 * case.problem["width"] * 4
    size = case.problem["rows"] * case.problem["width"] * case.problem.itemsize
    if pass_ == "forward":
        return Work({}, size + parameters, size)
    return Work({}, 2 * size + parameters / 2, size + parameters)


def within(model, run):
    """Returns the problem of the norms of a language model that uses LayerNorm."""
    if model.get("norm") != "layer":
        return None
    return OPERATOR.problem(run["dtype"], rows=rows_within(run), width=model["d_model"])


# Rows and width, and how they are drawn: both sides of the size of a program or a block, and an
# offset that would ruin a variance computed as mean_d x² − mean².
_GPU = {
    "bfloat16": (
        (16_384, 768, {}),
        *((rows, 768, {}) for rows in (1, 3, 5, 33)),
        (2331, 1024, {"batch": 3}),
        (231, 100, {"batch": 3, "start": 5}),
        *(
            (777, width, {"batch": 3, "start": 1})
            for width in (768, 1280, 2048, 4096, 8192, 16_384)
        ),
        *((131, width, {}) for width in (1025, 4097, 8200, 16_383)),
        (16_384, 4096, {}),
    ),
    "float16": ((2000, 768, {"batch": 2}), (128, 4096, {}), (77, 16_384, {})),
    "float32": (
        (33, 3, {}),
        (2000, 768, {"batch": 2, "start": 7}),
        *((200, 768, {"magnitude": magnitude}) for magnitude in (1e-3, 1e4)),
        (200, 768, {"offset": 100.0}),
        *((131, width, {"start": 1}) for width in (1000, 2048, 4096, 8192, 16_384)),
    ),
}
_INTERPRETED = {
    "bfloat16": ((14, 48, {"batch": 2, "start": 2}),),
    "float16": ((5, 64, {}),),
    "float32": (
        (3, 3, {}),
        (51, 48, {"batch": 3, "start": 1}),
        (33, 100, {"offset": 100.0}),
        (9, 64, {"magnitude": 1e-3}),
        (3, 1100, {"start": 1}),
    ),
}
OPERATOR = Operator(
    "layer_norm",
    inputs=("x", "weight", "bias"),
    outputs=("y",),
    sizes=("rows", "width"),
    differentiated=("x", "weight", "bias"),
    scalars={"eps": EPS},
    implementations=(
        *by_pytorch(reference, eager=eager),
        by_triton(
            "triton",
            "layer_norm",
            "tnp.ops.layer_norm.triton_layer_norm",
            backward=("BACKWARD", "WIDE_BACKWARD"),
            supported=triton_to_width(MAX_WIDTH),
        ),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=lambda target: cases_by_dtype(OPERATOR, _GPU if target.kind == "cuda" else _INTERPRETED),
    within=within,
    controls={
        "eps too large": lambda x, weight, bias, eps: reference(x, weight, bias, 1e-2),
        "rows of another view": lambda x, weight, bias, eps: reference(
            x.roll(1, -2), weight, bias, eps
        ),
        "weight missing": lambda x, weight, bias, eps: reference(x, 0 * weight + 1, bias, eps),
        "bias missing": lambda x, weight, bias, eps: reference(x, weight, 0 * bias, eps),
        "mean left in": lambda x, weight, bias, eps: (
            x * (x.square().mean(-1, True) + eps).rsqrt() * weight.to(x.dtype) + bias.to(x.dtype)
        ),
    },
)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = EPS, implementation: str = "torch"
) -> Tensor:
    """Returns (x − mean_d x) / √(var_d x + eps) · weight + bias.

    Args:
        x: [..., D], any strides. A tensor with contiguous rows, such as h[:, n:], is not copied.
            `triton` takes bfloat16, float16 or float32, and D up to 16,384.
        weight, bias: [D], any float dtype. `torch` casts them to x's dtype.
        eps: a number, positive and finite.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [..., D] in x's dtype, contiguous from `triton`.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch.call as dispatch

    if type(eps) is not float or not 0.0 < eps < inf:
        eps = positive_number("eps", eps)
    return dispatch.call(OPERATOR, implementation, (x, weight, bias), (eps,))
