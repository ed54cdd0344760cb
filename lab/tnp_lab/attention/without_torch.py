"""Computes attention of NumPy arrays on a GPU with `wmma.cu`, without PyTorch.

`python -m tnp_lab.attention.without_torch` compares it with float64.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np

from tnp.dispatch.spec import Reason
from tnp.util.cli import end_with
from tnp_lab import nvrtc

WARPS, QUERIES_A_WARP = 4, 16


class Prepared(NamedTuple):
    """Holds a launch of `wmma.cu`. Its arguments are q, k, v, o and lse, then `numbers`."""

    source: nvrtc.Source
    grid: tuple[int]
    threads: int
    numbers: tuple[int | ctypes.c_float, ...]


def prepare(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> Prepared:
    """Prepares a launch; see `attention`. o has q's strides, and lse is [B, H, n_q]."""
    are_packed = all(
        x.ndim == 4 and x.size and x.dtype == np.float16 and x.flags.c_contiguous for x in (q, k, v)
    )
    if not (
        are_packed
        and k.shape == v.shape == (q.shape[0], *k.shape[1:3], q.shape[3])
        and q.shape[1] % k.shape[1] == 0
        and q.shape[3] in (64, 128)
    ):
        described = ", ".join(f"{x.dtype}{list(x.shape)}" for x in (q, k, v))
        raise ValueError(
            f"q, k and v are {described}: they must be contiguous float16 [B, H, n_q, D], "
            "[B, H_kv, n_k, D] and [B, H_kv, n_k, D], with D = 64 or 128, where H_kv divides H, "
            "and none may be empty"
        )
    batch, n_heads, n_q, head_dim = q.shape
    n_kv_heads, n_k = k.shape[1:3]
    n_tiles = -(-n_q // (WARPS * QUERIES_A_WARP))
    constants = nvrtc.constants(TYPE=nvrtc.TYPES["float16"], HEAD_DIM=head_dim, WARPS=WARPS)
    strides = [stride // x.itemsize for x in (q, k, v, q) for stride in x.strides[:3]]
    sizes = n_heads, n_heads // n_kv_heads, n_q, n_k, n_tiles, int(causal)
    scale_log2 = ctypes.c_float(head_dim**-0.5 * np.log2(np.e))
    return Prepared(
        nvrtc.Source("tnp_lab.attention.wmma:attention_wmma", constants),
        (n_tiles * batch * n_heads,),
        WARPS * nvrtc.WARP,
        (*strides, *sizes, scale_log2),
    )


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, *, causal: bool = False) -> np.ndarray:
    """Returns attention with scale 1/√D.

    Args:
        q: [B, H, n_q, D] in float16, contiguous, with D = 64 or 128.
        k, v: [B, H_kv, n_k, D] in float16, contiguous. H_kv divides H.
        causal: whether later keys are masked. The last query is aligned with the last key. A query
            without a key gives 0.

    Returns:
        [B, H, n_q, D] in float16.

    Raises:
        ValueError: a dtype or shape does not fit.
        RuntimeError: a GPU, its driver or a package is missing.
    """
    if reason := missing():
        raise RuntimeError(reason)
    from cuda.bindings import driver
    from cuda.core import Device, LaunchConfig, ObjectCode, launch

    prepared = prepare(q, k, v, causal)
    device = Device()
    major, minor = device.compute_capability
    capability = 10 * major + minor
    architecture = nvrtc.ARCHITECTURES.get(capability, f"sm_{capability}")
    code = ObjectCode.from_cubin(nvrtc.cached(prepared.source, architecture))
    o, lse = np.empty_like(q), np.empty(q.shape[:3], np.float32)
    stream = device.default_stream
    there = [device.allocate(x.nbytes, stream=stream) for x in (q, k, v, o, lse)]
    pointers = [int(buffer.handle) for buffer in there]
    for x, pointer in zip((q, k, v), pointers[:3], strict=True):
        _require_success(driver.cuMemcpyHtoD(pointer, x.ctypes.data, x.nbytes))
    config = LaunchConfig(grid=prepared.grid, block=prepared.threads)
    kernel = code.get_kernel(prepared.source.name)
    launch(stream, config, kernel, *pointers, *prepared.numbers)
    _require_success(driver.cuMemcpyDtoH(o.ctypes.data, pointers[3], o.nbytes))
    return o


def _require_success(result: tuple) -> None:
    if int(result[0]):
        raise RuntimeError(f"CUDA's driver answered {result[0]}")


def error(o: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> float:
    """Returns o's largest difference from float64, over what it may be.

    Weights and results are rounded to 11 bits each, and results average values.
    """
    difference = np.abs(o - in_float64(q, k, v, causal)).max()
    return float(difference) / (2**-10 * float(np.abs(v).max()))


def in_float64(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    """Returns attention in float64, by the formula."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    k, v = (x.repeat(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.swapaxes(2, 3) * q.shape[3] ** -0.5
    if causal:
        seen = np.tril(np.ones(scores.shape[2:], bool), scores.shape[3] - scores.shape[2])
        scores = np.where(seen, scores, -np.inf)
    largest = scores.max(3, keepdims=True)
    weights = np.exp(scores - np.where(largest == -np.inf, 0, largest))
    return weights / np.maximum(weights.sum(3, keepdims=True), 1) @ v


def missing() -> Reason:
    """Returns what is missing to compile or to launch, or None. It makes the GPU current."""
    if reason := nvrtc.missing():
        return reason
    from cuda.core import Device

    try:
        Device().set_current()
    except Exception as failure:  # without a driver it is another one than without a GPU
        return f"no NVIDIA GPU is here: {failure}"
    return None


def main() -> int:
    if reason := missing():
        print(reason)
        return 1
    draw = np.random.default_rng(0).standard_normal
    errors = []
    for n_q, n_k, head_dim, causal in [(300, 300, 64, True), (70, 101, 128, False)]:
        sizes = (8, n_q), (4, n_k), (4, n_k)
        q, k, v = (draw((2, *size, head_dim)).astype(np.float16) for size in sizes)
        errors.append(error(attention(q, k, v, causal=causal), q, k, v, causal))
    print("differences from float64, over what they may be:", *(f"{x:.2f}" for x in errors))
    return int(not all(x <= 1 for x in errors))


if __name__ == "__main__":
    end_with(main)
