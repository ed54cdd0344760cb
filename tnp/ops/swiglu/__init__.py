"""SwiGLU: a gated feed-forward layer's elementwise part.

    y = silu(gate) ∘ up        silu(z) = z / (1 + e^−z)

(Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202.)
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tnp.contract import FLOATS, Case, Implementation, Operation, Operator, Work, triton_from

if TYPE_CHECKING:
    from torch import Tensor


def reference(gate, up):
    """The formula in PyTorch, in whatever dtype it is given."""
    from torch.nn.functional import silu

    return silu(gate) * up


def describe(gate, up) -> dict:
    """Sizes; ValueError where the tensors do not go together."""
    if (gate.shape, gate.dtype, gate.device) != (up.shape, up.dtype, up.device):
        raise ValueError(
            f"gate is {gate.dtype} {tuple(gate.shape)} on {gate.device} and up {up.dtype} "
            f"{tuple(up.shape)} on {up.device}: they must be equal"
        )
    if gate.dim() == 0:
        raise ValueError("gate has no dimensions: it must be [..., width]")
    return {"rows": prod(gate.shape[:-1]), "width": gate.shape[-1]}


def draw(case, random) -> dict:
    """Normal numbers."""
    shape = case.problem["rows"], case.problem["width"]
    return {"gate": random(*shape), "up": random(*shape)}


def work(case, pass_) -> Work:
    """Every operand once."""
    size = case.problem["rows"] * case.problem["width"] * case.problem.itemsize
    return Work({}, 2 * size, size) if pass_ == "forward" else Work({}, 3 * size, 2 * size)


def cases(target) -> list[Case]:
    """Ragged and whole sizes in every dtype."""
    sizes = ((1, 1), (7, 100), (33, 257))
    if target.kind == "cuda":
        sizes = ((1, 1), (777, 4097), (16384, 14336))
    return [Case(OPERATOR.problem(dtype, rows=r, width=w)) for dtype in FLOATS for r, w in sizes]


_CODE = "tnp.ops.swiglu.triton_swiglu"
OPERATOR = Operator(
    "swiglu",
    inputs=("gate", "up"),
    outputs=("y",),
    sizes=("rows", "width"),
    differentiated=("gate", "up"),
    implementations=(
        Implementation("torch", run=reference, provider="torch", dtypes=(*FLOATS, "float64")),
        Implementation("compiled", run=reference, provider="torch", compile="default"),
        Implementation(
            "triton",
            forward=Operation("swiglu.forward", (f"{_CODE}:FORWARD",)),
            backward=Operation("swiglu.backward", (f"{_CODE}:BACKWARD",)),
            supported=triton_from(80),
        ),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=cases,
    controls={"gate and up exchanged": lambda gate, up: reference(up, gate)},
)


def swiglu(gate: Tensor, up: Tensor, *, implementation: str = "torch") -> Tensor:
    """silu(gate) ∘ up.

    Args:
        gate, up: [..., width], equal in shape, dtype and device, any strides.
        implementation: a name of `tnp.catalog`, or "auto".

    Returns:
        [..., width] in their dtype, contiguous from ours.

    Raises:
        ValueError: shapes, dtypes or devices that differ.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch as dispatch

    return dispatch.call(OPERATOR, implementation, (gate, up))
