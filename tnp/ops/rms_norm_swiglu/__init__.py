"""Computes RMSNorm and SwiGLU's elementwise part: a gated, normalized activation.

    y = silu(gate) ∘ rms_norm(x) ∘ weight        rms_norm(x) = x / √(mean_d x² + eps)

(Zhang and Sennrich, Root Mean Square Layer Normalization, arXiv 1910.07467; Shazeer, GLU Variants
Improve Transformer, arXiv 2002.05202.)

`two_kernels` computes the same by our `rms_norm` and `swiglu`, forward only. It shows what fusing
them saves, and `auto` never chooses it.
"""

from __future__ import annotations

from math import inf, prod
from typing import TYPE_CHECKING

from tnp.dispatch.spec import FLOATS, Case, Implementation, Operation, Operator, Work
from tnp.ops import rms_norm, swiglu
from tnp.ops._shared.declared import by_pytorch, by_triton, cases_by_dtype, triton_to_width
from tnp.util.checks import positive_number, require_equal, require_floats, require_one_device

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["rms_norm_swiglu"]


def reference(x, gate, weight, eps):
    from torch.nn.functional import rms_norm, silu

    return silu(gate) * rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def eager(x, gate, weight, eps):
    """Computes the formula in single operations."""
    return swiglu.eager(gate, rms_norm.eager(x, weight, eps))


def describe(x, gate, weight) -> dict:
    require_equal(gate=gate, x=x)
    if weight.dim() != 1 or x.shape[-1:] != weight.shape or weight.shape[0] == 0:
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}: they must be [..., width] "
            "and [width], with width at least 1"
        )
    require_one_device(x=x, weight=weight)
    require_floats(weight=weight)
    return {"rows": prod(x.shape[:-1]), "width": x.shape[-1]}


def draw(case, random) -> dict:
    """Draws normal numbers, with x times `magnitude`. "halves": x and gate lie in one [rows,
    2·width] tensor. "narrow_weight": the weight has the activations' dtype, not float32.
    """
    rows, width = case.problem["rows"], case.problem["width"]
    if case["halves"]:
        x, gate = random(rows, 2 * width).chunk(2, dim=-1)
    else:
        x, gate = random(rows, width), random(rows, width)
    if case["magnitude"]:
        x.mul_(case["magnitude"])
    weight = 1.0 + random.weight(width)
    return {"x": x, "gate": gate, "weight": weight.to(x.dtype) if case["narrow_weight"] else weight}


def work(case, pass_) -> Work:
    """Counts every activation once, and the weight and its gradient in float32."""
    width = case.problem["width"]
    size = case.problem["rows"] * width * case.problem.itemsize
    if pass_ == "forward":
        return Work({}, 2 * size + 4 * width, size)
    return Work({}, 3 * size + 4 * width, 2 * size + 4 * width)


def cases(target) -> list[Case]:
    """Covers ragged and whole widths, halves of a projection, large and tiny values."""
    drawn = [(3, 24, {}), (5, 100, {}), (9, 128, {"halves": True})]
    drawn += [(3, 64, {"magnitude": 1e3}), (4, 33, {"narrow_weight": True})]
    if target.kind == "cuda":
        widths = (24, 128, 512, 1000, 1024, 2048, 4096, 8192, 16384)
        drawn = [(128, width, {}) for width in widths]
        drawn += [(16384, 4096, {"halves": True}), (777, 5120, {"narrow_weight": True})]
        drawn += [(33, 4097, {"magnitude": 1e3}), (33, 4097, {"magnitude": 1e-4})]
    return cases_by_dtype(OPERATOR, dict.fromkeys(FLOATS, drawn))


OPERATOR = Operator(
    "rms_norm_swiglu",
    inputs=("x", "gate", "weight"),
    outputs=("y",),
    sizes=("rows", "width"),
    differentiated=("x", "gate", "weight"),
    scalars={"eps": 1e-6},
    implementations=(
        *by_pytorch(reference, eager=eager),
        Implementation(
            "two_kernels",
            forward=Operation(
                "rms_norm_swiglu.two_kernels", ("tnp.ops.rms_norm_swiglu.two_kernels:FORWARD",)
            ),
            supported=triton_to_width(rms_norm.MAX_WIDTH),
            selectable=False,
        ),
        by_triton(
            "triton",
            "rms_norm_swiglu",
            "tnp.ops.rms_norm_swiglu.triton_rms_norm_swiglu",
            backward=("HELD", "CHUNKS"),
        ),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=cases,
    controls={
        "x and gate exchanged": lambda x, gate, weight, eps: reference(gate, x, weight, eps),
        "no weight": lambda x, gate, weight, eps: reference(x, gate, weight * 0 + 1, eps),
    },
)


def rms_norm_swiglu(
    x: Tensor, gate: Tensor, weight: Tensor, *, eps: float = 1e-6, implementation: str = "torch"
) -> Tensor:
    """Returns silu(gate) ∘ rms_norm(x) ∘ weight.

    Args:
        x, gate: [..., width], equal in shape, dtype and device, any strides. They are read in place
            if rows are contiguous, such as the halves of one [..., 2·width] projection.
        weight: [width], any float dtype. PyTorch's form rounds it to x's dtype.
        eps: a number, positive and finite.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [..., width] in x's dtype. From ours, it and the gradients are contiguous.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or eps is out of range.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch.call as dispatch

    if type(eps) is not float or not 0.0 < eps < inf:
        eps = positive_number("eps", eps)
    return dispatch.call(OPERATOR, implementation, (x, gate, weight), (eps,))
