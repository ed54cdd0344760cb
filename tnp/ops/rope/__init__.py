"""Rotates queries and keys by their positions (RoPE), alone or after RMSNorm (QK-norm).

Pair i of a head's D elements is rotated by the angle of its token's position,

    (a, b) → (a·cos − b·sin, b·cos + a·sin)        cos, sin = tables[position, i]

where a and b are elements i and i + D/2 (pairing "half": Llama, Hugging Face), or 2i and 2i + 1
("interleaved": the paper, GPT-J). Gradients are rotated back. (Su et al., RoFormer, arXiv
2104.09864.)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tnp.dispatch.spec import Operator
from tnp.ops._shared.declared import by_pytorch, by_triton
from tnp.ops.rope import definition
from tnp.ops.rope.definition import PAIRINGS as PAIRINGS
from tnp.ops.rope.definition import reference
from tnp.ops.rope.qk_norm import QK_NORM_ROPE, qk_norm_rope
from tnp.ops.rope.tables import rotary_tables

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["qk_norm_rope", "rope", "rotary_tables"]


def _other_pairing(*tensors, interleaved=False):
    return reference(*tensors, interleaved=not interleaved)


def _next_position(q, k, cos, sin, positions=None, *, interleaved=False):
    tables = (table.roll(-1, 0) for table in (cos, sin))
    return reference(q, k, *tables, positions, interleaved=interleaved)


def _turned_back(q, k, cos, sin, positions=None, *, interleaved=False):
    return reference(q, k, cos, -sin, positions, interleaved=interleaved)


ROPE = Operator(
    "rope",
    inputs=("q", "k", "cos", "sin", "positions?"),
    outputs=("q_rotated", "k_rotated"),
    sizes=definition.SIZES,
    differentiated=("q", "k"),
    options={"interleaved": bool},
    keeps=("cos", "sin", "positions"),
    implementations=(
        *by_pytorch(reference, definition.OPTIONS),
        by_triton("triton", "rope", "tnp.ops.rope.triton_rope", options=definition.OPTIONS),
    ),
    describe=definition.describe,
    draw=definition.draw,
    reference=reference,
    work=definition.work,
    cases=lambda target: definition.cases(ROPE, target),
    out_of_range=definition.out_of_range,
    controls={
        "the other pairing": _other_pairing,
        "a position further": _next_position,
        "turned back": _turned_back,
    },
    within=lambda model, run: definition.within(ROPE, model, run, qk_norm=False),
)
OPERATORS = (ROPE, QK_NORM_ROPE)


def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    pairing: str = "half",
    implementation: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Returns q and k, with each pair of elements rotated by its token's position.

    Args:
        q: [batch, heads, tokens, D], with even D and any strides. Views of a fused projection are
            read in place.
        k: [batch, kv_heads, tokens, D] in q's dtype.
        cos, sin: [n_positions, D/2], both float32 or both in q's dtype, as `rotary_tables` makes
            them. They get no gradient.
        positions: [batch, tokens], int32 or int64, from 0 to n_positions − 1. None: 0, 1, … in
            every sequence. A number out of range is a ValueError on the CPU. On CUDA PyTorch's
            forms assert. `triton` makes the token NaN, or with TNP_CHECK=1 in the environment
            asserts at the next synchronization.
        pairing: "half" for elements i and i + D/2, "interleaved" for 2i and 2i + 1.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        Rotated q and k, with the inputs' shapes and dtype. From ours, memory has the input's order:
        [batch, tokens, heads, D] if a token's heads lie together.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, positions on the CPU are out of
            range, or there is no such pairing.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch.call as dispatch

    options = definition.pairing_options(pairing)
    if positions is not None:
        definition.require_rows(positions, cos)
    return dispatch.call(ROPE, implementation, (q, k, cos, sin, positions), (), options)
