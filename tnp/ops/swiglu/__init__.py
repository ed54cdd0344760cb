"""Computes SwiGLU, a gated feed-forward layer's elementwise part.

    y = silu(gate) ∘ up        silu(z) = z / (1 + e^−z)

(Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.)
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tnp.dispatch.spec import FLOATS, Case, Operator, Problem, Work
from tnp.ops._shared.declared import by_pytorch, by_triton, cases_by_dtype
from tnp.util.checks import require_equal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["swiglu"]


def reference(gate, up):
    from torch.nn.functional import silu

    return silu(gate) * up


def eager(gate, up):
    """Computes the formula in single operations."""
    return gate * gate.sigmoid() * up


def describe(gate, up) -> dict:
    require_equal(up=up, gate=gate)
    if gate.dim() == 0:
        raise ValueError("gate has no dimensions: it must be [..., width]")
    return {"rows": prod(gate.shape[:-1]), "width": gate.shape[-1]}


def draw(case, random) -> dict:
    """Draws normal numbers, with gate times `magnitude`. "halves": both lie in one [rows, 2·width]
    tensor, like a projection's result. "tokens": rows are the third and later tokens of a batch of
    two.
    """
    rows, width = case.problem["rows"], case.problem["width"]
    if case["tokens"]:
        gate, up = (random(2, rows // 2 + 2, width)[:, 2:] for _ in range(2))
    elif case["halves"]:
        gate, up = random(rows, 2 * width).chunk(2, dim=-1)
    else:
        gate, up = random(rows, width), random(rows, width)
    if case["magnitude"]:
        gate.mul_(case["magnitude"])
    return {"gate": gate, "up": up}


def work(case, pass_) -> Work:
    size = case.problem["rows"] * case.problem["width"] * case.problem.itemsize
    return Work({}, 2 * size, size) if pass_ == "forward" else Work({}, 3 * size, 2 * size)


def cases(target) -> list[Case]:
    """Covers ragged and whole sizes, halves of a projection, slices of a batch, saturated gates."""
    drawn = [(1, 1, {}), (7, 100, {}), (33, 256, {"halves": True})]
    drawn += [(6, 37, {"tokens": True}), (3, 64, {"magnitude": 40.0})]
    if target.kind == "cuda":
        drawn = [(1, 1, {}), (777, 4097, {}), (777, 4097, {"halves": True})]
        drawn += [(16384, 14336, {"halves": True}), (1, 8_388_608, {})]
        drawn += [(1000, 1365, {"tokens": True}), (512, 4096, {"magnitude": 40.0})]
    return cases_by_dtype(OPERATOR, dict.fromkeys(FLOATS, drawn))


def within(model, run) -> Problem | None:
    """Returns the problem in a language model with gated feed-forward layers."""
    if not model.get("gated"):
        return None
    rows = run["batch"] * run["n_tokens"]
    return OPERATOR.problem(run["dtype"], rows=rows, width=model["d_ff"])


def condition(case, inputs) -> float:
    """Estimates the error of a sigmoid in float32: an exponential, accurate to two units, and four
    roundings.

    In a result of one element PyTorch's own error may be 0 by chance.
    """
    return 1.6e-7


OPERATOR = Operator(
    "swiglu",
    inputs=("gate", "up"),
    outputs=("y",),
    sizes=("rows", "width"),
    differentiated=("gate", "up"),
    implementations=(
        *by_pytorch(reference, eager=eager),
        by_triton("triton", "swiglu", "tnp.ops.swiglu.triton_swiglu"),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=cases,
    condition=condition,
    controls={"gate and up exchanged": lambda gate, up: reference(up, gate)},
    within=within,
)


def swiglu(gate: Tensor, up: Tensor, *, implementation: str = "torch") -> Tensor:
    """Returns silu(gate) ∘ up.

    Args:
        gate, up: [..., width], equal in shape, dtype and device, any strides. They are read in
            place if rows are contiguous, such as the halves of one [..., 2·width] projection.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [..., width] in their dtype. From ours, it and the gradients are contiguous.

    Raises:
        ValueError: shapes, dtypes or devices differ.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch.call as dispatch

    return dispatch.call(OPERATOR, implementation, (gate, up))
