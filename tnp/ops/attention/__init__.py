"""Rectangular attention: every query row attends to the key rows of its sample, no mask.

    o = softmax(scale · q kᵀ) v

Ours, `separate` and `fused`, share the forward pass and differ in the backward: two launches, dk
and dv and then dq, whose results are equal from run to run; or one. `e4m3` has both products of the
forward pass in 8 bits, and no backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tnp.contract import (
    ALL_FLOATS,
    Budget,
    Call,
    Implementation,
    Operation,
    Operator,
    Reason,
    triton_from,
)
from tnp.inputs import positive_number, require_floats, require_lengths, require_one_device
from tnp.ops.attention import definition, eight_bit, torch_forms

if TYPE_CHECKING:
    from torch import Tensor

HEAD_DIMS = (16, 32, 64, 128)
_INFINITY = float("inf")
_triton = triton_from(80)


def describe(
    q: Tensor, k: Tensor, v: Tensor, n_keys: Tensor | None, base2: bool = False
) -> dict[str, int]:
    """Sizes; ValueError where the tensors do not go together."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be [B, H, L, D]")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}: they must be equal")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(
                f"{name} has strides {x.stride()}: its last dimension must be contiguous"
            )
    require_one_device(q=q, k=k, v=v)
    require_floats(q=q)
    if k.shape != v.shape:
        raise ValueError(f"k is {tuple(k.shape)} and v {tuple(v.shape)}: they must be equal")
    if (q.shape[0], q.shape[1], q.shape[3]) != (k.shape[0], k.shape[1], k.shape[3]):
        raise ValueError(
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}: "
            "they must agree in batch, heads and head_dim"
        )
    if k.shape[2] == 0:
        raise ValueError("n_k is 0: attention needs at least one key")
    if n_keys is not None:
        require_lengths(q, n_keys=n_keys)
    batch, n_heads, n_q, head_dim = q.shape
    sizes = {"batch": batch, "n_heads": n_heads, "n_q": n_q, "n_k": k.shape[2]}
    return sizes | {"head_dim": head_dim}


def _ours(call: Call) -> Reason:
    if call.problem["head_dim"] not in HEAD_DIMS:
        taken = ", ".join(map(str, HEAD_DIMS))
        return f"it takes head_dim {taken}, not {call.problem['head_dim']}"
    return _triton(call)


def _operation(name: str, *kernels: str) -> Operation:
    return Operation(f"attention.{name}", tuple(f"{__name__}.{kernel}" for kernel in kernels))


FORWARD = _operation(
    "forward", "few_keys:FORWARD", "hopper_forward:FORWARD", "triton_forward:FORWARD"
)
# The backward pass for few keys is one launch without atomics: the deterministic form, and fused.
SEPARATE = _operation(
    "separate", "few_keys:BACKWARD", "hopper_backward:SEPARATE", "triton_backward:SEPARATE"
)
FUSED = _operation("fused", "few_keys:BACKWARD", "hopper_backward:FUSED", "triton_backward:FUSED")
IN_8_BITS = _operation("forward_8bit", "hopper_8bit:FORWARD", "triton_8bit:FORWARD")
OPERATOR = Operator(
    "attention",
    inputs=("q", "k", "v", "n_keys?"),
    outputs=("o",),
    scalars={"scale": definition.SCALE},
    sizes=("batch", "n_heads", "n_q", "n_k", "head_dim"),
    options={"base2": bool},
    differentiated=("q", "k", "v"),
    keeps=("q", "k", "v", "n_keys", "o"),
    implementations=(
        Implementation(
            "sdpa_flash",
            run=torch_forms.sdpa_flash,
            provider="torch",
            supported=torch_forms.flash_supported,
            options=definition.OPTIONS,
            dispatches=("aten::_scaled_dot_product_flash_attention",),
        ),
        Implementation(
            "sdpa_cudnn",
            run=torch_forms.sdpa_cudnn,
            provider="torch",
            supported=torch_forms.cudnn_supported,
            options=definition.OPTIONS,
            dispatches=("aten::_scaled_dot_product_cudnn_attention",),
        ),
        Implementation(
            "separate",
            forward=FORWARD,
            backward=SEPARATE,
            supported=_ours,
            options=definition.OPTIONS,
        ),
        Implementation(
            "fused", forward=FORWARD, backward=FUSED, supported=_ours, options=definition.OPTIONS
        ),
        Implementation(
            "e4m3",
            forward=IN_8_BITS,
            supported=eight_bit.supported,
            dtypes=("bfloat16",),
            options=definition.OPTIONS,
            precision="e4m3",
            budget=Budget(emulate=eight_bit.held, rounded=eight_bit.rounded),
            work=eight_bit.work,
        ),
        Implementation(
            "reference",
            run=torch_forms.reference,
            provider="torch",
            dtypes=ALL_FLOATS,
            options=definition.OPTIONS,
            selectable=False,
        ),
    ),
    describe=describe,
    draw=definition.draw,
    reference=torch_forms.reference,
    work=definition.work,
    spot=definition.spot,
    cases=lambda target: definition.cases(OPERATOR, target),
    condition=lambda case, inputs: definition.condition(OPERATOR, case, inputs),
    controls=definition.CONTROLS,
    within=lambda model, run: definition.within(OPERATOR, model, run),
    compiled=lambda target: definition.compiled(OPERATOR, target),
    fixed=("head_dim",),
    coordinates=definition.coordinates,
    drawn=lambda random, dtype: definition.drawn(OPERATOR, random, dtype),
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    base2: bool = False,
    n_keys: Tensor | None = None,
    implementation: str = "sdpa_flash",
) -> Tensor:
    """softmax(scale · q kᵀ) v.

    Args:
        q: [B, H, n_q, D], a float dtype. Any strides with the last dimension contiguous, such as
            views of a fused projection. Ours take D = 16, 32, 64 and 128, `e4m3` bfloat16 and 64.
        k, v: [B, H, n_k, D], n_k ≥ 1, like q in dtype and device.
        scale: a number, positive and finite; 1/√D where None.
        base2: q carries scale · log2(e) already, as `project_qkv` hands it over where asked to:
            o = Σ_j 2^(q·k_j) v_j / Σ_j 2^(q·k_j). Kernels for Hopper then do without a reference
            and are some 5 % faster.
        n_keys: int32 [B] on q's device, each from 1 to n_k, or None for n_k everywhere: sample b
            has keys 0 … n_keys[b] − 1. Rows of k and v past them are padding: any finite values, of
            weight exactly 0 and gradient exactly 0. Our kernels clamp a number out of range; with
            TNP_CHECK=1 in the environment when a shape is first met, they assert it instead, on
            CUDA at the next synchronization.
        implementation: a name of `tnp.catalog`, or "auto".

    Returns:
        [B, H, n_q, D] in q's dtype, laid out [B, n_q, H, D] by ours.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together, a scale out of range, or
            both scale and base2.
        RuntimeError: the implementation cannot run here or does not take this, with the reason.
    """
    import tnp.dispatch as dispatch

    if scale is None:
        scale = (q.shape[-1] or 1) ** -0.5 if q.dim() == 4 else 1.0
    elif base2:
        raise ValueError(f"scale is {scale} and base2 is set: q carries the scale then")
    elif scale.__class__ is not float or not 0.0 < scale < _INFINITY:
        scale = positive_number("scale", scale)
    options = (("base2", True),) if base2 else ()
    return dispatch.call(OPERATOR, implementation, (q, k, v, n_keys), (scale,), options)
