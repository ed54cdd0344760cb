"""Computes the MLP's products of inner width 512 on Hopper, with operands in 8 bits (e4m3).

    forward     z = x wᵀ,  h = z·σ(z),  slope = σ(z)·(1 + z·(1 − σ(z)))
    backward    dz = (dy wᵀ)·slope

The kernels resemble `tnp.ops._shared.hopper_silu`, and use the same saved slope. x and dy are
blocks (`tnp.ops._shared.blocks_8bit`), w has a scale for each row (`tnp.ops._shared.rows_8bit`).
The backward pass takes w transposed, because Hopper multiplies 8-bit operands only if both are
contiguous along the summed dimension.

h and dz leave in 8 bits alone, in units that are known beforehand: as rows for the next product and
as panels for the gradient of a weight. Rows go through shared memory. A thread holds four rows of a
column of the tile, packs them in a word, and writes it to the panel: a warp fills whole sectors.
"""

from torch import Tensor, bfloat16, int32
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
from tnp.ops._shared.blocks_8bit import Blocks, panels_shape
from tnp.ops._shared.hopper_matmul import (
    BLOCK_K,
    QUARTER_ACC,
    REGISTERS,
    ROWS,
    TILE,
    multiply,
    pipeline,
    produce,
    quarters,
    tiles,
)
from tnp.ops._shared.hopper_silu import STAGES, silu_and_slope
from tnp.ops._shared.hopper_slope import load_slopes, new_saved, slope_of, slope_place, store_slope
from tnp.ops._shared.rows_8bit import InRows
from tnp.ops._shared.triton_silu_8bit import DSilu, Silu


@gluon.jit
def _of_columns(ptr, column):
    columns = column + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, QUARTER_ACC))
    return gl.load(ptr + columns)[None, :]


