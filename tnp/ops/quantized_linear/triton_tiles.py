"""Multiplies by weights of 8 and 4 bits in tiles, for any number of rows, in portable Triton.

    yᵀ = Σ_g scale_g ∘ ((codes_g − zeros_g) x_gᵀ) + bias

A program owns BLOCK_N outputs of BLOCK_M rows. Codes less their zero points are exact in 16 bits.
They are the left operand, which tensor cores can read from registers. The float32 sum of a group is
multiplied by the group's scales. If a scale belongs to a whole row, it is applied at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass

import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.primitives import INTERPRETED, KernelConfig, add_dot, cast, dot
from tnp.ops._shared.rows import row_layout, row_offsets
from tnp.ops._shared.triton_matmul import load_tile, offsets
from tnp.ops.quantized_linear.definition import GROUPS, OPTIONS
from tnp.ops.quantized_linear.packing import EACH

WORD = tl.constexpr(EACH)  # codes of 4 bits in a word
WHOLE = 64  # inputs that are multiplied at a time if a scale belongs to a whole row


@dataclass(frozen=True)
class Config(KernelConfig):
    """Sets rows and outputs of a tile, warps, and stages of the software pipeline."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


# Tiles of few rows first, and of equal tiles those with more stages. `configs` says which is the
# default.
CONFIGS = (
    Config(16, 64, 8, 4),
    Config(16, 128, 8, 4),
    Config(32, 64, 4, 4),
    Config(64, 64, 4, 4),
    Config(64, 64, 4, 3),
    Config(64, 128, 8, 4),
    Config(64, 128, 8, 3),
    Config(128, 64, 8, 3),
    Config(128, 64, 8, 2),
    Config(128, 128, 8, 3),
    Config(128, 128, 8, 2),
)

# The most sums of a thread where operands take registers, before 9.0: with more, tiles spill.
REGISTER_SUMS = 32


@triton.jit
def nibbles(words, dtype: tl.constexpr):
    """Returns the codes of words [N, K] in `dtype`, [N, 8 K], plus `raised`.

    In bfloat16 the numbers from 128 to 143 have the codes 0 to 15 as their last bits, and in
    float16 those from 1,024 on. So no number is converted.
    """
    # Each join puts a bit of the code's place in its word last, the highest bit first.
    even = tl.join(
        tl.join(_place(words, 0, dtype), _place(words, 4, dtype)),
        tl.join(_place(words, 2, dtype), _place(words, 6, dtype)),
    )
    odd = tl.join(
        tl.join(_place(words, 1, dtype), _place(words, 5, dtype)),
        tl.join(_place(words, 3, dtype), _place(words, 7, dtype)),
    )
    return _number(tl.reshape(tl.join(even, odd), [words.shape[0], words.shape[1] * WORD]), dtype)


