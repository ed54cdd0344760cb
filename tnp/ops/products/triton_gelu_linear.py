"""Computes gelu(x Wᵀ + b) by one product with bias and gelu in its epilogue, and its gradients.

If a gradient is wanted, z = x Wᵀ + b is saved in x's dtype. The backward pass computes

    dz = dy ∘ gelu'(z)      dx = dz W      dW = dzᵀ x      db = Σ_rows dz

One kernel computes dz, and sums its columns to partial sums in float32. A second launch adds them
up in a fixed order. The two products are PyTorch's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Kernel
from tnp.ops._shared import weight_gradient
from tnp.ops._shared.casting import cast_weight
from tnp.ops._shared.primitives import KernelConfig, cast
from tnp.ops._shared.triton_matmul import load_tile, store_tile
from tnp.ops.products.triton_product import Operand, candidates, gelu_derivative, product

# Programs of the gradient's elementwise kernel on a multiprocessor.
PROGRAMS = 4


@dataclass(frozen=True)
class Config(KernelConfig):
    """Sets the tile of dz with which a program walks down the rows, and prefetched loads."""

    block_m: int
    block_n: int
    stages: int
    num_warps: int


# The candidates, the default first. Only the default was timed (50b4b15).
BACKWARD_CONFIGS = (
    Config(16, 128, 3, 4), Config(32, 128, 1, 4), Config(32, 128, 2, 8), Config(16, 256, 2, 8),
    Config(16, 128, 1, 4),
)  # fmt: skip


@triton.jit(do_not_specialize=["n_rows", "segment"])
def _dgelu_kernel(
    dy_ptr, z_ptr, dz_ptr, partials_ptr, n_rows, n_columns, segment,
    WITH_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes dz of `segment` rows, a multiple of BLOCK_M, and its column sums, contiguous."""
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.program_id(0) * segment
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    end = tl.minimum(begin + segment, n_rows)
    for row in tl.range(begin, end, BLOCK_M, num_stages=STAGES):
        offs_m = row + tl.arange(0, BLOCK_M)
        dy = load_tile(dy_ptr, offs_m, offs_n, n_rows, n_columns, n_columns, True, True)
        z = load_tile(z_ptr, offs_m, offs_n, n_rows, n_columns, n_columns, True, True)
        slope = gelu_derivative(z.to(tl.float32), dz_ptr.dtype.element_ty)
        # dz is rounded first, so that the bias's gradient sums the same numbers as the products.
        dz = cast(dy.to(tl.float32) * slope, dz_ptr.dtype.element_ty)
        store_tile(dz_ptr, dz.to(tl.float32), offs_m, offs_n, n_rows, n_columns, n_columns)
        if WITH_BIAS:
            total += dz.to(tl.float32)
    if WITH_BIAS:
        partial = partials_ptr + tl.program_id(0).to(tl.int64) * n_columns
        tl.store(partial + offs_n, tl.sum(total, 0), mask=offs_n < n_columns)


def configs(call):
    return candidates(call, *(call.problem[name] for name in ("rows", "n_out", "n_in")))


def _cast(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return cast_weight(weight, dtype).contiguous()


def _weight_operand(weight: torch.Tensor, dtype: torch.dtype) -> Operand:
    """Returns the operand Wᵀ. W is contiguous in `dtype`, or is copied."""
    if weight.dtype == dtype and weight.is_contiguous():
        return Operand.of(weight.t())
    return Operand.of(torch.empty(weight.shape, dtype=dtype, device="meta").t())


def empty(wanted, inputs):
    x, weight, _bias = inputs
    shape = (*x.shape[:-1], weight.shape[0])
    return (x.new_empty(shape),), (x.new_empty(shape),) if wanted else ()


def prepare(call, config, inputs):
    x, weight, bias = inputs
    n_in, epilogue = weight.shape[1], "gelu_and_z" if call.wanted else "gelu"
    left, right = Operand.of(x.reshape(-1, n_in)), _weight_operand(weight, x.dtype)
    kernel = product(call, config, left, right, epilogue)

    def launch(inputs, scalars):
        x, weight, bias = inputs
        outputs, saved = empty(call.wanted, inputs)
        (y,), z = outputs, saved[0] if saved else outputs[0]
        w = _cast(weight, x.dtype)
        kernel(left.read(x.reshape(-1, n_in)), w, y, z, bias.contiguous())
        return outputs, saved

    return launch


def empty_backward(wanted, inputs):
    _gradients, kept, _saved = inputs
    named = zip(("x", "weight", "bias"), kept, strict=True)
    return tuple(x.new_empty(x.shape) if name in wanted else None for name, x in named)


def prepare_backward(call, config, inputs):
    (dy,), (x, *_), _saved = inputs
    n_out, rows = dy.shape[-1], dy.numel() // dy.shape[-1]
    columns = triton.cdiv(n_out, config.block_n)
    segments = triton.cdiv(PROGRAMS * call.target.multiprocessors, columns)
    segment = triton.cdiv(triton.cdiv(rows, config.block_m), segments) * config.block_m
    segments = triton.cdiv(rows, segment)
    with_bias = "bias" in call.wanted
    times, dz_t = weight_gradient.product(x), weight_gradient.transposed(rows, n_out)
    kernel = Bound(
        _dgelu_kernel, (segments, columns), rows, n_out, segment,
        WITH_BIAS=with_bias, **config.kernel_arguments(),
    )  # fmt: skip

    def launch(inputs, scalars):
        (dy,), (x, weight, bias), (z,) = inputs
        n_in = weight.shape[1]
        dz = z.new_empty(rows, n_out)
        partials = z.new_empty(segments if with_bias else 0, n_out, dtype=torch.float32)
        kernel(dy.contiguous(), z.contiguous(), dz, partials)
        dx = dweight = dbias = None
        if "x" in call.wanted:
            dx = torch.mm(dz, _cast(weight, x.dtype)).view(x.shape)
        if "weight" in call.wanted:
            dweight = times(dz_t(dz), x.reshape(-1, n_in)).to(weight.dtype)
        if with_bias:
            dbias = partials.sum(0).to(bias.dtype)
        return dx, dweight, dbias

    return launch


FORWARD = Kernel("triton", empty, prepare, configs=configs, saves="z")
BACKWARD = Kernel(
    "triton", empty_backward, prepare_backward, configs=lambda call: BACKWARD_CONFIGS, saves="z"
)
