"""What the Gluon kernels for Hopper of all operators share."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """`n` mbarriers that complete after `count` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def opaque(x):
    """int32 x, of which the compiler knows nothing.

    In a loop over tiles it would hoist what is the same for all of them, masks and addresses, and
    spill it: registers are full of accumulators.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )
