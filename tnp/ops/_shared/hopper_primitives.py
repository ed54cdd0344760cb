"""Shares code between the Gluon kernels for Hopper of all operators."""

import linecache

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tnp.dispatch.private import aggregate


def structure(cls: type) -> type:
    """Makes a class a structure of Gluon. Its `__init__` takes the annotated fields in their order.

    Triton hashes the source of `__init__` with each kernel that uses the structure. So the source
    is made here as text, and kept where `inspect` finds it.
    """
    lines = [f"def __init__(self, {', '.join(cls.__annotations__)}):\n"]
    for name, kind in cls.__annotations__.items():
        lines.append(
            f"    self.{name} = {f'gl.constexpr({name})' if kind is gl.constexpr else name}\n"
        )
    file = f"<fields of {cls.__module__}.{cls.__qualname__}>"
    linecache.cache[file] = sum(map(len, lines)), None, lines, file
    made = {"gl": gl, "__name__": cls.__module__}
    exec(compile("".join(lines), file, "exec"), made)
    cls.__init__ = gluon.constexpr_function(made["__init__"])
    return aggregate(cls)


@gluon.jit
def barriers(n: gl.constexpr, count: gl.constexpr):
    """Returns `n` mbarriers that complete after `count` arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [n, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(n):
        mbarrier.init(bars.index(i), count=count)
    return bars


@gluon.jit
def opaque(x):
    """Returns int32 x so that the compiler knows nothing of its value.

    In a loop over tiles, the compiler would hoist masks and addresses that are the same for all
    tiles, and spill them, because accumulators fill the registers.
    """
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1
    )
