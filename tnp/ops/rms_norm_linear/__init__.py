"""Computes RMSNorm after the residual addition, and the linear layer that reads it.

    sum = x + update        y = rms_norm(sum) wᵀ, or its SiLU

It is for a few rows, for which a launch takes longer than its work. It has no backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import TYPE_CHECKING

from tnp.dispatch.spec import (
    EVERY_DTYPE_ON,
    FLOATS,
    Call,
    Implementation,
    Operation,
    Operator,
    Problem,
    Reason,
    Work,
    lacks_shared,
    triton_from,
)
from tnp.ops import rms_norm
from tnp.ops._shared.declared import by_pytorch, cases_by_dtype, left_out_by_tf32
from tnp.util.checks import positive_number, require_floats, require_no_gradient, require_one_device

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rms_norm_linear"]

# The kernel for a few rows takes so many. The numbers stand here because its module imports Triton,
# which a declaration must not. For wider rows its code would compile for minutes.
MOST_ROWS, MOST_WIDTH = 16, 2048


def reference(x, update, norm_weight, weight, eps, silu=False):
    """Computes the formulas in PyTorch, in x's dtype, to which weights are cast."""
    from torch.nn import functional as F

    total, normalized = rms_norm.add_reference(x, update, norm_weight, eps)
    y = F.linear(normalized, weight.to(x.dtype))
    return total, F.silu(y) if silu else y


def describe(x, update, norm_weight, weight, silu=False) -> dict:
    """Returns the sizes. Raises ValueError for tensors that do not fit, or want a gradient."""
    tensors = {"x": x, "update": update, "norm_weight": norm_weight, "weight": weight}
    require_no_gradient("rms_norm_linear", **tensors)
    require_floats(weight=weight)
    require_one_device(x=x, weight=weight)
    sizes = rms_norm.add_describe(x, update, norm_weight, "norm_weight")
    if weight.dim() != 2 or weight.shape[1] != sizes["width"]:
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}: they must be [..., D] and "
            "[n_out, D]"
        )
    return sizes | {"n_out": len(weight)}


def draw(case, random) -> dict:
    """Draws the inputs of `add_rms_norm`, and a weight scaled by its fan-in."""
    inputs = rms_norm.add_draw(case, random)
    norm_weight = inputs.pop("weight")
    weight = random.weight(case.problem["n_out"], case.problem["width"])
    return inputs | {"norm_weight": norm_weight, "weight": weight}


def work(case, pass_) -> Work:
    """Counts x, update and the weight in x's dtype → sum and y."""
    rows, width, n_out = (size for _, size in case.problem.sizes)
    size = case.problem.itemsize
    read = (2 * rows * width + n_out * width) * size + 4 * width
    flops = {case.problem.dtype: 2.0 * rows * width * n_out}
    return Work(flops, read, rows * (width + n_out) * size)


def compiled(target) -> Iterator[Problem]:
    """Yields problems to compile: a few rows, in one program and in two, and more rows."""
    for dtype in ("bfloat16", "float32") if target.capability in EVERY_DTYPE_ON else ("bfloat16",):
        for rows, width in ((2, 512), (2, 2048), (16, 512), (40, 512)):
            yield OPERATOR.problem(dtype, rows=rows, width=width, n_out=1536, silu=True)


def supports_many(call: Call) -> Reason:
    """Returns why the kernel for any number of rows cannot serve a call, or None.

    In 16 bits, rows wider than a tile pass through three stages of shared memory.
    """
    p = call.problem
    staged = p.itemsize == 2 and p["width"] > 256
    return lacks_shared(call, 149_504) if staged else None


def supports_few(call: Call) -> Reason:
    """Returns why the kernel for a few rows cannot serve a call, or None."""
    p = call.problem
    if p["rows"] > MOST_ROWS:
        return f"it takes up to {MOST_ROWS} rows, not {p['rows']}"
    if p["width"] > MOST_WIDTH:
        return f"it takes widths up to {MOST_WIDTH}, not {p['width']}"
    if p.itemsize != 2:
        return f"it takes floats of 16 bits, not {p.dtype}"
    return None


