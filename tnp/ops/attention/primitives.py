"""What the attention kernels share: loads of row tiles, matmuls, launch configurations."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634

# Triton's interpreter (3.6 to 3.9) computes bfloat16 dots wrongly and truncates where a GPU rounds:
# `dot` upcasts there, and `cast` rounds first.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Three TF32 products per float32 product: float32's accuracy on the tensor cores. The exact product
# ("ieee") runs on the FMA units, where the compiler keeps whole tiles in a thread and spills.
FLOAT32_PRECISION = tl.constexpr("tf32x3")

# Programs that keep every multiprocessor of an H100 or H200 (132) busy twice over.
FULL_GRID = 264


@dataclass(frozen=True)
class LaunchConfig:
    """Tile of queries and keys a program works on, its warps, and its software-pipeline depth."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int

    def kernel_arguments(self) -> dict[str, int]:
        return {
            "BLOCK_M": self.block_m,
            "BLOCK_N": self.block_n,
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }


# By kernel, bytes per element and head_dim. In 16 bits at 64: of ten configurations a kernel
# measured on an H200 (B=4, 11,000 queries, 10,000 keys), the fastest that spills on none of the
# targets. The others: the largest tiles that do not spill, unmeasured.
CONFIGS = {
    ("forward", 2, 64): LaunchConfig(128, 64, 8, 3),
    ("dkdv", 2, 64): LaunchConfig(32, 64, 4, 3),
    ("dq", 2, 64): LaunchConfig(128, 64, 8, 3),
    ("forward", 2, 128): LaunchConfig(128, 64, 8, 3),
    ("dkdv", 2, 128): LaunchConfig(16, 128, 8, 2),
    ("dq", 2, 128): LaunchConfig(128, 32, 8, 2),
    ("forward", 4, 64): LaunchConfig(16, 32, 4, 1),
    ("dkdv", 4, 64): LaunchConfig(32, 16, 4, 1),
    ("dq", 4, 64): LaunchConfig(16, 32, 4, 1),
}


def launch_config(kernel: str, dtype: torch.dtype, head_dim: int) -> LaunchConfig:
    """The committed configuration; 64's for head dims that have none of their own.

    float32 at 128 is such a one: every tile spills there, which is slow and still right.
    """
    own = CONFIGS.get((kernel, dtype.itemsize, head_dim))
    return own or CONFIGS[kernel, dtype.itemsize, 64]


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
def cast(x, dtype: tl.constexpr):
    """float32 x in `dtype`, rounded to nearest."""
    if INTERPRETED and dtype == tl.bfloat16:
        # Dekker's split: the upper 8 bits of the significand, rounded; the cast is then exact.
        shifted = x * 65537.0
        x = shifted - (shifted - x)
    return x.to(dtype)


@triton.jit
def dot(a, b):
    """a @ b accumulated in float32, to float32's own accuracy for float32 operands."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision=FLOAT32_PRECISION)
    return tl.dot(a, b, input_precision=FLOAT32_PRECISION)


@triton.jit
def add_dot(a, b, acc):
    """acc + a @ b, in the accumulator."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision=FLOAT32_PRECISION)
    return tl.dot(a, b, acc, input_precision=FLOAT32_PRECISION)


def row_strides(x: torch.Tensor) -> tuple[int, int, int]:
    """Batch, head and row strides of [B, H, L, D], whose last dimension is contiguous."""
    return x.stride()[:3]


def empty_rows(like: torch.Tensor, n_rows: int) -> torch.Tensor:
    """Uninitialized [B, H, n_rows, D] laid out [B, n_rows, H, D], as the projections read it."""
    batch, n_heads, _, head_dim = like.shape
    return like.new_empty(batch, n_rows, n_heads, head_dim).transpose(1, 2)
