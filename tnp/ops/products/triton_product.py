"""Computes matrix products in Triton, in tiles, with an epilogue in the same kernel.

    "none"          c = a b
    "gelu"          y = gelu(a b + bias)
    "gelu_and_z"    the same, and z = a b + bias

Products accumulate in float32, in which the epilogue is computed too. Results are rounded once. A
program owns a tile of the result. Programs that run together share rows of a and columns of b in L2
(groups of row tiles, as in Triton's matmul tutorial). TMA reads the operands if it can: on compute
capability 9.0 and newer, 16-bit floats whose rows, or columns, start at multiples of 16 bytes. Else
the same kernel reads through pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.primitives import add_dot
from tnp.ops._shared.triton_matmul import GROUP_M, MatmulConfig, load_tile, sigmoid, store_tile
from tnp.util.checks import is_expanded

# Tiles (block_m, block_n, block_k, warps, stages) by bytes per element, preferred ones first.
CONFIGS = {
    2: (
        MatmulConfig(128, 128, 64, 8, 3),
        # With b transposed, ptxas of triton 3.6 makes the products of these tiles wait for one
        # another.
        MatmulConfig(128, 256, 64, 8, 4),
        MatmulConfig(128, 256, 64, 8, 3),
        MatmulConfig(64, 128, 64, 8, 4),
        MatmulConfig(64, 64, 64, 4, 4),
        MatmulConfig(16, 64, 128, 4, 3),
    ),
    4: (MatmulConfig(64, 64, 32, 8, 2), MatmulConfig(16, 64, 32, 4, 2)),
}
# Tiles for at most FEW_ROWS rows, whose products wait for memory. They have so many bytes in flight
# that one program fills a multiprocessor. Chosen on an H200 with triton 3.6.0: `from own_operators
# where config_id like 'lab_matmul%'`.
FEW_ROWS = 128
DEEP = (
    MatmulConfig(64, 32, 128, 4, 5),
    MatmulConfig(64, 64, 128, 4, 6),
    MatmulConfig(64, 128, 128, 4, 4),
    MatmulConfig(128, 128, 64, 8, 6),
)
# The most float32 sums that a thread holds: from 9.0 on, where operands go from shared memory to
# the tensor cores; before, where they take registers; and if rows are not aligned, where elements
# are loaded one by one. With more, tiles spill at 8.0 or 9.0.
MOST_SUMS, REGISTER_SUMS, RAGGED_SUMS = 128, 64, 32
HIGH = 64  # tiles with fewer rows read b too often
TMA_FROM = 90  # compute capability
ALIGNMENT = 16  # bytes, of rows that TMA reads, and of vectors

# 2 √(2/π) and the weight of z³ in gelu's tanh form.
SLOPE = tl.constexpr(1.5957691216057308)
CUBIC = tl.constexpr(0.044715)


@triton.jit
def gelu(z, dtype: tl.constexpr):
    """Returns ½ z (1 + tanh √(2/π) (z + 0.044715 z³)), computed as z·σ of twice that angle."""
    return z * sigmoid(z * (z * z * CUBIC + 1.0) * SLOPE, dtype)


@triton.jit
def gelu_derivative(z, dtype: tl.constexpr):
    s = sigmoid(z * (z * z * CUBIC + 1.0) * SLOPE, dtype)
    return s + z * s * (1.0 - s) * (z * z * (3.0 * CUBIC) + 1.0) * SLOPE


@triton.jit
def _operand_tile(
    x, row, column, n_rows, n_columns, stride,
    MAPPED: tl.constexpr, ROWS_MASKED: tl.constexpr, COLUMNS_MASKED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Loads a tile of a matrix with contiguous rows, by TMA or pointers; 0 past its ends."""
    if MAPPED:
        tile = x.load([row, column])
    else:
        offs_row = row + tl.arange(0, BLOCK_ROWS)
        offs_column = column + tl.arange(0, BLOCK_COLUMNS)
        tile = load_tile(
            x, offs_row, offs_column, n_rows, n_columns, stride, ROWS_MASKED, COLUMNS_MASKED
        )
    return tile