@gluon.jit
def _inverse(power):
    """Returns the inverse of a power of two, by its exponent: a division is many instructions."""
    return ((254 << 23) - power.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def _store_rows(desc, quarter, row, column, buffer):
    """Starts the copy of a quarter to device memory."""
    # Then the copy before the last one, through this same buffer, is done.
    tma.store_wait(1)
    buffer.store(quarter.to(desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [row, column], buffer)


@gluon.jit
def _row_pairs(x):
    """Returns the elements of a quarter in rows 16w + r, and those in rows 16w + 8 + r."""
    # Dimensions: warps, halves of an instruction's rows, rows, groups of columns, columns.
    x = gl.reshape(x, [4, 2, 8, 8, 4, 2])
    return gl.split(gl.permute(x, (0, 2, 3, 4, 5, 1)))


@gluon.jit
def _store_panel(ptr, upper, lower):
    """Writes the quarters of both halves of a tile, [64, 64], to 64 lines of a panel."""
    x0, x1 = _row_pairs(upper)
    x2, x3 = _row_pairs(lower)
    words = gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi; cvt.rn.satfinite.e4m3x2.f32 lo, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 hi, $4, $3; mov.b32 $0, {lo, hi}; }",
        "=r,f,f,f,f", [x0, x1, x2, x3], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, QUARTER_ACC))
    columns = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, QUARTER_ACC))
    # A line has 32 words.
    places, _ = _row_pairs((rows // 16 * 8 + rows % 8)[:, None] + columns[None, :] * 32)
    gl.store(ptr + places, words)


@gluon.jit
def _panel(ptr, row, column, n_columns):
    """Returns where a tile's lines begin. ptr counts words."""
    width = n_columns * TILE
    return ptr + ((row // TILE).to(gl.int64) * width + column) * 32


@gluon.jit
def _silu(
    pipe, h8_desc, panels_ptr, slope_ptr, scales, buffers,
    WARPGROUP: gl.constexpr, SAVES: gl.constexpr, HAS_ROWS: gl.constexpr,
):  # fmt: skip
    for tile in range(pipe.first + WARPGROUP, pipe.last, 2):
        upper, lower = multiply(pipe, tile, WARPGROUP)
        row = tile // pipe.n_columns * TILE
        column = tile % pipe.n_columns * TILE
        of_x = gl.load(scales[0] + row)
        unit = _inverse(gl.load(scales[2] + row))
        upper = quarters(upper)
        lower = quarters(lower)
        for j in gl.static_range(2):
            begin = column + j * BLOCK_K
            scale = _of_columns(scales[1], begin) * of_x
            h0, slope0 = silu_and_slope(upper[j] * scale)
            if SAVES:
                store_slope(slope_ptr + slope_place(tile, 0, j), slope0)
            h0 = h0 * unit
            if HAS_ROWS:
                _store_rows(h8_desc, h0, row, begin, buffers.index(2 * WARPGROUP))
            h1, slope1 = silu_and_slope(lower[j] * scale)
            if SAVES:
                store_slope(slope_ptr + slope_place(tile, 1, j), slope1)
            h1 = h1 * unit
            if HAS_ROWS:
                _store_rows(h8_desc, h1, row + ROWS, begin, buffers.index(2 * WARPGROUP + 1))
            if SAVES:
                _store_panel(_panel(panels_ptr, row, begin, pipe.n_columns), h0, h1)
    tma.store_wait(0)


@gluon.jit
def _dsilu(
    pipe, dz8_desc, panels_ptr, slope_ptr, scales, buffers,
    WARPGROUP: gl.constexpr, HAS_PANELS: gl.constexpr, HAS_ROWS: gl.constexpr,
):  # fmt: skip
    for tile in range(pipe.first + WARPGROUP, pipe.last, 2):
        # The slopes are read before the product, so that they arrive meanwhile.
        slopes = load_slopes(slope_ptr, tile)
        upper, lower = multiply(pipe, tile, WARPGROUP)
        row = tile // pipe.n_columns * TILE
        column = tile % pipe.n_columns * TILE
        in_units = gl.load(scales[0] + row) * _inverse(gl.load(scales[2] + row))
        upper = quarters(upper)
        lower = quarters(lower)
        for j in gl.static_range(2):
            begin = column + j * BLOCK_K
            scale = _of_columns(scales[1], begin) * in_units
            dz0 = upper[j] * slope_of(slopes[j]) * scale
            if HAS_ROWS:
                _store_rows(dz8_desc, dz0, row, begin, buffers.index(2 * WARPGROUP))
            dz1 = lower[j] * slope_of(slopes[2 + j]) * scale
            if HAS_ROWS:
                _store_rows(dz8_desc, dz1, row + ROWS, begin, buffers.index(2 * WARPGROUP + 1))
            if HAS_PANELS:
                _store_panel(_panel(panels_ptr, row, begin, pipe.n_columns), dz0, dz1)
    tma.store_wait(0)


@gluon.jit
def _buffers(desc):
    """Allocates a buffer for each half of each consumer's tile."""
    return gl.allocate_shared_memory(desc.dtype, [4] + desc.block_type.shape, desc.layout)


@gluon.jit(do_not_specialize=["n_rows", "n_columns"])
def matmul_silu_hopper_8bit_kernel(
    x_desc, w_desc, h8_desc, panels_ptr, slope_ptr, x_scale_ptr, w_scale_ptr, h_scale_ptr,
    n_rows, n_columns, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, SAVES: gl.constexpr,
    HAS_ROWS: gl.constexpr,
):  # fmt: skip
    """Writes rows of h if HAS_ROWS, and panels of h and the slope if SAVES."""
    pipe = pipeline(x_desc, w_desc, n_rows, n_columns, 1, K_BLOCKS, STAGES, False, 0)
    buffers = _buffers(h8_desc)
    scales = (x_scale_ptr, w_scale_ptr, h_scale_ptr)
    gl.warp_specialize(
        [
            (_silu, (pipe, h8_desc, panels_ptr, slope_ptr, scales, buffers, 0, SAVES, HAS_ROWS)),
            (_silu, (pipe, h8_desc, panels_ptr, slope_ptr, scales, buffers, 1, SAVES, HAS_ROWS)),
            (produce, (pipe, x_desc, w_desc)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


@gluon.jit(do_not_specialize=["n_rows", "n_columns"])
def matmul_dsilu_hopper_8bit_kernel(
    x_desc, w_desc, dz8_desc, panels_ptr, slope_ptr, x_scale_ptr, w_scale_ptr, dz_scale_ptr,
    n_rows, n_columns, K_BLOCKS: gl.constexpr, STAGES: gl.constexpr, HAS_PANELS: gl.constexpr,
    HAS_ROWS: gl.constexpr,
):  # fmt: skip
    """Writes rows of dz if HAS_ROWS, and its panels if HAS_PANELS. x is dy."""
    pipe = pipeline(x_desc, w_desc, n_rows, n_columns, 1, K_BLOCKS, STAGES, False, 0)
    buffers = _buffers(dz8_desc)
    scales = (x_scale_ptr, w_scale_ptr, dz_scale_ptr)
    gl.warp_specialize(
        [
            (_dsilu, (pipe, dz8_desc, panels_ptr, slope_ptr, scales, buffers, 0,
                      HAS_PANELS, HAS_ROWS)),
            (_dsilu, (pipe, dz8_desc, panels_ptr, slope_ptr, scales, buffers, 1,
                      HAS_PANELS, HAS_ROWS)),
            (produce, (pipe, x_desc, w_desc)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


_HALF, _COLUMN = tiles(ROWS.value, BLOCK_K.value), tiles(TILE.value, BLOCK_K.value)
_MAPS = (_HALF, _COLUMN, _HALF)


def matmul_silu(
    target: Target, shape: tuple[int, int], inner: int, rows: bool, save: bool
) -> Silu:
    """Does the same as `triton_silu_8bit.matmul_silu`, with the slope in registers' order."""
    n_rows, width = shape
    of_panels = panels_shape(*shape)
    kernel = Bound(
        matmul_silu_hopper_8bit_kernel, (target.multiprocessors,), n_rows, width // TILE.value,
        maps=_MAPS, K_BLOCKS=inner // BLOCK_K.value, STAGES=STAGES, SAVES=save, HAS_ROWS=rows,
        num_warps=4,
    )  # fmt: skip

    def run(x: Blocks, w: InRows) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        h8 = x.rows.new_empty(shape) if rows else None
        panels = x.rows.new_empty(of_panels) if save else None
        slope = new_saved(x.scale, shape, bfloat16) if save else None
        of_rows = x.rows if h8 is None else h8
        saved = (panels.view(int32), slope) if save else (of_rows, of_rows)
        kernel(x.rows, w.x, of_rows, *saved, x.scale, w.scale, x.bound)
        return h8, panels, slope

    return run


def matmul_dsilu(
    target: Target, shape: tuple[int, int], inner: int, rows: bool, panels: bool
) -> DSilu:
    """Does the same as `triton_silu_8bit.matmul_dsilu` from a slope in the order of registers."""
    n_rows, width = shape
    of_panels = panels_shape(*shape)
    kernel = Bound(
        matmul_dsilu_hopper_8bit_kernel, (target.multiprocessors,), n_rows, width // TILE.value,
        maps=_MAPS, K_BLOCKS=inner // BLOCK_K.value, STAGES=STAGES, HAS_PANELS=panels,
        HAS_ROWS=rows, num_warps=4,
    )  # fmt: skip

    def run(dy: Blocks, w: InRows, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
        dz8 = dy.rows.new_empty(shape) if rows else None
        of_columns = dy.rows.new_empty(of_panels) if panels else None
        written = dy.rows if dz8 is None else dz8
        words = written if of_columns is None else of_columns.view(int32)
        kernel(dy.rows, w.x, written, words, slope, dy.scale, w.scale, dy.bound)
        return dz8, of_columns

    return run
