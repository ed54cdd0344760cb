"""Computes the MLP's products of inner width 512 on Hopper, with operands in 8 bits (e4m3).

    forward     z = x wᵀ,  h = z·σ(z),  slope = σ(z)·(1 + z·(1 − σ(z)))
    backward    dz = (dy wᵀ)·slope

The kernels resemble `tnp.ops._shared.hopper_silu`, and use the same saved slope. x and dy are
blocks (`tnp.ops._shared.blocks_8bit`), w has a scale for each row (`tnp.ops._shared.rows_8bit`).
The backward pass takes w transposed, because Hopper multiplies 8-bit operands only if both are
contiguous along the summed dimension.

The kernels write h and dz only in 8 bits, with a scale computed before the product: as rows for the
next product, and as panels for the gradient of a weight. Both may sum in any order. So columns of
rows, and rows of panels, lie in the order of a tile's registers. A thread packs its own numbers in
words and writes them, without shared memory and without an exchange. Four threads fill two sectors
of a row, and eight fill one of a panel.
"""

from torch import Tensor, bfloat16
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
from tnp.ops._shared.blocks_8bit import Blocks, panels_shape
from tnp.ops._shared.hopper_blocks_8bit import word, words
from tnp.ops._shared.hopper_matmul import BLOCK_K, QUARTER_ACC, ROWS, TILE, quarters
from tnp.ops._shared.hopper_matmul_8bit import MAPS, REGISTERS, multiply, pipeline, produce
from tnp.ops._shared.hopper_primitives import opaque
from tnp.ops._shared.hopper_slope import load_slopes, new_saved, slope_of, slope_place, store_slope
from tnp.ops._shared.rows_8bit import InRows
from tnp.ops._shared.triton_silu_8bit import DSilu, Silu

ORDERED = True  # columns of rows lie in the order of `column_at`
# The layout in which a thread has four words of a row.
BY_4 = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))


@gluon.jit
def load_columns(ptr, column):
    columns = column + gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, QUARTER_ACC))
    return gl.load(ptr + columns)[None, :]


@gluon.jit
def inverse_power(power):
    """Returns the inverse of a power of two, by its exponent: a division is many instructions."""
    return ((254 << 23) - power.to(gl.int32, bitcast=True)).to(gl.float32, bitcast=True)