@triton.jit
def _finish(
    acc, m, n, out_ptr, z_ptr, bias_ptr, n_rows, n_columns, EPILOGUE: tl.constexpr
):  # fmt: skip
    """Computes the epilogue of a product, and stores the tile from row m and column n on."""
    offs_m = m + tl.arange(0, acc.shape[0])
    offs_n = n + tl.arange(0, acc.shape[1])
    if EPILOGUE != "none":
        bias = tl.load(bias_ptr + offs_n, mask=offs_n < n_columns, other=0.0)
        acc += bias.to(tl.float32)[None, :]
    if EPILOGUE == "gelu_and_z":
        store_tile(z_ptr, acc, offs_m, offs_n, n_rows, n_columns, n_columns)
    if EPILOGUE != "none":
        acc = gelu(acc, out_ptr.dtype.element_ty)
    store_tile(out_ptr, acc, offs_m, offs_n, n_rows, n_columns, n_columns)


@triton.jit
def _product_kernel(
    a, b, out_ptr, z_ptr, bias_ptr, n_rows, n_columns, n_inner, stride_a, stride_b,
    EPILOGUE: tl.constexpr, MAPPED: tl.constexpr, A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr, K_MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Multiplies a [M, K], or [K, M] if A_TRANSPOSED, and b likewise; out is contiguous."""
    n_row_tiles = tl.cdiv(n_rows, BLOCK_M)
    n_group = GROUP_M * tl.cdiv(n_columns, BLOCK_N)
    first = tl.program_id(0) // n_group * GROUP_M
    group_size = tl.minimum(n_row_tiles - first, GROUP_M)
    within = tl.program_id(0) % n_group
    m = (first + within % group_size) * BLOCK_M
    n = within // group_size * BLOCK_N

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, n_inner, BLOCK_K):
        if A_TRANSPOSED:
            a_tile = tl.trans(
                _operand_tile(
                    a, k, m, n_inner, n_rows, stride_a, MAPPED, K_MASKED, True, BLOCK_K, BLOCK_M
                )
            )
        else:
            a_tile = _operand_tile(
                a, m, k, n_rows, n_inner, stride_a, MAPPED, True, K_MASKED, BLOCK_M, BLOCK_K
            )
        if B_TRANSPOSED:
            b_tile = tl.trans(
                _operand_tile(
                    b, n, k, n_columns, n_inner, stride_b, MAPPED, True, K_MASKED, BLOCK_N, BLOCK_K
                )
            )
        else:
            b_tile = _operand_tile(
                b, k, n, n_inner, n_columns, stride_b, MAPPED, K_MASKED, True, BLOCK_K, BLOCK_N
            )
        acc = add_dot(a_tile, b_tile, acc)

    if EPILOGUE == "none":
        _finish(acc, m, n, out_ptr, z_ptr, bias_ptr, n_rows, n_columns, EPILOGUE)
    else:
        # The epilogue works on halves, which take half the registers in addition to the sums.
        halves = tl.permute(tl.reshape(acc, [BLOCK_M, 2, BLOCK_N // 2]), (0, 2, 1))
        left, right = tl.split(halves)
        _finish(left, m, n, out_ptr, z_ptr, bias_ptr, n_rows, n_columns, EPILOGUE)
        n += BLOCK_N // 2
        _finish(right, m, n, out_ptr, z_ptr, bias_ptr, n_rows, n_columns, EPILOGUE)


# ------------------------------------------------------------------------------- what is launched


@dataclass(frozen=True)
class Operand:
    """Describes how a plan reads a matrix [R, C] of a known layout."""

    copied: bool  # neither dimension is contiguous, or one is expanded
    transposed: bool  # columns are contiguous: the matrix is read as [C, R]
    shape: tuple[int, int]  # the shape that is read
    stride: int  # elements from one row of that shape to the next
    mappable: bool  # TMA can read it

    @classmethod
    def of(cls, x: torch.Tensor) -> Operand:
        """Returns the operand of a matrix with any strides; meta memory counts as aligned."""
        copied = is_expanded(x) or 1 not in x.stride()
        transposed = not copied and x.stride(1) != 1
        (rows, columns), step = x.shape, x.shape[1] if copied else x.stride(0)
        if transposed:
            rows, columns, step = columns, rows, x.stride(1)
        start = 0 if copied or x.device.type == "meta" else x.data_ptr()
        sizes = start, step * x.element_size()
        aligned = x.element_size() == 2 and not any(size % ALIGNMENT for size in sizes)
        return cls(copied, transposed, (rows, columns), step, aligned and step >= columns)

    def read(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the matrix as the kernel reads it, with contiguous rows."""
        if self.copied:
            return x.contiguous()
        return x.t() if self.transposed else x

    def map(self, block: tuple[int, int]) -> Callable[[torch.Tensor], TensorDescriptor]:
        """Returns a function that describes tiles of such a matrix, as it is read."""
        shape, strides = list(self.shape), [self.stride, 1]
        return lambda x: TensorDescriptor(x, shape, strides, list(block))


def configs(call: Call) -> tuple[MatmulConfig, ...]:
    m, n, k = (call.problem[name] for name in "mnk")
    return *_deep_tiles(call, m, n, k), *candidates(call, m, n, k)


def configs_backward(call: Call) -> tuple[MatmulConfig, ...]:
    """Returns tiles for da = dc bᵀ, [m, k] of inner size n. db uses them too."""
    m, n, k = (call.problem[name] for name in "mnk")
    return *_deep_tiles(call, m, k, n), *candidates(call, m, k, n)


def _deep_tiles(call: Call, m: int, n: int, k: int) -> list[MatmulConfig]:
    """Returns the tiles of DEEP with fewer than 2 m rows for a result [m, n] of inner size k.

    The first loads least, which is counted as rounds × (block_m + block_n): programs run in rounds,
    one on each multiprocessor. There are none for many rows, or where TMA cannot read.
    """
    target = call.target
    with_tma = target.kind == "cuda" and target.capability >= TMA_FROM
    if m > FEW_ROWS or call.problem.itemsize != 2 or _is_ragged(call, n, k) or not with_tma:
        return []

    def loaded(config: MatmulConfig) -> int:
        rounds = triton.cdiv(_n_tiles(config, m, n), target.multiprocessors)
        return rounds * (config.block_m + config.block_n)

    low_enough = (config for config in DEEP if config.block_m < 2 * m)
    return sorted((config for config in low_enough if _fits(call, config)), key=loaded)


def candidates(call: Call, m: int, n: int, k: int) -> tuple[MatmulConfig, ...]:
    """Returns the tiles that fit a result [m, n] of inner size k.

    The default comes first. A tile is low enough if it has fewer than 2 m rows. The default is the
    first such tile of CONFIGS that gives every multiprocessor work, else the last. Tiles of few
    rows read b often: if m ≥ HIGH and the default has fewer rows than HIGH, the last low tile of at
    least HIGH rows replaces it, if there is one for every third multiprocessor.
    """
    target = call.target
    most = MOST_SUMS if target.capability >= TMA_FROM else REGISTER_SUMS
    if _is_ragged(call, n, k):
        most = RAGGED_SUMS
    fitting = [
        config
        for config in CONFIGS[call.problem.itemsize]
        if config.block_m * config.block_n <= most * 32 * config.num_warps and _fits(call, config)
    ]
    low_enough = [config for config in fitting if config.block_m < 2 * m] or fitting[-1:]
    filling = [config for config in low_enough if _n_tiles(config, m, n) >= target.multiprocessors]
    default = (filling or low_enough[-1:])[0]
    if default.block_m < HIGH <= m:
        high = [
            config
            for config in low_enough
            if config.block_m >= HIGH and 3 * _n_tiles(config, m, n) >= target.multiprocessors
        ]
        default = (high or [default])[-1]
    return default, *[config for config in fitting if config != default]


def _n_tiles(config: MatmulConfig, m: int, n: int) -> int:
    return triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)