def _supported(call: Call) -> Reason:
    if (reason := triton_from(80)(call)) is not None:
        return reason
    return None if supports_few(call) is None else supports_many(call)


_SILU = {"silu": True}
_INTERPRETED = (
    (2, 48, 40, {"batch": 2, "start": 1}),
    (15, 48, 16, {"batch": 3, "start": 1}),  # two programs share the rows
    (17, 100, 33, _SILU),
    (3, 1100, 16, {"start": 1, **_SILU}),
)
# Both sides of a tile's rows in each configuration, ragged widths, and the model's widths.
_GPU = (
    *((rows, 512, 1536, {}) for rows in (1, 2, 8, 9, 16, 17, 64, 65, 777)),
    *((rows, 512, 1408, _SILU) for rows in (1, 2, 8, 40)),
    (14, 512, 1408, {"batch": 7, "start": 1, **_SILU}),
    *((33, width, 100, _SILU) for width in (1, 100, 513, 1025, 4096)),
    (8, 5000, 777, {"batch": 2, "start": 1}),
    *((20, 512, 512, {"magnitude": magnitude}) for magnitude in (1e-4, 1e3)),
)
OPERATOR = Operator(
    "rms_norm_linear",
    inputs=("x", "update", "norm_weight", "weight"),
    outputs=("sum", "y"),
    sizes=("rows", "width", "n_out"),
    options={"silu": bool},
    scalars={"eps": rms_norm.EPS},
    implementations=(
        *(replace(one, gradients=()) for one in by_pytorch(reference, ("silu",))),
        Implementation(
            "triton",
            forward=Operation(
                "rms_norm_linear.forward",
                (f"{__name__}.few_rows:FORWARD", f"{__name__}.triton_rms_norm_linear:FORWARD"),
            ),
            supported=_supported,
            options=("silu",),
        ),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    condition=left_out_by_tf32,
    cases=lambda target: cases_by_dtype(
        OPERATOR, dict.fromkeys(FLOATS, _GPU if target.kind == "cuda" else _INTERPRETED)
    ),
    compiled=compiled,
    controls={
        "update left out": lambda x, update, *others, **options: reference(
            x, 0 * update, *others, **options
        ),
        "no norm": lambda x, update, norm_weight, weight, eps, **options: reference(
            x, update, norm_weight, weight, 1e6, **options
        ),
        "weight shifted": lambda x, update, norm_weight, weight, eps, **options: reference(
            x, update, norm_weight, weight.roll(1, 0), eps, **options
        ),
        "rows shifted": lambda x, update, *others, **options: reference(
            x.roll(1, -2), update.roll(1, -2), *others, **options
        ),
    },
)


def rms_norm_linear(
    x: Tensor,
    update: Tensor,
    norm_weight: Tensor,
    weight: Tensor,
    *,
    eps: float = rms_norm.EPS,
    silu: bool = False,
    implementation: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Returns x + update, and the linear layer of its `rms_norm`.

    Args:
        x, update: [..., D], equal in shape, dtype and device, each with any strides. `triton` takes
            bfloat16, float16 or float32. It serves any number of rows, but is fast only for a few:
            each program of a tile of rows computes their norm again.
        norm_weight: [D], any float dtype. `torch` casts it to x's dtype.
        weight: [n_out, D], any float dtype. It is cast to x's dtype.
        eps: a number, positive and finite.
        silu: whether to apply SiLU to the product.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [..., D] and [..., n_out] in x's dtype, without a gradient, and equal from run to run.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or a tensor requires a gradient.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch.call as dispatch

    if type(eps) is not float or not 0.0 < eps < inf:
        eps = positive_number("eps", eps)
    options = (("silu", True),) if silu else ()
    inputs = x, update, norm_weight, weight
    return dispatch.call(OPERATOR, implementation, inputs, (eps,), options)
