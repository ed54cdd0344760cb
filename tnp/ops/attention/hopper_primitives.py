"""What the Gluon kernels of attention share: tile layouts, TMA descriptors of strided heads.

A descriptor spans a whole [B, H, L, D] tensor with whatever strides it has, so that views of a
fused projection are read and written in place; rows past the end read as 0 and are not written.
"""

from collections.abc import Callable
from functools import partial

import torch
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tnp.dispatch.spec import Call, Reason
from tnp.ops._shared.hopper_primitives import opaque

HEAD_DIMS = (64, 128)
ELEMENTS = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
}


def head_descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Tiles [rows, D] of one head of x [B, H, L, D], its last dimension contiguous."""
    block = [1, 1, rows, x.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[x.dtype])
    return TensorDescriptor.from_tensor(x, block, layout)


def head_map(rows: int) -> Callable[[torch.Tensor], TensorDescriptor]:
    """What makes a `head_descriptor`, for a `Bound`."""
    return partial(head_descriptor, rows=rows)


def flat_map(
    shape: list[int], block: list[int], layout: gl.NVMMASharedLayout
) -> Callable[[torch.Tensor], TensorDescriptor]:
    """What makes the descriptor of numbers in rows that start where a workspace's part does."""
    strides = [*shape[1:], 1]
    return lambda x: TensorDescriptor(x, shape, strides, block, layout)


def supported(call: Call) -> Reason:
    """Why the Hopper kernels cannot serve a call, or None."""
    problem = call.problem
    if call.target.kind != "cuda" or call.target.capability != 90:
        return "it uses instructions of compute capability 9.0 alone"
    if problem.itemsize != 2 or problem["head_dim"] not in HEAD_DIMS:
        taken = " and ".join(map(str, HEAD_DIMS))
        return (
            f"it is written for 16-bit floats and D = {taken}, not "
            f"{problem.dtype}, {problem['head_dim']}"
        )
    if not call.aligned:
        return "TMA reads rows that start at multiples of 16 bytes"
    return None


def without_reference(call: Call) -> bool:
    """Whether weights are 2^s as they are: float16 has too few exponents for that."""
    return bool(call.problem["base2"]) and call.problem.dtype == "bfloat16"


@gluon.jit
def allocate_tiles(desc, n: gl.constexpr):
    """`n` buffers in shared memory for the tiles of `desc`."""
    return gl.allocate_shared_memory(desc.dtype, [n] + desc.block_type.shape, desc.layout)


@gluon.jit
def tile(buffers, index):
    """Buffer `index` as a matrix [rows, D]."""
    buffer = buffers.index(index)
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def load_tile(desc, b, h, row, barrier, buffers, index, pred=True):
    """Start the copy of rows row … of one head; `barrier` counts its bytes."""
    tma.async_copy_global_to_shared(desc, [b, h, row, 0], barrier, buffers.index(index), pred)


@gluon.jit
def ring(n, STAGES: gl.constexpr):
    """Which of STAGES buffers, a power of two, the n-th use takes, and its barriers' phase."""
    return n & (STAGES - 1), (n >> (STAGES.bit_length() - 1)) & 1


@gluon.jit
def tile_in_turn(i, n_tiles, of_head, section, rounds=None):
    """Index, head of the batch and tile in it of a program's i-th tile of queries, `of_head` of
    each head: programs take tiles there and back, so that each has as much to do where those that
    see most come first. There is no tile where the index is n_tiles or more.

    Heads are taken in sections, a section's tiles from the last to the first, of each of its heads
    in turn. Where `rounds` are given, those of a section, its last tiles are a round of their own,
    though it be short, and another section begins with the next: where tiles see unequal numbers of
    keys, programs that take the largest of one section in the same round in which others take the
    last of another have more to do.
    """
    i = opaque(i)
    program = opaque(gl.program_id(0))
    n_programs = opaque(gl.num_programs(0))
    at = gl.where((i & 1) == 0, program, n_programs - 1 - program)
    of_head = opaque(of_head)
    n_heads = opaque(n_tiles) // of_head
    if rounds is not None:
        rounds = opaque(rounds)
        begin = i // rounds * section
        at += i % rounds * n_programs
    else:
        index = i * n_programs + at
        begin = index // (of_head * section) * section
        at = index - begin * of_head
    of_section = gl.maximum(gl.minimum(section, n_heads - begin), 1)
    index = begin * of_head + at
    if rounds is not None:
        index = gl.where((begin < n_heads) & (at < of_section * of_head), index, n_tiles)
    bh = gl.where(index < n_tiles, begin + at % of_section, 0)
    return index, bh, gl.maximum(of_head - 1 - at // of_section, 0)


@gluon.jit
def store_some(ptr, x, bh, row, end, n_heads):
    """Store the rows before `end` of x [64, D], which begins with `row`, in [L, H, D]."""
    LAYOUT: gl.constexpr = x.type.layout
    HEAD_DIM: gl.constexpr = x.shape[1]
    rows = row + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    # Opaque, or indices would be kept through the loops, and spill.
    offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT)) + opaque(row * 0)
    of_row = (rows.to(gl.int64) * n_heads + bh) * HEAD_DIM
    gl.store(ptr + of_row[:, None] + offs_d[None, :], x, mask=(rows < end)[:, None])


@gluon.jit
def written(but: gl.constexpr = 0):
    """Wait until what TMA stored or added for this thread is in memory, not only read from shared
    memory, `but` for so many of the last.
    """
    gl.inline_asm_elementwise(
        _wait_ptx(but), "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.constexpr_function
def _wait_ptx(but):
    return f"cp.async.bulk.wait_group {but}; mov.b32 $0, 0;"


@gluon.jit
def acquired(ptr):
    """The int32 at ptr; what was released with it is seen after it."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr.to(gl.int64)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def before_reduction():
    """What lanes of this warp acquired is also seen by what TMA adds after it: one of them starts
    that, and TMA is of another proxy.
    """
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; fence.proxy.async.global; mov.b32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def product_ptx(dtype):
    """PTX for two products of 16-bit floats."""
    return f"mul.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2 $0, $1, $2;"


@builtin
def reduce_add(desc, coord, src, _semantic=None):
    """Start the addition of a tile in shared memory to device memory."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle
    )