def _is_ragged(call: Call, *sizes: int) -> bool:
    """Returns whether rows of one of these sizes start between multiples of 16 bytes."""
    return any(size * call.problem.itemsize % ALIGNMENT for size in sizes)


def _fits(call: Call, config: MatmulConfig) -> bool:
    """Returns whether the shared memory of a block suffices."""
    target = call.target
    return target.kind != "cuda" or (
        _shared_bytes(config, call.problem.itemsize) <= target.shared_bytes
    )


def _shared_bytes(config: MatmulConfig, itemsize: int) -> int:
    """Counts the bytes of the operands' tiles in flight, or of the result's, and of barriers."""
    tiles = (config.block_m + config.block_n) * config.block_k * config.num_stages
    return itemsize * max(tiles, config.block_m * config.block_n) + 1024


def product(
    call: Call, config: MatmulConfig, a: Operand, b: Operand, epilogue: str = "none"
) -> Bound:
    """Returns the launch of a b. Call it with (a read, b read, out, z or out, bias or out)."""
    k, n = (b.shape[1], b.shape[0]) if b.transposed else b.shape
    m = a.shape[1] if a.transposed else a.shape[0]
    with_tma = call.target.kind == "interpreter" or call.target.capability >= TMA_FROM
    mapped = with_tma and a.mappable and b.mappable
    blocks = (config.block_m, config.block_k), (config.block_k, config.block_n)
    maps = tuple(
        one.map(block[::-1] if one.transposed else block)
        for one, block in zip((a, b), blocks, strict=True)
    )
    return Bound(
        _product_kernel,
        (_n_tiles(config, m, n),),
        m, n, k, a.stride, b.stride,
        maps=maps if mapped else (),
        EPILOGUE=epilogue, MAPPED=mapped, A_TRANSPOSED=a.transposed, B_TRANSPOSED=b.transposed,
        K_MASKED=k % config.block_k != 0, **config.kernel_arguments(),
    )  # fmt: skip