@gluon.jit
def store_rows(ptr, quarter, row, column, n_rows, width):
    """Writes a quarter to rows, with columns in the order of `rows_8bit.column_at`."""
    # Dimensions: warps, halves of an instruction's rows, rows, words, halves of a word, threads,
    # columns. A thread has four words of a row.
    x = gl.reshape(quarter, [4, 2, 8, 4, 2, 4, 2])
    first, second = gl.split(gl.permute(x, (1, 0, 2, 5, 3, 4, 6)))
    x0, x2 = gl.split(first)
    x1, x3 = gl.split(second)
    packed = gl.reshape(word(x0, x1, x2, x3), [ROWS, 16])
    packed = gl.convert_layout(packed, BY_4, assert_trivial=True)
    i = gl.arange(0, ROWS, layout=gl.SliceLayout(1, BY_4))
    rows = row + i // 8 % 4 * 16 + i // 32 * 8 + i % 8
    offsets = rows.to(gl.int64) * (width // 4) + column // 4
    places = offsets[:, None] + gl.arange(0, 16, layout=gl.SliceLayout(0, BY_4))[None, :]
    gl.store(ptr + places, packed, mask=(rows < n_rows)[:, None])


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
    rows = gl.arange(0, ROWS, layout=gl.SliceLayout(1, QUARTER_ACC))
    columns = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, QUARTER_ACC))
    # A line has 32 words.
    places, _ = _row_pairs((rows // 16 * 8 + rows % 8)[:, None] + columns[None, :] * 32)
    gl.store(ptr + places, word(x0, x1, x2, x3))


@gluon.jit
def _panel(ptr, row, column, width):
    """Returns where a tile's lines begin. ptr counts words."""
    return ptr + ((row // TILE).to(gl.int64) * width + column) * 32


@gluon.jit
def _h_and_slope(half):
    """Returns h, and twice the slope, from z / 2. With t = tanh(z/2), σ(z) is (1 + t) / 2."""
    t = gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=gl.float32, is_pure=True, pack=1
    )
    h = half * t + half
    return h, h * (1.0 - t) + (1.0 + t)


@gluon.jit
def _place(pipe, tile, WARPGROUP: gl.constexpr):
    """Returns the row and the column of a consumer's tile, and its number among tiles of 128."""
    # `opaque` keeps the compiler from computing addresses before the product: they would spill.
    tile = opaque(tile)
    block = tile // pipe.n_columns * 2 + WARPGROUP
    column = tile % pipe.n_columns
    return block * TILE, column * TILE, block * pipe.n_columns + column


@gluon.jit
def _scales(pipe, ptrs, tile, n_rows, WARPGROUP: gl.constexpr):
    """Returns the scale of the rows, the scales of both halves of the columns, the result's scale.

    A consumer past the last row gets those of the last row.
    """
    row = gl.minimum(tile // pipe.n_columns * 2 * TILE + WARPGROUP * TILE, n_rows - 1)
    column = tile % pipe.n_columns * TILE
    of_columns = load_columns(ptrs[1], column), load_columns(ptrs[1], column + BLOCK_K)
    return gl.load(ptrs[0] + row), of_columns, gl.load(ptrs[2] + row)


@gluon.jit
def _silu(
    pipe, rows_ptr, panels_ptr, slope_ptr, scales, n_rows,
    WARPGROUP: gl.constexpr, HAS_ROWS: gl.constexpr, SAVES: gl.constexpr,
):  # fmt: skip
    width = pipe.n_columns * TILE
    for tile in range(pipe.first, pipe.last):
        # Scales are loaded before the product, so that they arrive meanwhile.
        of_x, of_columns, of_h = _scales(pipe, scales, tile, n_rows, WARPGROUP)
        upper, lower = multiply(pipe, tile, WARPGROUP)
        row, column, place = _place(pipe, tile, WARPGROUP)
        if row < n_rows:
            unit = inverse_power(of_h)
            uppers = quarters(upper)
            lowers = quarters(lower)
            for j in gl.static_range(2):
                begin = column + j * BLOCK_K
                scale = of_columns[j] * (of_x * 0.5)
                h0, slope0 = _h_and_slope(uppers[j] * scale)
                if SAVES:
                    store_slope(slope_ptr + slope_place(place, 0, j), slope0 * 0.5)
                h0 = h0 * unit
                if HAS_ROWS:
                    store_rows(rows_ptr, h0, row, begin, n_rows, width)
                h1, slope1 = _h_and_slope(lowers[j] * scale)
                if SAVES:
                    store_slope(slope_ptr + slope_place(place, 1, j), slope1 * 0.5)
                h1 = h1 * unit
                if HAS_ROWS:
                    store_rows(rows_ptr, h1, row + ROWS, begin, n_rows, width)
                if SAVES:
                    _store_panel(_panel(panels_ptr, row, begin, width), h0, h1)


@gluon.jit
def _dsilu(
    pipe, rows_ptr, panels_ptr, slope_ptr, scales, n_rows,
    WARPGROUP: gl.constexpr, HAS_ROWS: gl.constexpr, HAS_PANELS: gl.constexpr,
):  # fmt: skip
    width = pipe.n_columns * TILE
    for tile in range(pipe.first, pipe.last):
        # Slopes and scales are loaded before the product, so that they arrive meanwhile. A consumer
        # past the last row loads those of the last block.
        block = gl.minimum(tile // pipe.n_columns * 2 + WARPGROUP, (n_rows - 1) // TILE)
        slopes = load_slopes(slope_ptr, block * pipe.n_columns + tile % pipe.n_columns)
        of_dy, of_columns, of_dz = _scales(pipe, scales, tile, n_rows, WARPGROUP)
        upper, lower = multiply(pipe, tile, WARPGROUP)
        row, column, _place_of_slopes = _place(pipe, tile, WARPGROUP)
        if row < n_rows:
            in_units = of_dy * inverse_power(of_dz)
            uppers = quarters(upper)
            lowers = quarters(lower)
            for j in gl.static_range(2):
                begin = column + j * BLOCK_K
                scale = of_columns[j] * in_units
                dz0 = uppers[j] * slope_of(slopes[j]) * scale
                if HAS_ROWS:
                    store_rows(rows_ptr, dz0, row, begin, n_rows, width)
                dz1 = lowers[j] * slope_of(slopes[2 + j]) * scale
                if HAS_ROWS:
                    store_rows(rows_ptr, dz1, row + ROWS, begin, n_rows, width)
                if HAS_PANELS:
                    _store_panel(_panel(panels_ptr, row, begin, width), dz0, dz1)


@gluon.jit(do_not_specialize=["n_rows", "n_columns"])
def matmul_silu_hopper_8bit_kernel(
    x_desc, w_desc, rows_ptr, panels_ptr, slope_ptr, x_scale_ptr, w_scale_ptr, h_scale_ptr,
    n_rows, n_columns, HAS_ROWS: gl.constexpr, SAVES: gl.constexpr,
):  # fmt: skip
    """Writes rows of h if HAS_ROWS, and panels of h and the slope if SAVES."""
    pipe = pipeline(x_desc, w_desc, n_rows, n_columns, 1)
    scales = (x_scale_ptr, w_scale_ptr, h_scale_ptr)
    gl.warp_specialize(
        [
            (_silu, (pipe, rows_ptr, panels_ptr, slope_ptr, scales, n_rows, 0, HAS_ROWS, SAVES)),
            (_silu, (pipe, rows_ptr, panels_ptr, slope_ptr, scales, n_rows, 1, HAS_ROWS, SAVES)),
            (produce, (pipe, x_desc, w_desc)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


@gluon.jit(do_not_specialize=["n_rows", "n_columns"])
def matmul_dsilu_hopper_8bit_kernel(
    dy_desc, w_desc, rows_ptr, panels_ptr, slope_ptr, dy_scale_ptr, w_scale_ptr, dz_scale_ptr,
    n_rows, n_columns, HAS_ROWS: gl.constexpr, HAS_PANELS: gl.constexpr,
):  # fmt: skip
    """Writes rows of dz if HAS_ROWS, and its panels if HAS_PANELS."""
    pipe = pipeline(dy_desc, w_desc, n_rows, n_columns, 1)
    scales = (dy_scale_ptr, w_scale_ptr, dz_scale_ptr)
    gl.warp_specialize(
        [
            (_dsilu, (pipe, rows_ptr, panels_ptr, slope_ptr, scales, n_rows, 0,
                      HAS_ROWS, HAS_PANELS)),
            (_dsilu, (pipe, rows_ptr, panels_ptr, slope_ptr, scales, n_rows, 1,
                      HAS_ROWS, HAS_PANELS)),
            (produce, (pipe, dy_desc, w_desc)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


def matmul_silu(target: Target, shape: tuple[int, int], inner: int, rows: bool, save: bool) -> Silu:
    """Does the same as `triton_silu_8bit.matmul_silu`, in the order of registers."""
    n_rows, width = shape
    of_panels = panels_shape(*shape)
    kernel = Bound(
        matmul_silu_hopper_8bit_kernel, (target.multiprocessors,), n_rows, width // TILE.value,
        maps=MAPS, HAS_ROWS=rows, SAVES=save, num_warps=4,
    )  # fmt: skip

    def run(x: Blocks, w: InRows) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        h8 = x.rows.new_empty(shape) if rows else None
        panels = x.rows.new_empty(of_panels) if save else None
        slope = new_saved(x.scale, shape, bfloat16) if save else None
        written = words(h8, panels, x.scale)
        kernel(x.rows, w.x, *written, slope if save else x.scale, x.scale, w.scale, x.bound)
        return h8, panels, slope

    return run


def matmul_dsilu(
    target: Target, shape: tuple[int, int], inner: int, rows: bool, panels: bool
) -> DSilu:
    """Does the same as `triton_silu_8bit.matmul_dsilu`, in the order of registers."""
    n_rows, width = shape
    of_panels = panels_shape(*shape)
    kernel = Bound(
        matmul_dsilu_hopper_8bit_kernel, (target.multiprocessors,), n_rows, width // TILE.value,
        maps=MAPS, HAS_ROWS=rows, HAS_PANELS=panels, num_warps=4,
    )  # fmt: skip

    def run(dy: Blocks, w: InRows, slope: Tensor) -> tuple[Tensor | None, Tensor | None]:
        dz8 = dy.rows.new_empty(shape) if rows else None
        of_columns = dy.rows.new_empty(of_panels) if panels else None
        written = words(dz8, of_columns, dy.scale)
        kernel(dy.rows, w.x, *written, slope, dy.scale, w.scale, dy.bound)
        return dz8, of_columns

    return run
