"""Computes the loss of a linear layer's logits, and its gradients, for a chunk of rows at a time.

    X_c Wᵀ → L    L → G = softmax(L) − onehot, in L's place    dX_c = G W    dW += Gᵀ X_c

V is padded with classes of weight 0 to a multiple of 128 bytes in x's dtype, which copies the
weight. cuBLAS multiplies. A kernel between the products finds a row's maximum and sum in one pass,
and writes its loss. In a second pass it replaces the logits by the gradient. So the extra memory is
one chunk of logits, and no product is computed twice. With chunks of the vocabulary, dW could be
summed in float32. But they need every row's sum first, which costs the first product again: a
quarter of all work.

Chunks cost accuracy of dW in 16 bits. cuBLAS accumulates in float32, but dW is rounded to its own
dtype once a chunk. A float32 accumulator would take twice dW's memory, as much as two chunks. In
float32 nothing is lost.

The backward pass multiplies by dloss / n_counted. G, dX and dW are not divided by n before, because
most numbers would be 0 in float16. dW is multiplied by 2^−k with 2^k ≈ √n. So large sums over many
rows stay in float16's range, and small ones do not become subnormal.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch.nn.functional import pad

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Kernel
from tnp.ops._shared.losses import scaling
from tnp.ops._shared.primitives import cast
from tnp.ops.cross_entropy.triton_cross_entropy import (
    IGNORE,
    Config,
    gradient,
    mean,
    of_class,
    row_statistics,
    target_logit,
    with_classes,
)

# Rows of logits are a multiple of this. On an H200 the three products reach 656 TFLOP/s at 128,256
# classes. At 50,257 they reached 135 with rows at such multiples but an odd width of the products.
ROW_BYTES = 128


@dataclass(frozen=True)
class ChunkConfig(Config):
    """Sets what cross-entropy's configuration sets, and also the size of a chunk of logits, and a
    number that divides its rows.

    A multiple of 4 keeps every chunk's targets and losses aligned to 16 bytes.
    """

    chunk_bytes: int
    multiple: int

    def rows(self, n_rows: int, row_bytes: int) -> int:
        """Returns the rows of a chunk. Chunks are nearly equal, and the last one may be smaller."""
        most = max(self.chunk_bytes // row_bytes // self.multiple, 1) * self.multiple
        equal = triton.cdiv(n_rows, triton.cdiv(n_rows, most))
        return triton.cdiv(equal, self.multiple) * self.multiple


# The candidates, the default first. 1 GiB holds 4,096 rows of 128,256 classes in 16 bits. Only the
# default was timed (5ef1969).
CONFIGS = (ChunkConfig(4096, 16, 3, 2**30, 128), ChunkConfig(4096, 16, 3, 2**29, 128))
# These are small, so that the interpreter runs several chunks.
INTERPRETED = (ChunkConfig(256, 4, 1, 2**12, 4),)


@triton.jit(do_not_specialize=["n_rows", "stride_t"])
def _softmax_gradient_kernel(
    logits_ptr, target_ptr, nll_ptr, n_rows, n_classes, stride_n, stride_t,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, WITH_GRADIENT: tl.constexpr,
):  # fmt: skip
    """Writes the loss of each row, and replaces its logits by their gradient."""
    offs_n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = offs_n < n_rows
    target = tl.load(target_ptr + offs_n.to(tl.int64) * stride_t, mask=inside, other=IGNORE)
    x_t = target_logit(logits_ptr, offs_n, target, inside, n_classes, stride_n)
    m, s = row_statistics(logits_ptr, offs_n, inside, n_classes, stride_n, ROWS, BLOCK, STAGES)
    s = of_class(s, x_t, target)
    tl.store(nll_ptr + offs_n, tl.where(target == IGNORE, 0.0, m - x_t + s), mask=inside)
    if WITH_GRADIENT:
        tl.debug_barrier()  # every thread has read x_t before another writes there
        base = logits_ptr + offs_n.to(tl.int64)[:, None] * stride_n
        for start in tl.range(0, n_classes, BLOCK, num_stages=STAGES):
            offs = start + tl.arange(0, BLOCK)[None, :]
            mask = inside[:, None] & (offs < n_classes)
            x = tl.load(base + offs, mask=mask, other=0.0).to(tl.float32)
            g = gradient(x, m, s, target, offs)
            tl.store(base + offs, cast(g, logits_ptr.dtype.element_ty), mask=mask)


def configs(call):
    return INTERPRETED if call.target.kind == "interpreter" else CONFIGS


def empty(wanted, inputs):
    x, weight, _target = inputs
    loss, per_target = (x.new_empty((), dtype=torch.float32) for _ in range(2))
    dx = x.new_empty(x.shape if "x" in wanted else 0)
    dweight = x.new_empty(weight.shape if "weight" in wanted else 0)
    return (loss,), (dx, dweight, per_target)


def _kept_scale(n_rows: int) -> float:
    """Returns the scale of the saved dW: about 1 / √n, a power of two, to round nothing."""
    return 2.0 ** -round(math.log2(n_rows) / 2)


def prepare(call, config, inputs):
    n, v = call.problem["rows"], call.problem["classes"]
    itemsize = call.problem.itemsize
    width = triton.cdiv(v * itemsize, ROW_BYTES) * ROW_BYTES // itemsize
    rows = config.rows(n, width * itemsize)
    n_added = width - v
    starts = range(0, n, rows)
    stride_t, tile = inputs[2].stride(0), config.tile(v)
    kernels = {
        size: Bound(
            _softmax_gradient_kernel, (triton.cdiv(size, tile["ROWS"]),), size, v, width, stride_t,
            WITH_GRADIENT=bool(call.wanted), **tile,
        )
        for size in (min(rows, n), n - starts[-1])
    }  # fmt: skip
    average, scale = mean(n, stride_t), _kept_scale(n)

    def launch(inputs, scalars):
        x, weight, target = inputs
        if n_added:
            weight = pad(weight, (0, 0, 0, n_added))
        (loss,), (dx, dweight, per_target) = empty(call.wanted, (x, weight, target))
        buffer = x.new_empty(min(rows, n), width)
        nll = x.new_empty(n, dtype=torch.float32)
        for start in starts:
            x_c, target_c, nll_c = (t[start : start + rows] for t in (x, target, nll))
            logits = buffer[: len(x_c)]
            torch.mm(x_c, weight.T, out=logits)
            kernels[len(x_c)](logits, target_c, nll_c)
            if "x" in call.wanted:
                torch.mm(logits, weight, out=dx[start : start + rows])
            if "weight" in call.wanted:
                dweight.addmm_(logits.T, x_c, beta=float(start > 0), alpha=scale)
        average(nll, target, loss, per_target)
        return (loss,), (dx, dweight[:v], per_target)

    return with_classes(launch, v)


def empty_backward(wanted, inputs):
    _, _, (dx, dweight, _per_target) = inputs
    named = (("x", dx), ("weight", dweight))
    return tuple(x.new_empty(x.shape) if name in wanted else None for name, x in named)


def prepare_backward(call, config, inputs):
    _, _, (dx, dweight, _per_target) = inputs
    factors = 1.0, 1.0 / _kept_scale(call.problem["rows"])
    named = zip(("x", "weight"), (dx, dweight), factors, strict=True)
    kernels = [
        (scaling(x.numel(), with_per_target=True), factor) if name in call.wanted else None
        for name, x, factor in named
    ]

    def launch(inputs, scalars):
        (dloss,), _, (*saved, per_target) = inputs
        results = empty_backward(call.wanted, inputs)
        for kernel, kept, result in zip(kernels, saved, results, strict=True):
            if kernel is not None:
                scale, factor = kernel
                scale(kept, dloss, per_target, result, factor)
        return results

    return launch


FORWARD = Kernel("chunks", empty, prepare, configs=configs)
BACKWARD = Kernel("scale", empty_backward, prepare_backward)