def _multiply(call: Call, a: torch.Tensor, b: torch.Tensor, config: MatmulConfig) -> Callable:
    """Returns a function that multiplies matrices like these."""
    left, right = Operand.of(a), Operand.of(b)
    kernel = product(call, config, left, right)
    m, n = a.shape[0], b.shape[1]

    def launch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = a.new_empty(m, n)
        kernel(left.read(a), right.read(b), c, c, c)
        return c

    return launch


def empty(wanted, inputs):
    a, b = inputs
    return (a.new_empty(a.shape[0], b.shape[1]),), ()


def prepare(call, config, inputs):
    multiply = _multiply(call, *inputs, config)
    return lambda inputs, scalars: ((multiply(*inputs),), ())


def empty_backward(wanted, inputs):
    _gradients, kept, _saved = inputs
    named = zip("ab", kept, strict=True)
    return tuple(x.new_empty(x.shape) if name in wanted else None for name, x in named)


def prepare_backward(call, config, inputs):
    """Prepares da = dc bᵀ and db = aᵀ dc, both with the tiles of the configuration.

    If that is in DEEP, db takes its own default: it has too many rows for a deep tile.
    """
    (dc,), (a, b), _saved = inputs
    m, n, k = (call.problem[name] for name in "mnk")
    config_b = candidates(call, k, n, m)[0] if config in DEEP else config
    da = _multiply(call, dc, b.t(), config) if "a" in call.wanted else None
    db = _multiply(call, a.t(), dc, config_b) if "b" in call.wanted else None

    def launch(inputs, scalars):
        (dc,), (a, b), _saved = inputs
        return da and da(dc, b.t()), db and db(a.t(), dc)

    return launch


FORWARD = Kernel("triton", empty, prepare, configs=configs)
BACKWARD = Kernel("triton", empty_backward, prepare_backward, configs=configs_backward)
