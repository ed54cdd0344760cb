"""Shares code between kernels for a few rows.

Their time is the latency of a launch and of a chain of products.

On compute capability 9.0 and newer, such a kernel is launched while the kernel before it still runs
(programmatic dependent launch). `follow` waits until all earlier kernels are complete. So the order
of a stream holds, if every kernel that is launched early waits too. Every program must call
`follow`, because a later kernel's wait relies on this kernel's wait.

Before `follow`, no program may write anything. It may read what the launch before does not write: a
weight that is ready (`ready_weights`), or a tensor of which the order of launches says so. It may
ask for anything to be brought to L2, which is only a hint.
"""

from typing import Any

import triton
import triton.language as tl

from tnp.dispatch.devices import Target
from tnp.ops._shared.primitives import add_dot, dot

FEW = 16  # the most rows of these kernels
# The bytes of a sector, in which tensors are brought to L2.
SECTOR = tl.constexpr(32)


def chained(target: Target) -> dict[str, Any]:
    """Returns the options of a launch whose kernel calls `follow`."""
    if target.kind == "cuda" and target.capability >= 90:
        return {"CHAINED": True, "launch_pdl": True}
    return {"CHAINED": False}


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Waits until all launches before are complete, and then lets the next one begin.

    The order matters: when a kernel begins, all launches are then complete but the one right before
    it.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_rows(
    ptr, offs_row, n_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    """Prefetches rows of a contiguous matrix [n_rows, WIDTH] of at most BLOCK columns."""
    if CHAINED:
        EACH: tl.constexpr = SECTOR // (ptr.dtype.element_ty.primitive_bitwidth // 8)
        column = tl.minimum(tl.arange(0, BLOCK // EACH) * EACH, WIDTH - 1)
        row = tl.minimum(offs_row, n_rows - 1).to(tl.int64)
        address = (ptr + row[:, None] * WIDTH + column[None, :]).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [address], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def add_dot_in_parts(a, w, acc, PARTS: tl.constexpr):
    """Returns acc + a wᵀ for a [M, K] and w [N, K]. Each warp multiplies an equal part of K.

    With PARTS = 1, every warp goes through all of K, one product after another.
    """
    if PARTS == 1:
        return add_dot(a, tl.trans(w), acc)
    EACH: tl.constexpr = a.shape[1] // PARTS
    of_a = tl.permute(tl.reshape(a, [a.shape[0], PARTS, EACH]), (1, 0, 2))
    of_w = tl.permute(tl.reshape(w, [w.shape[0], PARTS, EACH]), (1, 2, 0))
    return acc + tl.sum(dot(of_a, of_w), 0)
