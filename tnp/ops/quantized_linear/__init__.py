"""Computes a linear layer whose weight has 8 or 4 bits, with a scale for each group of its inputs.

    y = x Ŵᵀ + bias        ŵ = (code − zero) · scale

Activations stay in 16 bits. Codes less their zero points are exact in bfloat16 and float16, so our
kernels multiply these, and apply a group's scale to its float32 sum: they add no error of their
own. `torch` makes the weight in x's dtype first, which rounds it, and so do we for 1,024 rows and
more (`triton_weight`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tnp.dispatch.spec import (
    Implementation,
    Operation,
    Operator,
    triton_from,
)
from tnp.ops._shared.declared import by_pytorch
from tnp.ops.quantized_linear import definition, torch_forms
from tnp.ops.quantized_linear.definition import OF_16_BITS, OPTIONS, reference

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["quantized_linear"]

OPERATOR = Operator(
    "quantized_linear",
    inputs=("x", "weight", "scales", "zeros?", "bias?"),
    outputs=("y",),
    sizes=("rows", "n_in", "n_out", "group"),
    options={"bits": (4, 8)},
    read_off=("bits",),
    implementations=(
        *(replace(one, gradients=()) for one in by_pytorch(reference, OPTIONS)),
        *torch_forms.IMPLEMENTATIONS,
        Implementation(
            "triton",
            forward=Operation(
                "quantized_linear.forward",
                (
                    f"{__name__}.few_rows:FORWARD",
                    f"{__name__}.triton_weight:FORWARD",
                    f"{__name__}.hopper_tiles:FORWARD",
                    f"{__name__}.triton_tiles:FORWARD",
                ),
            ),
            supported=triton_from(80),
            dtypes=OF_16_BITS,
            options=OPTIONS,
        ),
    ),
    describe=definition.describe,
    draw=definition.draw,
    reference=reference,
    work=definition.work,
    cases=lambda target: definition.cases(OPERATOR, target),
    compiled=lambda target: definition.compiled(OPERATOR, target),
    fixed=("bits", "group"),
    controls=definition.CONTROLS,
)


def quantized_linear(
    x: Tensor,
    weight: Tensor,
    scales: Tensor,
    zeros: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    implementation: str = "torch",
) -> Tensor:
    """Returns x Ŵᵀ + bias for a weight Ŵ of 8 or 4 bits.

    `quantizer.quantize_weight` makes weight, scales and zeros. `formats` reads those of others.

    Args:
        x: [..., n_in], bfloat16 or float16, any strides (`torch`: any float dtype).
        weight: codes of 8 bits less 128, int8 [n_out, n_in]; or codes of 4 bits, int32
            [n_out, n_in / 8], in the order of `packing`.
        scales: [n_out, n_in / group] in x's dtype. A group has 32, 64 or 128 weights of a row, or
            all.
        zeros: uint8 [n_out, n_in / group], the code that stands for 0, below 16 for 4 bits. None:
            128, or 8 for 4 bits.
        bias: [n_out], float32 or in x's dtype, or None.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [..., n_out] in x's dtype, without a gradient.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or a tensor requires a gradient.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch.call as dispatch

    return dispatch.call(OPERATOR, implementation, (x, weight, scales, zeros, bias))
