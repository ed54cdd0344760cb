"""Computes the mixture heads on Hopper with the first product in 8 bits (e4m3).

In the forward pass a consumer takes all tiles of a head for its 128 rows, as in
`tnp.ops.mixture_heads.hopper`. z is written in 8 bits, as rows whose columns lie in the order of a
tile's registers (`tnp.ops._shared.rows_8bit.column_at`).

The kernel of the backward pass reads z, and writes dz as rows in the same order and as panels.
It takes few instructions an element. A program takes 64 columns and walks blocks of 128 rows. A
thread has four columns, which are a word of a row, and 16 rows of a block. In a
panel's line these are 16 consecutive bytes. So it packs words of rows and of panels from its own
numbers, and adds up ddown for its own columns.
"""

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
from tnp.ops._shared.blocks_8bit import Blocks, panels_shape
from tnp.ops._shared.e4m3 import BLOCK
from tnp.ops._shared.hopper_blocks_8bit import word, words
from tnp.ops._shared.hopper_matmul import ACC, BLOCK_K, QUARTER_ACC, ROWS, TILE, quarters
from tnp.ops._shared.hopper_matmul_8bit import MAPS, REGISTERS, multiply, pipeline, produce
from tnp.ops._shared.hopper_primitives import opaque
from tnp.ops._shared.hopper_silu_8bit import inverse_power, load_columns, store_rows
from tnp.ops._shared.rows_8bit import InRows
from tnp.ops.mixture_heads.triton_8bit import Dz, Heads, dout_panels

ORDERED = True  # columns of rows lie in the order of `column_at`
N_OUT = gl.constexpr(3)
BLOCK_ROWS = gl.constexpr(BLOCK)
# Blocks of rows that a program of the backward pass walks.
WALKED = 8
# Limits registers so that four programs fit on a multiprocessor.
MOST_REGISTERS = 128
# WORDS [8, 16]: index i holds panel positions 16i to 16i + 15. POSITIONS adds four of them, or
# their four words.
WORDS = gl.constexpr(gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0]))
POSITIONS = gl.constexpr(gl.BlockedLayout([1, 1, 4], [2, 16, 1], [4, 1, 1], [2, 1, 0]))


# ------------------------------------------------------------------------------- forward


