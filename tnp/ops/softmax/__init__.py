"""Computes softmax over the last dimension.

y = e^(x − max x) / Σ e^(x − max x)

`tnp_lab` adds `three_passes` and `one_pass`: CUDA C++ to learn from, forward only.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tnp.dispatch.spec import Operator, Work
from tnp.ops._shared.declared import by_pytorch, by_triton, cases_by_dtype, draw_rows
from tnp.util.checks import require_floats

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["softmax"]


def reference(x):
    from torch.nn.functional import softmax

    return softmax(x, -1)


def eager(x):
    """Computes the formula in single operations."""
    powers = (x - x.amax(-1, True)).exp()
    return powers / powers.sum(-1, True)


def describe(x) -> dict:
    """Returns the sizes. Raises ValueError if there is no last dimension."""
    if x.dim() == 0:
        raise ValueError("x has no dimensions: it must be [..., width]")
    require_floats(x=x)
    return {"rows": prod(x.shape[:-1]), "width": x.shape[-1]}


def draw(case, random) -> dict:
    """Draws normal numbers. If the case names a number `masked`, every `masked`-th column is −∞."""
    x = draw_rows(case, random)
    if case["masked"]:
        x[..., :: case["masked"]] = -float("inf")
    return {"x": x}


def work(case, pass_) -> Work:
    size = case.problem["rows"] * case.problem["width"] * case.problem.itemsize
    return Work({}, size if pass_ == "forward" else 2 * size, size)


def condition(case, inputs) -> float:
    """Estimates the error of y from rounding x − max x, its exponential and the quotient to
    float32.

    In a single row one element may be nearly all of y, and PyTorch's three roundings may be 0 by
    chance.
    """
    x = inputs["x"].double()
    y = reference(x)
    below = (x.amax(-1, True) - x).where(y > 0, 0)
    # A rounding is at most 2⁻²⁴, and its root mean square is 1/√3 of that.
    return float((y * (2 + below)).norm() / y.norm()) * 2**-24 / 3**0.5


def _without_first_half(x):
    """Imitates a loop that forgets its maximum and sum from block to block: a negative control."""
    n = x.shape[-1] // 2
    return (x - x.amax(-1, True)).exp() / (x[..., n:] - x.amax(-1, True)).exp().sum(-1, True)


# Rows and width, and how they are drawn: one column, both sides of the size of a program or a
# block, large numbers whose exponentials overflow, and masked columns.
_GPU = {
    "bfloat16": (
        *((rows, 1024, {}) for rows in (1, 3, 33)),
        (32, 128, {}),
        (231, 100, {"batch": 3, "start": 5}),
        *((777, width, {"batch": 3, "start": 1}) for width in (512, 2048, 4096, 8192, 16_384)),
        *((131, width, {}) for width in (1025, 4097, 16_383, 16_385, 50_257, 128_256)),
        (4096, 8192, {}),
        (131, 20_000, {"masked": 2, "magnitude": 8.0}),
    ),
    "float16": ((2000, 512, {"batch": 2, "magnitude": 8.0}), (128, 4096, {}), (77, 32_768, {})),
    "float32": (
        (33, 1, {}),
        *((200, 512, {"magnitude": magnitude}) for magnitude in (1e-4, 1e3)),
        *((131, width, {"start": 1}) for width in (1000, 4096, 16_384, 20_000)),
        (131, 1000, {"masked": 3}),
    ),
}
_INTERPRETED = {
    "bfloat16": ((14, 48, {"batch": 2, "start": 2}),),
    "float16": ((5, 64, {"magnitude": 8.0}),),
    "float32": (
        (3, 1, {}),
        (51, 48, {"batch": 3, "start": 1}),
        (9, 100, {"magnitude": 1e3}),
        (5, 60, {"masked": 3}),
        (2, 16_400, {"start": 1}),
    ),
}
OPERATOR = Operator(
    "softmax",
    inputs=("x",),
    outputs=("y",),
    sizes=("rows", "width"),
    differentiated=("x",),
    keeps=("y",),
    implementations=(
        *by_pytorch(reference, eager=eager),
        by_triton(
            "triton",
            "softmax",
            "tnp.ops.softmax.triton_softmax",
            forward=("FORWARD", "ONLINE_FORWARD"),
            backward=("BACKWARD", "BLOCKS_BACKWARD"),
        ),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    condition=condition,
    cases=lambda target: cases_by_dtype(OPERATOR, _GPU if target.kind == "cuda" else _INTERPRETED),
    controls={
        "another temperature": lambda x: reference(x * 1.01),
        "not normalized": lambda x: (x - x.amax(-1, True)).exp(),
        "rows of another view": lambda x: reference(x.roll(1, -2)),
        "first half left out": _without_first_half,
    },
)


def softmax(x: Tensor, *, implementation: str = "torch") -> Tensor:
    """Returns softmax over the last dimension, stable at any magnitude.

    Args:
        x: [..., width], any strides. A tensor with contiguous rows, such as h[:, n:], is not
            copied. `triton` takes bfloat16, float16 or float32. −∞ gets no weight. A row of only −∞
            gives NaN, as in PyTorch.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [..., width] in x's dtype, contiguous from `triton`.

    Raises:
        ValueError: x has no dimensions or is no float.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch.call as dispatch

    return dispatch.call(OPERATOR, implementation, (x,))
