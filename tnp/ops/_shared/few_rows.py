"""What kernels of a few rows share: there latency is all, of a launch and of a chain of products.

On compute capability 9.0 and newer such a kernel is launched while the one before it still runs
(programmatic dependent launch). It asks for its weights to be brought to L2, and `follow` then has
it wait until all that came before is complete. So the order of a stream holds next to any other
kernel, provided that what is launched ahead of its turn waits too. Ahead of `follow` no program may
write anything, nor read anything unless it is launched right behind a kernel that it knows: a
weight may have just been computed. Asking for memory is only a hint. Every program must call
`follow`, because whoever waits for a kernel relies on that kernel's own wait.
"""

from typing import Any

import triton
import triton.language as tl

from tnp.dispatch.devices import Target
from tnp.ops._shared.primitives import INTERPRETED, add_dot, dot

FEW = 16  # rows of a tensor core's tile
# A tensor is brought to L2 by sectors of so many bytes.
SECTOR = tl.constexpr(32)


def chained(target: Target) -> dict[str, Any]:
    """Options of a launch whose kernel calls `follow`."""
    if target.kind == "cuda" and target.capability >= 90:
        return {"CHAINED": True, "launch_pdl": True}
    return {"CHAINED": False}


@triton.jit
def follow(CHAINED: tl.constexpr):
    """Waits until all launches before are complete, and then lets the next one begin.

    In this order: so what begins ahead of its own wait finds everything complete but the kernel
    right before it.
    """
    if CHAINED:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def prefetch_rows(
    ptr, offs_row, n_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr
):
    """Asks for rows of a contiguous matrix [n_rows, WIDTH] of at most BLOCK columns."""
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
def after_loads(x):
    """16-bit x, of which nothing is made before the loads above this line are on their way.

    Triton takes an operand to where a product wants it as soon as it is loaded, and what is loaded
    next would be asked for when that has arrived.
    """
    if INTERPRETED:
        return x
    return tl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=x.dtype, is_pure=False, pack=2
    )


@triton.jit
def add_dot_in_parts(a, w, acc, PARTS: tl.constexpr):
    """acc + a wᵀ of a [M, K] and w [N, K], in equal parts of K, each of which a warp multiplies.

    In one part all warps would go through all of K, one product behind the other.
    """
    if PARTS == 1:
        return add_dot(a, tl.trans(w), acc)
    EACH: tl.constexpr = a.shape[1] // PARTS
    of_a = tl.permute(tl.reshape(a, [a.shape[0], PARTS, EACH]), (1, 0, 2))
    of_w = tl.permute(tl.reshape(w, [w.shape[0], PARTS, EACH]), (1, 2, 0))
    return acc + tl.sum(dot(of_a, of_w), 0)
