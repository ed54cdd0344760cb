"""Stores the slope of SiLU between a forward and a backward pass, for kernels on Hopper.

    slope = silu'(z) = σ(z)·(1 + z·(1 − σ(z)))

It lies in memory in the order of a matmul's registers. So no shared memory is needed, and a thread
writes 16 bytes at a time. With bfloat16 the slope is kept in 8 bits: it lies between −0.0998 and
1.0998, and is stored as code 22 + 212·slope. Zero and one, near which most slopes are, are exact.
The root mean square error is 0.0014; bfloat16's own rounding between a half and one has 0.0011.
float16 is more precise, and keeps slopes in 16 bits.

A NaN slope gets an arbitrary code. h, which is written too, shows the NaN.
"""

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tnp.ops._shared.hopper_matmul import BLOCK_K, QUARTER_ACC, ROWS, TILE

ZERO, ONE = gl.constexpr(22), gl.constexpr(234)  # codes of these slopes
# A float32 from 2²³ on has a whole number in its lowest bits: with ZERO added, a code.
WHOLE = gl.constexpr(8388608.0)
# The layouts in which a thread has its 32 values of a quarter [64, 64], in groups of 16 bytes.
BY_8 = gl.constexpr(gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0]))
BY_16 = gl.constexpr(gl.BlockedLayout([1, 16], [32, 1], [4, 1], [1, 0]))


@gluon.jit
def slope_place(tile, half: gl.constexpr, quarter: gl.constexpr):
    """Returns the place where the slopes of a quarter of a tile begin."""
    return (4 * tile + 2 * half + quarter).to(gl.int64) * (ROWS * BLOCK_K)


@gluon.jit
def store_slope(ptr, slope):
    """Writes the slopes of a quarter in the order of its registers."""
    # Dimensions: warps, halves of an instruction's rows, rows, groups of columns, columns.
    slope = gl.reshape(slope, [4, 2, 8, 2, 4, 4, 2])
    if ptr.dtype.element_ty == gl.uint8:
        # The code is the lowest byte of each number; four codes make a word.
        code = slope * (ONE - ZERO) + (WHOLE + ZERO)
        code = gl.reshape(gl.permute(code, (3, 0, 2, 5, 1, 4, 6)), [256, 16])
        code = gl.inline_asm_elementwise(
            "{ .reg .b32 low, high; prmt.b32 low, $1, $2, 0x0040; prmt.b32 high, $3, $4, 0x0040;"
            " prmt.b32 $0, low, high, 0x5410; }",
            "=r,r,r,r,r", [gl.convert_layout(code, BY_16, assert_trivial=True)],
            dtype=gl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
        gl.store(ptr + _places(256, 16, BY_16), code)
    else:
        slope = gl.reshape(gl.permute(slope, (3, 1, 0, 2, 5, 4, 6)), [512, 8])
        slope = gl.convert_layout(slope, BY_8, assert_trivial=True)
        gl.store(ptr + _places(512, 8, BY_8), slope.to(ptr.dtype.element_ty))


@gluon.jit
def load_slopes(ptr, tile):
    """Loads the slopes of a tile's four quarters, which `store_slope` has written."""
    return (
        _load(ptr + slope_place(tile, 0, 0)),
        _load(ptr + slope_place(tile, 0, 1)),
        _load(ptr + slope_place(tile, 1, 0)),
        _load(ptr + slope_place(tile, 1, 1)),
    )


@gluon.jit
def _load(ptr):
    if ptr.dtype.element_ty == gl.uint8:
        return gl.load(ptr + _places(256, 16, BY_16))
    else:
        return gl.load(ptr + _places(512, 8, BY_8))


@gluon.jit
def slope_of(loaded):
    """Returns the slopes of a quarter, [64, 64] in float32, from the values of `load_slopes`."""
    if loaded.dtype == gl.uint8:
        # 1 + code / 2¹⁵: the code stands in the middle of a float32's significand.
        slope = gl.inline_asm_elementwise(
            "prmt.b32 $0, $4, 0x3f800000, 0x7604; prmt.b32 $1, $4, 0x3f800000, 0x7614;"
            " prmt.b32 $2, $4, 0x3f800000, 0x7624; prmt.b32 $3, $4, 0x3f800000, 0x7634;",
            "=&r,=&r,=&r,=&r,r", [loaded], dtype=gl.float32, is_pure=True, pack=4,
        )  # fmt: skip
        slope = slope * (32768.0 / (ONE - ZERO)) - (32768.0 + ZERO) / (ONE - ZERO)
        slope = gl.permute(gl.reshape(slope, [2, 4, 8, 4, 2, 4, 2]), (1, 4, 2, 0, 5, 3, 6))
    else:
        slope = gl.reshape(loaded.to(gl.float32), [2, 2, 4, 8, 4, 4, 2])
        slope = gl.permute(slope, (2, 1, 3, 0, 5, 4, 6))
    return gl.convert_layout(gl.reshape(slope, [ROWS, BLOCK_K]), QUARTER_ACC, assert_trivial=True)


@gluon.jit
def _places(N: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr):
    rows = gl.arange(0, N, layout=gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, LAYOUT))
    return rows[:, None] * WIDTH + columns[None, :]


def new_saved(x: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Allocates the slopes for whole tiles of `shape` on x's device, for results in `dtype`."""
    n_rows, width = shape
    dtype = torch.uint8 if dtype == torch.bfloat16 else dtype
    shape = triton.cdiv(n_rows, TILE.value) * TILE.value, width
    return x.new_empty_strided(shape, (width, 1), dtype=dtype)
