"""Computes attention of all rows around a causal buffer (`tnp.model.causal_buffer`) at once.

Keys are [context, buffer]. Rows of q are [context, buffer, followers, others]; a model's last block
has only followers and others. Followers are groups of as many rows as the buffer has points. Row i
of the buffer, and row i of each group, sees the context and points 0 … i. Rows of the context and
the other rows see only the context. `attention` needs two calls for these rows, and copies to sort
the rows.
"""

from __future__ import annotations

from operator import index
from typing import TYPE_CHECKING

from tnp.dispatch.spec import Implementation, Operation, Operator
from tnp.ops._shared.declared import by_pytorch, compiled_sdpa
from tnp.ops.attention.definition import SCALE, require_heads
from tnp.ops.buffered_attention import definition
from tnp.ops.buffered_attention.definition import TAKEN, Rows, reference, sdpa
from tnp.util.checks import (
    positive_number,
    require_between,
    require_bools,
    require_count,
    require_lengths,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["buffered_attention"]


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n_keys: Tensor | None,
    n_buffer: int = 0,
    n_groups: int = 0,
    all_rows: bool = False,
    base2: bool = False,
) -> dict[str, int]:
    """Returns sizes. Raises ValueError if tensors do not fit together, or do not fit the counts."""
    require_heads(q, k, v)
    batch, n_heads, n_q, head_dim = q.shape
    n_k = k.shape[2]
    if (batch, n_heads, head_dim) != (*k.shape[:2], k.shape[3]):
        raise ValueError(
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}: they must agree except in their rows"
        )
    require_count("n_buffer", n_buffer, 1)
    require_count("n_groups", n_groups, 0)
    if n_buffer >= n_k:
        raise ValueError(
            f"n_buffer is {n_buffer} of {n_k} keys: at least one key must belong to the context"
        )
    rows = Rows.counted(n_k - n_buffer, n_buffer, n_groups, all_rows, n_q)
    if n_q < rows.n_first + rows.n_beside:
        raise ValueError(
            f"q has {n_q} rows: it must have at least {rows.n_first + rows.n_beside}, for the "
            f"context, the buffer and {n_groups} groups"
        )
    if n_keys is not None:
        require_lengths(q, n_keys=n_keys)
    found = {"batch": batch, "n_heads": n_heads, "n_q": n_q, "n_k": n_k, "head_dim": head_dim}
    return found | {"n_buffer": n_buffer}


OPERATOR = Operator(
    "buffered_attention",
    inputs=("q", "k", "v", "n_keys?"),
    outputs=("o",),
    scalars={"scale": SCALE},
    sizes=("batch", "n_heads", "n_q", "n_k", "head_dim", "n_buffer"),
    numbered=("n_buffer",),
    options={"all_rows": bool, "base2": bool, "n_groups": int},
    differentiated=("q", "k", "v"),
    keeps=("q", "k", "v", "n_keys", "o"),
    implementations=(
        *by_pytorch(reference, TAKEN),
        compiled_sdpa(sdpa, TAKEN),
        Implementation(
            "triton",
            forward=Operation(
                "buffered_attention.forward", (f"{__name__}.triton_forward:FORWARD",)
            ),
            backward=Operation(
                "buffered_attention.backward", (f"{__name__}.triton_backward:BACKWARD",)
            ),
            supported=definition.supported,
            options=TAKEN,
        ),
    ),
    describe=describe,
    draw=definition.draw,
    reference=reference,
    work=definition.work,
    cases=lambda target: definition.cases(OPERATOR, target),
    condition=lambda case, inputs: definition.condition(OPERATOR, case, inputs),
    controls=definition.CONTROLS,
    other_lengths=definition.other_lengths,
    out_of_range=definition.out_of_range,
    compiled=lambda target: definition.compiled(OPERATOR, target),
)


def buffered_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n_buffer: int,
    *,
    n_groups: int = 0,
    all_rows: bool = True,
    n_keys: Tensor | None = None,
    scale: float | None = None,
    base2: bool = False,
    implementation: str = "torch",
) -> Tensor:
    """Returns softmax(scale · q kᵀ) v over the keys that each row sees.

    Args:
        q: [B, H, n_q, D]: rows of the context, rows of the buffer, n_groups groups of n_buffer
            followers, and other rows; without `all_rows` only followers and other rows. Any strides
            with the last dimension contiguous, as in `attention`. `triton` takes D = 16, 32 and 64
            in bfloat16 and float16, and on a GPU D = 32 in float32.
        k, v: [B, H, n_k, D], with q's dtype and device: first the context, then the buffer.
            `triton` takes at most four blocks of 64 keys, each of the context or of the buffer.
        n_buffer: points of the buffer, from 1 to n_k − 1.
        n_groups: how many groups of followers there are.
        all_rows: whether q has rows of the context and of the buffer.
        n_keys: int32 [B] on q's device, each from 1 to n_k − n_buffer, or None for all. Sample b
            has the first n_keys[b] points of the context. Later rows of k and v are padding, with
            weight and gradient exactly 0. Numbers out of range have the same effect as in
            `attention`.
        scale: a positive, finite number, or None for 1/√D.
        base2: q carries scale · log2(e) already, as `project_qkv` returns it on request.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [B, H, n_q, D] in q's dtype. Ours lies in memory as [B, n_q, H, D].

    Raises:
        ValueError: shapes, dtypes or devices do not fit together; q has too few rows; scale is out
            of range; both scale and base2 are given; or on the CPU n_keys are invalid.
        RuntimeError: the implementation cannot run here or does not take this, with the reason.
    """
    import tnp.dispatch.call as dispatch

    # `describe` and `call` refuse other objects and dimensions.
    shaped = getattr(q, "ndim", 0) == getattr(k, "ndim", 0) == 4
    if scale is None:
        scale = (q.shape[-1] or 1) ** -0.5 if shaped else 1.0
    elif base2:
        raise ValueError(f"scale is {scale} and base2 is set: q carries the scale then")
    else:
        scale = positive_number("scale", scale)
    require_bools(base2=base2, all_rows=all_rows)
    # `index` makes torch.compile take a symbolic number as a constant of the graph.
    n_buffer = index(require_count("n_buffer", n_buffer, 1))
    n_groups = index(require_count("n_groups", n_groups, 0))
    if shaped and n_keys is not None:
        require_between("n_keys", n_keys, 1, k.shape[2] - n_buffer)
    options: tuple = (("n_buffer", n_buffer),)
    if n_groups:
        options += (("n_groups", n_groups),)
    if all_rows:
        options += (("all_rows", True),)
    if base2:
        options += (("base2", True),)
    return dispatch.call(OPERATOR, implementation, (q, k, v, n_keys), (scale,), options)
