"""Softmax over the last dimension.

y = e^(x − max x) / Σ e^(x − max x)

`three_passes` and `one_pass` are CUDA C++ to learn from, forward only.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tnp.dispatch.spec import Operator, Reason, Work
from tnp.ops._shared.declared import by_cuda, by_pytorch, by_triton, cases_by_dtype, draw_rows
from tnp.util.checks import require_floats

if TYPE_CHECKING:
    from torch import Tensor


def reference(x):
    """The formula in PyTorch, in whatever dtype it is given."""
    from torch.nn.functional import softmax

    return softmax(x, -1)


def describe(x) -> dict:
    """Sizes; ValueError where there is no last dimension."""
    if x.dim() == 0:
        raise ValueError("x has no dimensions: it must be [..., width]")
    require_floats(x=x)
    return {"rows": prod(x.shape[:-1]), "width": x.shape[-1]}


def draw(case, random) -> dict:
    """Normal numbers; every `masked`-th column, where the case names a number, is −∞."""
    x = draw_rows(case, random)
    if case["masked"]:
        x[..., :: case["masked"]] = -float("inf")
    return {"x": x}


def work(case, pass_) -> Work:
    """x → y; y and dy → dx."""
    size = case.problem["rows"] * case.problem["width"] * case.problem.itemsize
    return Work({}, size if pass_ == "forward" else 2 * size, size)


def condition(case, inputs) -> float:
    """What rounding x − max x, its exponential and the quotient to float32 leaves of y.

    Of one row one element is nearly all of y: PyTorch may have luck with its three roundings.
    """
    x = inputs["x"].double()
    y = reference(x)
    below = (x.amax(-1, True) - x).where(y > 0, 0)
    # A rounding is 2⁻²⁴ at most, and 1/√3 of that in the mean square.
    return float((y * (2 + below)).norm() / y.norm()) * 2**-24 / 3**0.5


ONE_PASS_WIDTH = 32_768  # of `one_pass`: 1,024 threads have 64 registers each, half of them for x


def _fits_registers(call) -> Reason:
    width = call.problem["width"]
    if width > ONE_PASS_WIDTH:
        return f"it holds a row in registers, of width {ONE_PASS_WIDTH} at most, not {width}"
    return None


def _without_first_half(x):
    """As a loop that forgets what it carried from block to block."""
    n = x.shape[-1] // 2
    return (x - x.amax(-1, True)).exp() / (x[..., n:] - x.amax(-1, True)).exp().sum(-1, True)


# Rows and width, and how they are drawn. One column, both sides of what a program or a block holds;
# large numbers, whose exponentials are no numbers, and columns that are masked.
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
        *by_pytorch(reference),
        by_cuda("three_passes", "softmax", "tnp.ops.softmax.cuda_softmax:FORWARD_THREE_PASSES"),
        by_cuda(
            "one_pass", "softmax", "tnp.ops.softmax.cuda_softmax:FORWARD_ONE_PASS", _fits_registers
        ),
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
    """Softmax over the last dimension, stable at any magnitude.

    Args:
        x: [..., width], any strides; what is contiguous but for its rows, as h[:, n:], is not
            copied. bfloat16, float16 or float32 for `triton`. −∞ gets no weight; a row of −∞ alone
            gives NaN, as in PyTorch.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [..., width] in x's dtype, contiguous from `triton`.

    Raises:
        ValueError: x has no dimensions or is no float.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    from tnp.dispatch.call import call

    return call(OPERATOR, implementation, (x,))
