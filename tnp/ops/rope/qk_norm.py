"""Computes rotary embedding after QK-norm: RMSNorm of every head of q and of k, with two weights.

    x̂ = x / √(mean_D x² + eps)        result = rotated(x̂ · weight)

as in Qwen3. All is computed in float32 and rounded once. Hugging Face's module rounds x̂ to x's
dtype, then its product with the weight, and twice in the rotation. In 16 bits the two differ by
these roundings. (Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters, arXiv
2302.05442, for normalized queries and keys; `tnp.ops.rope` for the rotation.)
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from tnp.dispatch.spec import Operator, Work
from tnp.ops import rms_norm
from tnp.ops._shared.declared import by_pytorch, by_triton
from tnp.ops.rope import definition
from tnp.util.checks import positive_number, require_floats, require_one_device

if TYPE_CHECKING:
    from torch import Tensor

EPS = 1e-6


def reference(q, k, q_weight, k_weight, cos, sin, positions, eps, *, interleaved=False):
    """Computes PyTorch's RMSNorm, which rounds once, and then the rotation."""
    q, k = rms_norm.reference(q, q_weight, eps), rms_norm.reference(k, k_weight, eps)
    return definition.reference(q, k, cos, sin, positions, interleaved=interleaved)


def describe(q, k, q_weight, k_weight, cos, sin, positions=None, interleaved=False) -> dict:
    sizes = definition.describe(q, k, cos, sin, positions, interleaved)
    weights = {"q_weight": q_weight, "k_weight": k_weight}
    for name, x in weights.items():
        if x.shape != q.shape[3:]:
            raise ValueError(f"{name} is {tuple(x.shape)}: it must be [{q.shape[3]}], head_dim")
    require_one_device(q=q, **weights)
    require_floats(**weights)
    return sizes


def draw(case, random) -> dict:
    """Draws the inputs of `rope`, and weights around 1."""
    import torch

    tensors = definition.draw(case, random)
    for name in ("q_weight", "k_weight"):
        spread = random(case.problem["head_dim"], dtype=torch.float32)
        tensors[name] = 1 + 0.3 * spread
    return tensors


def work(case, pass_) -> Work:
    """Counts q and k → rotated, or with both gradients → gradients; tables and weights once."""
    size, weights = definition.of_heads(case.problem), 2 * case.problem["head_dim"] * 4
    read = definition.of_tables(case) + weights
    if pass_ == "forward":
        return Work({}, size + read, size)
    return Work({}, 2 * size + read, size + weights)


def _other_pairing(*arguments, interleaved=False):
    return reference(*arguments, interleaved=not interleaved)


def _norm_behind(q, k, q_weight, k_weight, cos, sin, positions, eps, *, interleaved=False):
    q, k = definition.reference(q, k, cos, sin, positions, interleaved=interleaved)
    return rms_norm.reference(q, q_weight, eps), rms_norm.reference(k, k_weight, eps)


def _weights_exchanged(q, k, q_weight, k_weight, *rest, **options):
    return reference(q, k, k_weight, q_weight, *rest, **options)


def _one_norm_of_all_heads(q, k, q_weight, k_weight, *rest, interleaved=False):
    """Normalizes all heads of a token together, as OLMo 2 does: a negative control."""
    *rest, eps = rest
    q, k = (
        x * (x.square().mean((1, 3), True) + eps).rsqrt().to(x.dtype) * weight.to(x.dtype)
        for x, weight in ((q, q_weight), (k, k_weight))
    )
    return definition.reference(q, k, *rest, interleaved=interleaved)


QK_NORM_ROPE = Operator(
    "qk_norm_rope",
    inputs=("q", "k", "q_weight", "k_weight", "cos", "sin", "positions?"),
    outputs=("q_rotated", "k_rotated"),
    sizes=definition.SIZES,
    differentiated=("q", "k", "q_weight", "k_weight"),
    scalars={"eps": EPS},
    options={"interleaved": bool},
    implementations=(
        *by_pytorch(reference, definition.OPTIONS),
        by_triton(
            "triton", "qk_norm_rope", "tnp.ops.rope.triton_qk_norm", options=definition.OPTIONS
        ),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=lambda target: definition.cases(QK_NORM_ROPE, target),
    out_of_range=definition.out_of_range,
    controls={
        "the other pairing": _other_pairing,
        "the norm behind the rotation": _norm_behind,
        "weights of q and k exchanged": _weights_exchanged,
        "one norm of all heads": _one_norm_of_all_heads,
    },
    within=lambda model, run: definition.within(QK_NORM_ROPE, model, run, qk_norm=True),
)


def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    *,
    eps: float = EPS,
    pairing: str = "half",
    implementation: str = "torch",
) -> tuple[Tensor, Tensor]:
    """Returns `rope` of q and k, after every head is normalized: x / √(mean_D x² + eps) · weight.

    Args:
        q, k, cos, sin, positions, pairing, implementation: as for `tnp.ops.rope.rope`.
        q_weight, k_weight: [D], any float dtype. `torch` casts them to q's dtype.
        eps: a number, positive and finite.

    Returns:
        The same tensors as `rope`. Gradients of the weights are equal from run to run.

    Raises:
        ValueError, RuntimeError: as `rope`.
    """
    import tnp.dispatch.call as dispatch

    if type(eps) is not float or not 0.0 < eps < inf:
        eps = positive_number("eps", eps)
    options = definition.pairing_options(pairing)
    if positions is not None:
        definition.require_rows(positions, cos)
    inputs = q, k, q_weight, k_weight, cos, sin, positions
    return dispatch.call(QK_NORM_ROPE, implementation, inputs, (eps,), options)