@triton.jit
def _place(words, K: tl.constexpr, dtype: tl.constexpr):
    """Returns code K of each word in `dtype`, plus `raised`."""
    BITS: tl.constexpr = 0x43004300 if dtype == tl.bfloat16 else 0x64006400
    pair = ((words >> (K // 2 * 4)) & 0x000F000F) | BITS
    return (pair >> (K % 2 * 16)).to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def raised(BITS: tl.constexpr, dtype: tl.constexpr):
    """Returns by how much loaded numbers are above their codes."""
    if BITS == 8:
        return -128
    return 128 if dtype == tl.bfloat16 else 1024


@triton.jit
def _number(x, dtype: tl.constexpr):
    """Returns whole numbers in `dtype`; in float32 in the interpreter, which `dot` takes."""
    return x.to(tl.float32 if INTERPRETED else dtype)


@triton.jit
def _zero_points(zeros_ptr, of_group, in_outputs, BITS: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """Returns the codes of a group's zero points, [N]."""
    if HAS_ZEROS:
        return tl.load(zeros_ptr + of_group, mask=in_outputs, other=0)
    return tl.full(of_group.shape, 1 << (BITS - 1), tl.uint8)


@triton.jit
def _codes(
    weight_ptr, offs_n, start, n_in, n_out, dtype: tl.constexpr,
    BITS: tl.constexpr, MASKED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Returns raised codes of BLOCK_K inputs, [N, BLOCK_K] in `dtype`."""
    if BITS == 8:
        offs_k = start + tl.arange(0, BLOCK_K)
        codes = load_tile(weight_ptr, offs_n, offs_k, n_out, n_in, n_in, True, MASKED)
        numbers = _number(codes, dtype)
    else:
        offs_k = start // WORD + tl.arange(0, BLOCK_K // WORD)
        width = n_in // WORD
        words = load_tile(weight_ptr, offs_n, offs_k, n_out, width, width, True, MASKED)
        numbers = nibbles(words, dtype)
    return numbers


@triton.jit(do_not_specialize=["n_rows"])
def _tiles_kernel(
    x_ptr, weight_ptr, scales_ptr, zeros_ptr, bias_ptr, y_ptr,
    stride_xb, stride_xl, n_rows, inner_x, n_in, n_out, n_groups,
    BITS: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, WHOLE: tl.constexpr,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Computes a tile. If WHOLE, a row has one scale, else a step of BLOCK_K is a group."""
    offs_m, offs_n = offsets(n_rows, n_out, BLOCK_M, BLOCK_N)
    in_rows, in_outputs = offs_m < n_rows, offs_n < n_out
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    of_x = row_offsets(offs_m, inner_x, stride_xb, stride_xl)
    of_group = offs_n.to(tl.int64) * n_groups
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    scale = tl.load(scales_ptr + of_group, mask=in_outputs, other=0.0)
    zeros = _zero_points(zeros_ptr, of_group, in_outputs, BITS, HAS_ZEROS)
    for step in tl.range(0, tl.cdiv(n_in, BLOCK_K)):
        offs_k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = in_rows[:, None]
        if MASKED:
            mask = mask & (offs_k < n_in)[None, :]
        x = tl.load(x_ptr + of_x[:, None] + offs_k[None, :], mask=mask, other=0.0)
        codes = _codes(
            weight_ptr, offs_n, step * BLOCK_K, n_in, n_out, dtype, BITS, MASKED, BLOCK_K
        )
        if HAS_ZEROS or BITS == 4:
            codes -= _number(zeros.to(tl.int32) + raised(BITS, dtype), dtype)[:, None]
        if WHOLE:
            acc = add_dot(codes, tl.trans(x), acc)
        else:
            # The next group's numbers are on their way during the product. The last step loads its
            # own again.
            of_group += tl.where(step + 1 < n_groups, 1, 0)
            next_scale = tl.load(scales_ptr + of_group, mask=in_outputs, other=0.0)
            zeros = _zero_points(zeros_ptr, of_group, in_outputs, BITS, HAS_ZEROS)
            acc += dot(codes, tl.trans(x)) * scale.to(tl.float32)[:, None]
            scale = next_scale
    if WHOLE:
        acc *= scale.to(tl.float32)[:, None]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + offs_n, mask=in_outputs, other=0.0).to(tl.float32)[:, None]
    at = offs_m.to(tl.int64)[None, :] * n_out + offs_n[:, None]
    mask = in_rows[None, :] & in_outputs[:, None]
    tl.store(y_ptr + at, cast(acc, dtype), mask=mask)


def _block_k(call: Call) -> int:
    group = call.problem["group"]
    return group if group in GROUPS else WHOLE


def configs(call: Call) -> tuple[Config, ...]:
    """Returns the tiles that fit, the default first.

    The default has the fewest rows that hold all rows of the call, or else the most. Of these tiles
    it is the largest that gives every multiprocessor work, or else the smallest.
    """
    p = call.problem
    fitting = [config for config in CONFIGS if _fits(call, config)]
    height = next((one.block_m for one in fitting if one.block_m >= p["rows"]), fitting[-1].block_m)
    high = [one for one in fitting if one.block_m == height]
    widths = dict.fromkeys(one.block_n for one in high)
    n_row_tiles = triton.cdiv(p["rows"], height)
    filling = [
        width
        for width in widths
        if n_row_tiles * triton.cdiv(p["n_out"], width) >= call.target.multiprocessors
    ]
    width = (filling or list(widths)[:1])[-1]
    default = next(one for one in high if one.block_n == width)
    return default, *(one for one in fitting if one != default)


def _fits(call: Call, config: Config) -> bool:
    """Returns whether registers hold the sums, and shared memory holds the tiles in flight.

    Loaded codes have a stage less than rows of x. Their numbers pass through shared memory.
    """
    target, p = call.target, call.problem
    if target.kind != "cuda":
        return True
    sums = config.block_m * config.block_n // (32 * config.num_warps)
    rows = config.num_stages * config.block_m * p.itemsize
    codes = config.block_n * ((config.num_stages - 1) * p["bits"] / 8 + p.itemsize)
    fits = _block_k(call) * (rows + codes) + 1024 <= target.shared_bytes
    return fits and (target.capability >= 90 or sums <= REGISTER_SUMS)


def empty(wanted: tuple[str, ...], inputs: tuple) -> tuple[tuple, tuple]:
    x, weight, *_ = inputs
    return (x.new_empty(*x.shape[:-1], len(weight)),), ()


def prepare(call: Call, config: Config, inputs: tuple) -> Callable:
    x, weight, scales, _zeros, _bias = inputs
    p = call.problem
    of_x, shape = row_layout(x), (*x.shape[:-1], len(weight))
    rows, n_in, n_out, block_k = p["rows"], p["n_in"], p["n_out"], _block_k(call)
    kernel = Bound(
        _tiles_kernel,
        (triton.cdiv(rows, config.block_m) * triton.cdiv(n_out, config.block_n),),
        *of_x.strides, rows, of_x.n_inner, n_in, n_out, scales.shape[1],
        BITS=p["bits"], HAS_ZEROS=p["zeros"], HAS_BIAS=p["bias"], WHOLE=block_k != p["group"],
        MASKED=n_in % block_k != 0, BLOCK_K=block_k, **config.kernel_arguments(),
    )  # fmt: skip

    def launch(inputs, scalars):
        x, weight, scales, zeros, bias = inputs
        scales, y = scales.contiguous(), x.new_empty(shape)
        zeros = scales if zeros is None else zeros.contiguous()
        bias = scales if bias is None else bias.contiguous()
        kernel(of_x.of(x), weight.contiguous(), scales, zeros, bias, y)
        return (y,), ()

    return launch


FORWARD = Kernel("tiles", empty, prepare, configs=configs, options=OPTIONS)
