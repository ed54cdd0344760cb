"""Projects keys, and subtracts the mean of some keys of their sample.

    k = x w_kᵀ − c        c = mean(x[rows]) w_kᵀ        rows = (i · n_keys) // 64, i < 64

Only the difference is rounded. For few keys a Triton program owns a tile. It computes c of its
columns together with the product, from the same blocks of w_k, so that centring needs no other
launch. For many keys too many tiles would compute the same c. Then one launch computes −c of every
sample, and cuBLAS adds it to each sample's product.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel, Problem, Reason
from tnp.ops._shared.primitives import add_dot, cast, key_count, nan_outside
from tnp.ops._shared.triton_matmul import MatmulConfig, load_tile, store_tile
from tnp.ops.projection.products import OPTIONS, empty_qkv, launch_of
from tnp.ops.projection.qkv import CENTRE_ROWS

# The tiles by bytes per element, the largest first. `tnp.gates.compile` checks that none spills.
# With 128 rows ptxas 12.8 makes products wait for one another.
CONFIGS = {
    2: (MatmulConfig(64, 128, 64, 4, 3), MatmulConfig(64, 64, 64, 4, 4)),
    4: (MatmulConfig(64, 64, 32, 8, 2),),
}
BUSY = 0.7  # with fewer tiles for each multiprocessor, smaller tiles are faster
# From so many keys on, a call of cuBLAS computes each sample's product. At 10,000 keys of 4
# samples, tiles of Triton take 38 µs more than keys that are not centred (H200).
MANY_KEYS = 4096
MANY_SAMPLES = 16  # the most samples, because each takes a call of cuBLAS
CENTRE_COLUMNS = 64


@triton.jit(do_not_specialize=["n_k"])
def _centred_keys_kernel(
    x_ptr, w_ptr, k_ptr, n_keys_ptr, stride_xb, stride_xl, n_k, width,
    CENTRE_ROWS: tl.constexpr, HAS_N_KEYS: tl.constexpr, K_MASKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes a tile of k [B, n_k, width]. Tiles of the same rows follow one another."""
    n_columns = tl.cdiv(width, BLOCK_N)
    n_rows = tl.cdiv(n_k, BLOCK_M)
    row = tl.program_id(0) // n_columns
    b = row // n_rows
    offs_m = row % n_rows * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(0) % n_columns * BLOCK_N + tl.arange(0, BLOCK_N)
    x_ptr += b.to(tl.int64) * stride_xb
    n_keys = key_count(n_keys_ptr, b, n_k, HAS_N_KEYS)
    some = tl.arange(0, CENTRE_ROWS) * n_keys // CENTRE_ROWS

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    of_some = tl.zeros([CENTRE_ROWS, BLOCK_N], tl.float32)
    for start_k in tl.range(0, width, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        w = tl.trans(load_tile(w_ptr, offs_n, offs_k, width, width, width, True, K_MASKED))
        x = load_tile(x_ptr, offs_m, offs_k, n_k, width, stride_xl, True, K_MASKED)
        acc = add_dot(x, w, acc)
        x = load_tile(x_ptr, some, offs_k, n_k, width, stride_xl, False, K_MASKED)
        of_some = add_dot(x, w, of_some)
    centre = tl.sum(of_some, 0) * (1.0 / CENTRE_ROWS)
    centre = nan_outside(centre, n_keys_ptr, b, n_k, HAS_N_KEYS)
    k_ptr += b.to(tl.int64) * n_k * width
    store_tile(k_ptr, acc - centre[None, :], offs_m, offs_n, n_k, width, width)


@triton.jit(do_not_specialize=["n_k"])
def _centre_kernel(
    x_ptr, w_ptr, minus_ptr, n_keys_ptr, stride_xb, stride_xl, n_k, width,
    CENTRE_ROWS: tl.constexpr, HAS_N_KEYS: tl.constexpr, K_MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Writes −c of some columns of a sample, [B, width] in the dtype of x."""
    n_columns = tl.cdiv(width, BLOCK_N)
    b = tl.program_id(0) // n_columns
    offs_n = tl.program_id(0) % n_columns * BLOCK_N + tl.arange(0, BLOCK_N)
    x_ptr += b.to(tl.int64) * stride_xb
    n_keys = key_count(n_keys_ptr, b, n_k, HAS_N_KEYS)
    some = tl.arange(0, CENTRE_ROWS) * n_keys // CENTRE_ROWS
    of_some = tl.zeros([CENTRE_ROWS, BLOCK_N], tl.float32)
    for start_k in tl.range(0, width, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        w = load_tile(w_ptr, offs_n, offs_k, width, width, width, True, K_MASKED)
        x = load_tile(x_ptr, some, offs_k, n_k, width, stride_xl, False, K_MASKED)
        of_some = add_dot(x, tl.trans(w), of_some)
    minus = tl.sum(of_some, 0) * (-1.0 / CENTRE_ROWS)
    minus = nan_outside(minus, n_keys_ptr, b, n_k, HAS_N_KEYS)
    minus = cast(minus, minus_ptr.dtype.element_ty)
    tl.store(minus_ptr + b * width + offs_n, minus, mask=offs_n < width)


def configs(call: Call) -> tuple[MatmulConfig, ...]:
    """Returns the candidates, the default first: the largest tile that gives enough tiles."""
    problem, found = call.problem, CONFIGS[call.problem.itemsize]

    def serves(config: MatmulConfig) -> bool:
        return problem["batch"] * _tiles(problem, config) >= BUSY * call.target.multiprocessors

    default = next(filter(serves, found), found[-1])
    return default, *(config for config in found if config is not default)


def _tiles(problem: Problem, config: MatmulConfig) -> int:
    rows, columns = problem["n_k"], problem["d_model"]
    return triton.cdiv(rows, config.block_m) * triton.cdiv(columns, config.block_n)


def _read(x: torch.Tensor) -> tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, int]]:
    """Returns x [B, L, D] as kernels read it, and the strides of B and L."""
    if x.stride(2) == 1:
        return lambda x: x, x.stride()[:2]
    return torch.Tensor.contiguous, x.contiguous().stride()[:2]


def prepare_tiles(call: Call, config: MatmulConfig, inputs: tuple) -> Callable:
    """Prepares queries and values by cuBLAS, and keys by one launch of ours."""
    x, _weight, n_keys = inputs
    shape = batch, n_k, width = tuple(call.problem[size] for size in ("batch", "n_k", "d_model"))
    read, strides = _read(x.narrow(1, 0, n_k))
    kernel = Bound(
        _centred_keys_kernel, (batch * _tiles(call.problem, config),), *strides, n_k, width,
        CENTRE_ROWS=CENTRE_ROWS, HAS_N_KEYS=n_keys is not None,
        K_MASKED=width % config.block_k != 0, **config.kernel_arguments(),
    )  # fmt: skip

    def centred(x: torch.Tensor, w_k: torch.Tensor, n_keys: torch.Tensor | None) -> torch.Tensor:
        k = x.new_empty(shape)
        kernel(read(x), w_k, k, x if n_keys is None else n_keys)
        return k

    return launch_of(call, x, centred)


def prepare_samples(call: Call, config: object, inputs: tuple) -> Callable:
    """Prepares queries and values by cuBLAS, −c by one launch, keys by a cuBLAS call a sample."""
    x, _weight, n_keys = inputs
    shape = batch, n_k, width = tuple(call.problem[size] for size in ("batch", "n_k", "d_model"))
    read, strides = _read(x.narrow(1, 0, n_k))
    block_k = CONFIGS[call.problem.itemsize][-1].block_k
    kernel = Bound(
        _centre_kernel, (batch * triton.cdiv(width, CENTRE_COLUMNS),), *strides, n_k, width,
        CENTRE_ROWS=CENTRE_ROWS, HAS_N_KEYS=n_keys is not None, K_MASKED=width % block_k != 0,
        BLOCK_N=CENTRE_COLUMNS, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip

    def centred(x: torch.Tensor, w_k: torch.Tensor, n_keys: torch.Tensor | None) -> torch.Tensor:
        k, minus = x.new_empty(shape), x.new_empty(batch, width)
        kernel(read(x), w_k, minus, x if n_keys is None else n_keys)
        w_t = w_k.t()
        for out, rows, bias in zip(k, x, minus, strict=True):
            torch.addmm(bias, rows, w_t, out=out)
        return k

    return launch_of(call, x, centred)


def _centres(call: Call) -> Reason:
    return None if call.problem["centred"] else "it centres keys, and these are to stay as they are"


def _has_many(call: Call) -> Reason:
    if call.problem["n_k"] < MANY_KEYS or call.problem["batch"] > MANY_SAMPLES:
        return f"it is for {MANY_KEYS} keys or more of {MANY_SAMPLES} samples or fewer"
    return _centres(call)


MANY = Kernel("centred_samples", empty_qkv, prepare_samples, _has_many, options=OPTIONS)
TILES = Kernel("centred_tiles", empty_qkv, prepare_tiles, _centres, configs, options=OPTIONS)
