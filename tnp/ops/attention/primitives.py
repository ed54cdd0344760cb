"""What the attention kernels share: loads of row tiles, launch configurations."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tnp.ops.primitives import KernelConfig, cast

if TYPE_CHECKING:
    from tnp.ops.attention.kernels import Problem

LOG2_E = 1.4426950408889634

# Programs that keep every multiprocessor of an H100 or H200 (132) busy twice over.
FULL_GRID = 264

# Elements a program of the reduction adds up.
SUM_BLOCK = 1024


@dataclass(frozen=True)
class LaunchConfig(KernelConfig):
    """Tile of queries and keys a program works on."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def candidates(configs: dict, problem: "Problem") -> tuple:
    """The entry of the problem's bytes per element and head_dim, 64's where there is none.

    float32 at 128 has none: every tile spills there, which is slow and still right.
    """
    itemsize = problem.dtype.itemsize
    return configs.get((itemsize, problem.head_dim)) or configs[itemsize, 64]


@triton.jit
def load_rows(ptr, offs_row, n_rows, stride_row, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Rows `offs_row` of a [n_rows, HEAD_DIM] matrix; rows past the end are 0 where MASKED."""
    offs_d = tl.arange(0, HEAD_DIM)
    # 64-bit: 205,000 rows of a projection of 1,536 columns pass 2³¹ in a batch of 7.
    ptrs = ptr + offs_row.to(tl.int64)[:, None] * stride_row + offs_d[None, :]
    if MASKED:
        return tl.load(ptrs, mask=offs_row[:, None] < n_rows, other=0.0)
    return tl.load(ptrs)


@triton.jit
def store_rows(ptr, tile, offs_row, n_rows, stride_row, HEAD_DIM: tl.constexpr):
    offs_d = tl.arange(0, HEAD_DIM)
    ptrs = ptr + offs_row.to(tl.int64)[:, None] * stride_row + offs_d[None, :]
    tl.store(ptrs, cast(tile, ptr.dtype.element_ty), mask=offs_row[:, None] < n_rows)


@triton.jit
def head_ptr(ptr, stride_b, stride_h, pid_bh, n_heads):
    """Start of one batch's head."""
    b = (pid_bh // n_heads).to(tl.int64)
    h = (pid_bh % n_heads).to(tl.int64)
    return ptr + b * stride_b + h * stride_h


@triton.jit
def key_count(n_context_ptr, b, n_k, HAS_N_CONTEXT: tl.constexpr):
    """How many keys sample b has: all n_k, or what n_context says, clamped to what there is."""
    if HAS_N_CONTEXT:
        return tl.minimum(tl.maximum(tl.load(n_context_ptr + b), 1), n_k)
    return n_k


def row_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Batch, head and row strides of [B, H, L, D], whose last dimension is contiguous."""
    return x.stride()[:3]


def empty_rows(like: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Uninitialized [B, H, n_rows, D] laid out [B, n_rows, H, D], as the projections read it."""
    batch, n_heads, _, head_dim = like.shape
    return like.new_empty(batch, n_rows, n_heads, head_dim).transpose(1, 2)


def empty_partials(like: torch.Tensor, segments: int) -> torch.Tensor:
    """Uninitialized float32 [segments, 2, B, H, L, D], laid out [segments, 2, B, L, H, D]."""
    batch, n_heads, n_rows, head_dim = like.shape
    shape = (segments, 2, batch, n_rows, n_heads, head_dim)
    return like.new_empty(shape, dtype=torch.float32).transpose(3, 4)


@triton.jit
def _sum_partials_kernel(partials_ptr, dk_ptr, dv_ptr, n, n_segments, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dk = tl.zeros([BLOCK], tl.float32)
    dv = tl.zeros([BLOCK], tl.float32)
    for _ in range(n_segments):
        dk += tl.load(partials_ptr + offs, mask=offs < n, other=0.0)
        partials_ptr += n
        dv += tl.load(partials_ptr + offs, mask=offs < n, other=0.0)
        partials_ptr += n
    tl.store(dk_ptr + offs, cast(dk, dk_ptr.dtype.element_ty), mask=offs < n)
    tl.store(dv_ptr + offs, cast(dv, dv_ptr.dtype.element_ty), mask=offs < n)


def sum_partials(partials: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor) -> None:
    """Write the sums of `empty_partials`, filled, to dk and dv of `empty_rows`, in fixed order."""
    _sum_partials_kernel[(triton.cdiv(dk.numel(), SUM_BLOCK),)](
        partials, dk, dv, dk.numel(), len(partials), BLOCK=SUM_BLOCK
    )
