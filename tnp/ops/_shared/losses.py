"""Scales the gradient that a loss's forward pass has computed, in the backward pass."""

import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.ops._shared.primitives import cast

SCALE_BLOCK = 1024


@triton.jit(do_not_specialize=["n"])
def _scale_kernel(
    gradient_ptr, dloss_ptr, per_target_ptr, out_ptr, n, factor,
    BLOCK: tl.constexpr, WITH_PER_TARGET: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(dloss_ptr).to(tl.float32) * factor
    if WITH_PER_TARGET:
        scale *= tl.load(per_target_ptr)
    gradient = tl.load(gradient_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, cast(gradient * scale, out_ptr.dtype.element_ty), mask=offs < n)


def scaling(n: int, with_per_target: bool = False) -> Bound:
    """Returns the launch that computes dloss · factor · gradient for n numbers, rounded once from
    float32.

    Call it with the gradient, dloss, a float32 scalar that also multiplies if `with_per_target`,
    the result, and the factor. Scalars stay on the device.
    """
    return Bound(
        _scale_kernel, (triton.cdiv(n, SCALE_BLOCK),), n,
        BLOCK=SCALE_BLOCK, WITH_PER_TARGET=with_per_target,
    )  # fmt: skip
