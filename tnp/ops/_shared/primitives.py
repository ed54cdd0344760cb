"""Shares code between all Triton kernels: rounding, matmuls, launch configurations."""

from dataclasses import asdict, dataclass

import triton
import triton.language as tl

# Triton's interpreter (3.6 to 3.9) computes bfloat16 dots wrongly and truncates where a GPU rounds:
# `dot` upcasts there, and `cast` rounds first. It also takes e4m3's code of NaN for a number.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

# Three TF32 products replace a float32 product: they have float32's accuracy on the tensor cores.
# The exact product ("ieee") runs on the FMA units. There the compiler keeps whole tiles in a
# thread, and spills.
FLOAT32_PRECISION = tl.constexpr("tf32x3")

# The largest number of e4m3, and the number that its code of NaN would be.
E4M3_MAX = tl.constexpr(448.0)
E4M3_NAN = tl.constexpr(480.0)


@dataclass(frozen=True)
class KernelConfig:
    """Sets how a kernel is launched: sizes of tiles, warps, stages of the software pipeline."""

    def kernel_arguments(self) -> dict[str, int]:
        """Returns the sizes by their names in kernels, which are in capitals."""
        options = ("num_warps", "num_stages")
        fields = asdict(self).items()
        return {name if name in options else name.upper(): value for name, value in fields}


@triton.jit
def cast(x, dtype: tl.constexpr):
    """Returns float32 x in `dtype`, rounded to nearest; e4m3 clamps to its largest number."""
    if INTERPRETED and dtype == tl.bfloat16:
        # Dekker's split: the upper 8 bits of the significand, rounded; the cast is then exact.
        shifted = x * 65537.0
        x = shifted - (shifted - x)
    if INTERPRETED and dtype == tl.float8e4nv:
        # Added to 1.5 · 2^20 times its own power of two, a number keeps 4 bits of its significand.
        power = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        clamped = tl.minimum(tl.maximum(x, -E4M3_MAX), E4M3_MAX)
        shift = tl.minimum(tl.maximum(power, 2.0**-6), 256.0) * (1.5 * 2.0**20)
        x = tl.where(x == x, (clamped + shift) - shift, E4M3_NAN)
    return x.to(dtype)


@triton.jit
def exponent(largest, LEAST: tl.constexpr):
    """Returns the smallest e from LEAST on with largest ≤ 448 · 2^e, for float32 largest ≥ 0."""
    # 448 = 1.75 · 2^8: a significand above 1.75 carries into the exponent.
    bits = largest.to(tl.int32, bitcast=True) + 0x1FFFFF
    return tl.maximum((bits >> 23) - (127 + 8), LEAST)


@triton.jit
def power(e):
    """Returns 2^e in float32, exactly, for an int32 between −126 and 127."""
    return ((e + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def inverse(largest, e):
    """Returns 2^−e, or NaN where the largest element is not finite."""
    return tl.where(largest < float("inf"), power(-e), float("nan"))


@triton.jit
def widened(x):
    """Returns operand x of a product in float32 in the interpreter, and else unchanged."""
    wide = x.to(tl.float32)
    if x.dtype == tl.float8e4nv:
        wide = tl.where(tl.abs(wide) == E4M3_NAN, float("nan"), wide)
    return wide


@triton.jit
def dot(a, b, PRECISION: tl.constexpr = FLOAT32_PRECISION):
    """Multiplies a @ b in float32 sums, with float32's full accuracy for float32 operands."""
    if INTERPRETED:
        return tl.dot(widened(a), widened(b), input_precision=PRECISION)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def add_dot(a, b, acc, PRECISION: tl.constexpr = FLOAT32_PRECISION):
    """Adds a @ b to the accumulator."""
    if INTERPRETED:
        return tl.dot(widened(a), widened(b), acc, input_precision=PRECISION)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def key_count(n_keys_ptr, b, n_k, HAS_N_KEYS: tl.constexpr):
    """Returns how many keys sample b has: all n_k, or n_keys[b] clamped to 0 … n_k."""
    if HAS_N_KEYS:
        return tl.minimum(tl.maximum(tl.load(n_keys_ptr + b), 1), n_k)
    return n_k


@triton.jit
def nan_outside(x, n_keys_ptr, b, n_k, COUNTED: tl.constexpr):
    """Returns x, or NaN if sample b's n_keys lie outside 1 … n_k, which `key_count` clamps."""
    if COUNTED:
        n_keys = tl.load(n_keys_ptr + b)
        x = tl.where((n_keys >= 1) & (n_keys <= n_k), x, float("nan"))
    return x
