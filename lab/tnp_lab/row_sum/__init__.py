"""Sums over the last dimension, in float32: an operator to learn from.

    y = Σ x        over each row

Forward only. `tree` and `shuffles` are CUDA C++, `triton` is Triton.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING

from tnp.dispatch.spec import Implementation, Operation, Operator, Work, triton_from
from tnp.ops._shared.declared import by_pytorch, cases_by_dtype, draw_rows
from tnp.util.checks import require_floats, require_no_gradient
from tnp_lab.declared import by_cuda

if TYPE_CHECKING:
    from torch import Tensor


def reference(x):
    """Computes the formula in PyTorch: in float64 for float64, else in float32."""
    import torch

    return x.sum(-1, dtype=torch.promote_types(x.dtype, torch.float32))


def describe(x) -> dict:
    """Returns sizes. Raises ValueError for 0 dimensions, or if x asks for a gradient."""
    if x.dim() == 0:
        raise ValueError("x has no dimensions: it must be [..., width]")
    require_no_gradient("row_sum", x=x)
    require_floats(x=x)
    return {"rows": prod(x.shape[:-1]), "width": x.shape[-1]}


def draw(case, random) -> dict:
    """Draws normal numbers. The case's `apart` is added to the first and taken from the last."""
    x = draw_rows(case, random)
    if case["apart"]:
        x[..., 0] += case["apart"]
        x[..., -1] -= case["apart"]
    return {"x": x}


def work(case, pass_) -> Work:
    """Counts x once, and one number for each row."""
    p = case.problem
    return Work({}, p["rows"] * p["width"] * p.itemsize, p["rows"] * max(4, p.itemsize))


LANES = 256  # each adds up its share of a row, one number after another


def condition(case, inputs) -> float:
    """Returns the relative error of float32 when LANES partial sums are added up as a tree.

    On average a number goes through half the additions of its lane, and through all additions of
    the tree. Each addition rounds by at most 2⁻²⁴ of its sum, and in the mean square by 1/√3 of
    this.
    """
    x = inputs["x"].double()
    additions = x.shape[-1] / (2 * LANES) + (LANES - 1).bit_length()
    return additions**0.5 * float(x.norm() / reference(x).norm()) * 2**-24 / 3**0.5


def _rounded(x):
    """Rounds the sum to x's dtype, as a wrong kernel might."""
    y = reference(x)
    return y.to(x.dtype).to(y.dtype)


# Rows, width, and how they are drawn: one column, widths just below and above a block's load, sums
# beyond float16, and rows whose first and last number cancel.
_RAGGED = [(33, width, {"start": 1}) for width in (1, 17, 777, 1000, 4097)]
_GPU = {
    "bfloat16": (
        *_RAGGED,
        *((131, width, {}) for width in (2047, 2048, 2049, 32_768, 128_256)),
        (231, 100, {"batch": 3, "start": 5}),
        (777, 8192, {"batch": 3, "start": 1}),
        (4096, 8192, {}),
        (1, 8192, {}),
    ),
    "float16": (*_RAGGED, (2000, 512, {"batch": 2, "magnitude": 4e3}), (77, 32_768, {})),
    "float32": (
        *_RAGGED,
        *((200, 512, {"magnitude": magnitude}) for magnitude in (1e-4, 1e3)),
        (131, 1000, {"apart": 1e4}),
        (131, 20_000, {"apart": 1e4}),
    ),
}
_INTERPRETED = {
    "bfloat16": ((14, 48, {"batch": 2, "start": 2}), (3, 4097, {"start": 1})),
    "float16": ((5, 512, {"magnitude": 4e3}),),
    "float32": (
        (3, 1, {}),
        (33, 17, {"batch": 3, "start": 1}),
        (5, 1000, {"apart": 1e4}),
        (2, 8300, {"start": 1}),
    ),
}
OPERATOR = Operator(
    "row_sum",
    title="sum of a row",
    inputs=("x",),
    outputs=("y",),
    sizes=("rows", "width"),
    implementations=(
        *(replace(one, gradients=()) for one in by_pytorch(reference)),
        by_cuda(
            "tree",
            "row_sum",
            "tnp_lab.row_sum.cuda_row_sum:FORWARD_TREE",
            title="CUDA C++ by a tree",
        ),
        by_cuda(
            "shuffles",
            "row_sum",
            "tnp_lab.row_sum.cuda_row_sum:FORWARD_SHUFFLES",
            title="CUDA C++ by shuffles",
        ),
        Implementation(
            "triton",
            forward=Operation("row_sum.forward", ("tnp_lab.row_sum.triton_row_sum:FORWARD",)),
            supported=triton_from(80),
        ),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    condition=condition,
    cases=lambda target: cases_by_dtype(OPERATOR, _GPU if target.kind == "cuda" else _INTERPRETED),
    controls={
        "the last number left out": lambda x: reference(x[..., :-1]),
        "sums of the rows before": lambda x: reference(x).roll(1, -1),
        "rounded to x's dtype": _rounded,
    },
)


def row_sum(x: Tensor, *, implementation: str = "torch") -> Tensor:
    """Sums over the last dimension, in float32.

    Args:
        x: [..., width], any strides; a view of whole rows, as h[:, n:], is not copied. Our
            implementations take bfloat16, float16 and float32.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [...] in float32, or in float64 for float64, without a gradient. Our implementations return
        contiguous tensors that are equal from run to run.

    Raises:
        ValueError: x has no dimensions, is no float or asks for a gradient.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch.call as dispatch

    return dispatch.call(OPERATOR, implementation, (x,))