@gluon.jit
def _tanh(x):
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _lane_sums(x):
    """Returns row sums over the columns that a thread holds, [64, 4], without a shuffle."""
    return gl.sum(gl.sum(gl.reshape(x, [ROWS, BLOCK_K // 8, 4, 2]), 3), 1)


@gluon.jit
def _add_outputs(out, half, w):
    """Adds a quarter's share of the three outputs. `half` is z / 2; σ(z) is (1 + tanh(z/2)) / 2."""
    h = half * _tanh(half) + half
    return (
        out[0] + _lane_sums(h * w[0]), out[1] + _lane_sums(h * w[1]), out[2] + _lane_sums(h * w[2])
    )  # fmt: skip


@gluon.jit
def _heads(
    pipe, z_ptr, down_ptr, out_ptr, scales, n_rows,
    WARPGROUP: gl.constexpr, COLUMNS: gl.constexpr, SAVES: gl.constexpr,
):  # fmt: skip
    WIDTH: gl.constexpr = COLUMNS * TILE
    n_heads = pipe.n_columns // COLUMNS
    n_padded = gl.cdiv(n_rows, TILE) * TILE
    for group in range(pipe.first // COLUMNS, pipe.last // COLUMNS):
        head = group % n_heads
        row = group // n_heads * (2 * TILE) + WARPGROUP * TILE
        # A consumer without rows loads the scales of the last row.
        known = gl.minimum(row, n_rows - 1)
        half_of_x = gl.load(scales[0] + known) * 0.5
        unit = inverse_power(gl.load(scales[2] + known)) * 2.0
        zero = _lane_sums(gl.zeros([ROWS, BLOCK_K], gl.float32, QUARTER_ACC))
        upper_out = (zero, zero, zero)
        lower_out = (zero, zero, zero)
        for i in range(COLUMNS):
            upper, lower = multiply(pipe, group * COLUMNS + i, WARPGROUP)
            uppers = quarters(upper)
            lowers = quarters(lower)
            # `opaque` keeps the compiler from computing addresses before the product.
            first = opaque(i) * TILE
            for j in gl.static_range(2):
                column = head * WIDTH + first + j * BLOCK_K
                scale = load_columns(scales[1], column) * half_of_x
                w_ptr = down_ptr + head * (N_OUT * WIDTH) + first + j * BLOCK_K
                w = (
                    load_columns(w_ptr, 0),
                    load_columns(w_ptr, WIDTH),
                    load_columns(w_ptr, 2 * WIDTH),
                )
                half = uppers[j] * scale
                if SAVES:
                    store_rows(z_ptr, half * unit, row, column, n_padded, n_heads * WIDTH)
                upper_out = _add_outputs(upper_out, half, w)
                half = lowers[j] * scale
                if SAVES:
                    store_rows(z_ptr, half * unit, row + ROWS, column, n_padded, n_heads * WIDTH)
                lower_out = _add_outputs(lower_out, half, w)
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, ACC))
        for o in gl.static_range(N_OUT):
            for half_of_rows in gl.static_range(2):
                out = lower_out[o] if half_of_rows else upper_out[o]
                out = gl.convert_layout(gl.sum(out, 1), gl.SliceLayout(1, ACC))
                of_half = rows + half_of_rows * ROWS
                at = (of_half.to(gl.int64) * n_heads + head) * N_OUT + o
                gl.store(out_ptr + at, out, mask=of_half < n_rows)


@gluon.jit(do_not_specialize=["n_rows", "n_heads"])
def mixture_heads_hopper_8bit_kernel(
    x_desc, up_desc, z_ptr, down_ptr, out_ptr, x_scale_ptr, up_scale_ptr, z_scale_ptr,
    n_rows, n_heads, COLUMNS: gl.constexpr, SAVES: gl.constexpr,
):  # fmt: skip
    """Writes the outputs, and if SAVES also rows of z."""
    pipe = pipeline(x_desc, up_desc, n_rows, n_heads * COLUMNS, COLUMNS)
    scales = (x_scale_ptr, up_scale_ptr, z_scale_ptr)
    gl.warp_specialize(
        [
            (_heads, (pipe, z_ptr, down_ptr, out_ptr, scales, n_rows, 0, COLUMNS, SAVES)),
            (_heads, (pipe, z_ptr, down_ptr, out_ptr, scales, n_rows, 1, COLUMNS, SAVES)),
            (produce, (pipe, x_desc, up_desc)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


def heads(target: Target, n_rows: int, n_heads: int, width: int, save: bool) -> Heads:
    """Does the same as `triton_8bit.heads`, with columns of z in the order of `column_at`."""
    kernel = Bound(
        mixture_heads_hopper_8bit_kernel, (target.multiprocessors,), n_rows, n_heads,
        maps=MAPS, COLUMNS=width // TILE.value, SAVES=save, num_warps=4,
    )  # fmt: skip
    z_shape = new_z_shape(n_rows, n_heads * width)

    def run(x: Blocks, up: InRows, down: Tensor) -> tuple[Tensor, Tensor | None]:
        out = x.scale.new_empty(n_rows, n_heads, N_OUT.value)
        z = x.rows.new_empty(z_shape) if save else None
        written, _ = words(z, None, x.scale)
        kernel(x.rows, up.x, written, down, out, x.scale, up.scale, x.bound)
        return out, z

    return run


# ------------------------------------------------------------------------------ backward


@gluon.jit
def _numbers(codes):
    """Returns the four numbers of a word of e4m3, in float32."""
    return gl.inline_asm_elementwise(
        "{ .reg .b16 lo, hi, a, b, c, d; .reg .b32 ab, cd; mov.b32 {lo, hi}, $4;"
        " cvt.rn.f16x2.e4m3x2 ab, lo; cvt.rn.f16x2.e4m3x2 cd, hi;"
        " mov.b32 {a, b}, ab; mov.b32 {c, d}, cd; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b;"
        " cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }",
        "=f,=f,=f,=f,r", [codes], dtype=(gl.float32, gl.float32, gl.float32, gl.float32),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _of_positions(ptr):
    """Loads dout of four consecutive positions of each index, as four tensors [8, 1]."""
    AT: gl.constexpr = gl.SliceLayout(1, POSITIONS)
    index = gl.arange(0, 8, layout=gl.SliceLayout(1, AT))
    at = gl.arange(0, 4, layout=gl.SliceLayout(0, AT))
    x = gl.load(ptr + (index[:, None] * 16 + at[None, :]))
    even, odd = gl.split(gl.reshape(x, [8, 2, 2]))
    x0, x2 = gl.split(even)
    x1, x3 = gl.split(odd)
    ONE: gl.constexpr = gl.SliceLayout(1, WORDS)
    return (
        gl.convert_layout(x0, ONE, assert_trivial=True)[:, None],
        gl.convert_layout(x1, ONE, assert_trivial=True)[:, None],
        gl.convert_layout(x2, ONE, assert_trivial=True)[:, None],
        gl.convert_layout(x3, ONE, assert_trivial=True)[:, None],
    )


@gluon.jit
def _dz(x, half_unit, dout0, dout1, dout2, w, sums):
    """Returns dz of one element of each word, and the sums of ddown with it added.

    w holds three weights for dz.
    """
    half = x * half_unit
    t = _tanh(half)
    h = half * t + half
    twice_slope = h * (1.0 - t) + (1.0 + t)
    dz = (dout0 * w[0] + dout1 * w[1] + dout2 * w[2]) * twice_slope
    return dz, (sums[0] + dout0 * h, sums[1] + dout1 * h, sums[2] + dout2 * h)


@gluon.jit
def _columns(k: gl.constexpr, LAYOUT: gl.constexpr):
    """Returns the columns of the k-th element of 16 words, by `rows_8bit.column_at`."""
    p = gl.arange(0, 16, layout=LAYOUT)
    return p % 4 * 16 + p // 4 * 2 + (k // 2 * 8 + k % 2)


@gluon.jit(do_not_specialize=["n_blocks"])
def mixture_heads_dz_hopper_8bit_kernel(
    z_ptr, z_scale_ptr, dout_ptr, dz_scale_ptr, down_ptr, dz_ptr, panels_ptr, ddown_ptr,
    n_blocks, N_HEADS: gl.constexpr, F: gl.constexpr, WALKED: gl.constexpr,
):  # fmt: skip
    """Writes rows and panels of dz, and ddown [groups of WALKED blocks, K, 3, F].

    z_ptr, dz_ptr and panels_ptr count words.
    """
    first_column = gl.program_id(0) * BLOCK_K
    head = first_column // F
    WIDTH: gl.constexpr = N_HEADS * F
    group = gl.program_id(1)
    last = gl.minimum((group + 1) * WALKED, n_blocks)
    index = gl.arange(0, 8, layout=gl.SliceLayout(1, WORDS))
    p = gl.arange(0, 16, layout=gl.SliceLayout(0, WORDS))
    # The row of position 16·index is 16·(index // 2) + 4·(index % 2).
    row = index // 2 * 16 + index % 2 * 4
    offsets = (row * (WIDTH // 4))[:, None] + (first_column // 4 + p)[None, :]
    lines = gl.arange(0, 8, layout=gl.SliceLayout(1, gl.SliceLayout(2, POSITIONS)))
    within = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, POSITIONS)))
    in_line = lines[:, None, None] * 4 + within[None, None, :]
    down_ptr += head * (3 * F) + first_column % F
    zero = gl.zeros([8, 16], gl.float32, WORDS)
    weights = ()
    totals = ()
    for k in gl.static_range(4):
        column = _columns(k, gl.SliceLayout(0, WORDS))
        weights += ((
            gl.load(down_ptr + column)[None, :], gl.load(down_ptr + F + column)[None, :],
            gl.load(down_ptr + 2 * F + column)[None, :],
        ),)  # fmt: skip
        totals += ((zero, zero, zero),)
    for block in range(group * WALKED, last):
        # Offsets of rows are compile-time constants, so one base address serves a block.
        at_block = block.to(gl.int64) * (BLOCK_ROWS * (WIDTH // 4))
        z_ptrs = z_ptr + at_block + offsets
        dz_ptrs = dz_ptr + at_block + offsets
        codes = ()
        for i in gl.static_range(4):
            for m in gl.static_range(4):
                codes += (gl.load(z_ptrs + (i + m // 2 * 64 + m % 2 * 8) * (WIDTH // 4)),)
        half_unit = gl.load(z_scale_ptr + block * BLOCK_ROWS) * 0.5
        # dz is in units of its scale. The factor 0.5 cancels that of twice the slope.
        unit = inverse_power(gl.load(dz_scale_ptr + block * BLOCK_ROWS)) * 0.5
        dout_at = dout_ptr + (block * N_HEADS + head).to(gl.int64) * (3 * BLOCK_ROWS)
        packed = ()
        for i in gl.static_range(4):
            dout0 = _of_positions(dout_at + 4 * i)
            dout1 = _of_positions(dout_at + BLOCK_ROWS + 4 * i)
            dout2 = _of_positions(dout_at + 2 * BLOCK_ROWS + 4 * i)
            of_rows = ()
            for m in gl.static_range(4):
                x = _numbers(codes[4 * i + m])
                dz = ()
                sums = ()
                for k in gl.static_range(4):
                    w = (weights[k][0] * unit, weights[k][1] * unit, weights[k][2] * unit)
                    one, sum_k = _dz(x[k], half_unit, dout0[m], dout1[m], dout2[m], w, totals[k])
                    dz += (one,)
                    sums += (sum_k,)
                totals = sums
                at = (i + m // 2 * 64 + m % 2 * 8) * (WIDTH // 4)
                gl.store(dz_ptrs + at, word(dz[0], dz[1], dz[2], dz[3]))
                of_rows += (dz,)
            lines_of = ()
            for k in gl.static_range(4):
                lines_of += (
                    word(of_rows[0][k], of_rows[1][k], of_rows[2][k], of_rows[3][k]),
                )  # fmt: skip
            packed += (lines_of,)
        panel_ptr = panels_ptr + (block.to(gl.int64) * WIDTH + first_column) * 32
        for k in gl.static_range(4):
            even = gl.join(packed[0][k], packed[2][k])
            odd = gl.join(packed[1][k], packed[3][k])
            line = gl.reshape(gl.join(even, odd), [8, 16, 4])
            line = gl.convert_layout(line, POSITIONS, assert_trivial=True)
            of_lines = _columns(k, gl.SliceLayout(0, gl.SliceLayout(2, POSITIONS)))
            gl.store(panel_ptr + (of_lines[None, :, None] * 32 + in_line), line)
    ddown_ptr += (group * N_HEADS + head) * (3 * F) + first_column % F
    for k in gl.static_range(4):
        column = _columns(k, gl.SliceLayout(0, WORDS))
        for o in gl.static_range(3):
            gl.store(ddown_ptr + o * F + column, gl.sum(totals[k][o], 0))


def new_z_shape(n_rows: int, width: int) -> tuple[int, int]:
    """Returns the shape of rows in whole blocks, which the kernels need not mask."""
    return triton.cdiv(n_rows, BLOCK) * BLOCK, width


def dz(n_rows: int, n_heads: int, width: int) -> Dz:
    """Does the same as `triton_8bit.dz`, with columns of rows in the order of `column_at`."""
    columns, n_blocks = n_heads * width, triton.cdiv(n_rows, BLOCK)
    n_groups = triton.cdiv(n_blocks, WALKED)
    prepare = dout_panels(n_rows, n_heads, width)
    kernel = Bound(
        mixture_heads_dz_hopper_8bit_kernel, (columns // BLOCK_K.value, n_groups),
        n_blocks, N_HEADS=n_heads, F=width, WALKED=WALKED, num_warps=4,
        maxnreg=MOST_REGISTERS,
    )  # fmt: skip
    shape, of_panels = new_z_shape(n_rows, columns), panels_shape(n_rows, columns)
    partial_shape = n_groups, n_heads, N_OUT.value, width

    def run(z: Tensor, z_scale: Tensor, dout: Tensor, down: Tensor) -> tuple[Blocks, Tensor]:
        of_dout, scale = prepare(dout, down)
        rows, panels = z.new_empty(shape), z.new_empty(of_panels)
        partials = scale.new_empty(partial_shape)
        written = words(rows, panels, scale)
        kernel(z.view(torch.int32), z_scale, of_dout, scale, down, *written, partials)
        return Blocks(rows[:n_rows], scale, panels, scale), partials

    return run
