"""Shares code of attention's Gluon kernels: tiles in shared memory, TMA descriptors of heads.

A descriptor spans a whole [B, H, L, D] tensor of any strides. So views of a fused projection are
read and written in place. Rows past the end read as 0 and are not written.
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
    """Describes tiles [rows, D] of a head of x [B, H, L, D], contiguous in the last dimension."""
    block = [1, 1, rows, x.shape[3]]
    layout = gl.NVMMASharedLayout.get_default_for(block, ELEMENTS[x.dtype])
    return TensorDescriptor.from_tensor(x, block, layout)


def head_map(rows: int) -> Callable[[torch.Tensor], TensorDescriptor]:
    """Returns the function that makes a `head_descriptor`, for `Bound(maps=…)`."""
    return partial(head_descriptor, rows=rows)


def flat_map(
    shape: list[int], block: list[int], layout: gl.NVMMASharedLayout
) -> Callable[[torch.Tensor], TensorDescriptor]:
    """Returns the function that describes rows which begin where a given tensor begins."""
    strides = [*shape[1:], 1]
    return lambda x: TensorDescriptor(x, shape, strides, block, layout)


def supported(call: Call) -> Reason:
    """Returns why the Hopper kernels cannot serve a call, or None."""
    problem = call.problem
    if call.target.kind != "cuda" or call.target.capability != 90:
        return "it uses instructions that only compute capability 9.0 has"
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
    """Returns whether weights are 2^s without a reference. float16 has too few exponents for it."""
    return bool(call.problem["base2"]) and call.problem.dtype == "bfloat16"


@gluon.jit
def allocate_tiles(desc, n: gl.constexpr):
    """Allocates `n` buffers in shared memory for the tiles of `desc`."""
    return gl.allocate_shared_memory(desc.dtype, [n] + desc.block_type.shape, desc.layout)


@gluon.jit
def tile(buffers, index):
    """Returns buffer `index` as a matrix [rows, D]."""
    buffer = buffers.index(index)
    return buffer.reshape([buffer.shape[2], buffer.shape[3]])


@gluon.jit
def load_tile(desc, b, h, row, barrier, buffers, index, pred=True):
    """Starts the copy of a tile of one head, from `row` on. `barrier` counts its bytes."""
    tma.async_copy_global_to_shared(desc, [b, h, row, 0], barrier, buffers.index(index), pred)


@gluon.jit
def ring(n, STAGES: gl.constexpr):
    """Returns the buffer of the n-th use, and its barriers' phase. STAGES is a power of two."""
    return n & (STAGES - 1), (n >> (STAGES.bit_length() - 1)) & 1


@gluon.jit
def tile_in_turn(i, n_tiles, of_head, section, rounds=None):
    """Returns a program's i-th tile of queries: its index, head of the batch, and tile in the head.

    There is no tile if the index is n_tiles or more. Each head has `of_head` tiles. Programs take
    tiles there and back: tiles that see most keys come first, and all programs have equally much to
    do.

    Heads are taken in sections. A section's tiles go from the last to the first, each head in turn.
    `rounds`: how many rounds of programs a section takes, or None. If it is given, a section's last
    round may be short, and the next section begins a new round. Without it, programs with the
    largest tiles of one section could have more to do than programs that have the last tiles of
    another section in the same round.
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
    """Stores the rows of x [64, D] before `end` in [L, H, D]. Its first row is `row`."""
    LAYOUT: gl.constexpr = x.type.layout
    HEAD_DIM: gl.constexpr = x.shape[1]
    rows = row + gl.arange(0, x.shape[0], layout=gl.SliceLayout(1, LAYOUT))
    # Without `opaque` indices would be kept through the loops, and spill.
    offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT)) + opaque(row * 0)
    of_row = (rows.to(gl.int64) * n_heads + bh) * HEAD_DIM
    gl.store(ptr + of_row[:, None] + offs_d[None, :], x, mask=(rows < end)[:, None])


@gluon.jit
def written(but: gl.constexpr = 0):
    """Waits until this thread's stores and additions by TMA are in memory, except the last `but`.

    `tma.store_wait` waits only until they were read from shared memory.
    """
    gl.inline_asm_elementwise(
        _wait_ptx(but), "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.constexpr_function
def _wait_ptx(but):
    return f"cp.async.bulk.wait_group {but}; mov.b32 $0, 0;"


@gluon.jit
def acquired(ptr):
    """Returns the int32 at ptr. What was released with it is visible afterwards."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [ptr.to(gl.int64)], dtype=gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def before_reduction():
    """Makes what lanes of this warp acquired visible to TMA, which works through another proxy."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; fence.proxy.async.global; mov.b32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def product_ptx(dtype):
    """Returns PTX for two products of 16-bit floats."""
    return f"mul.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2 $0, $1, $2;"


@builtin
def reduce_add(desc, coord, src, _semantic=None):
    """Starts the addition of a tile in shared memory to device memory."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle
    )
