"""Computes cross-entropy in one pass over the logits, and its gradient in another.

    m = max_j x_j    s = log Σ_j e^(x_j − m)    nll = m − x_t + s
    dx_j = (e^(x_j − m − s) − [j = t]) · dloss / n_counted

Every element of a tile keeps its own running maximum and sum, which are combined at the end of a
row. So each logit takes one exponential, and threads exchange nothing before. The backward pass
reads m and s separately, because their sum would lose s if logits are large. All is float32.

A target that is neither a class nor IGNORE makes the loss and its row's gradient NaN. Nothing
outside the logits is read.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Kernel
from tnp.ops._shared.primitives import KernelConfig, cast
from tnp.ops._shared.ranges import asserting, between
from tnp.ops.cross_entropy import IGNORE_INDEX

IGNORE = tl.constexpr(IGNORE_INDEX)
LEAST = tl.constexpr(torch.finfo(torch.float32).min)  # below every logit but −inf
MEAN_BLOCK = 4096
MAX_ROWS = 64  # the most rows of a tile, for few classes


@dataclass(frozen=True)
class Config(KernelConfig):
    """Sets how many logits a program holds at a time, and how many loads are prefetched."""

    elements: int
    num_warps: int
    stages: int

    def tile(self, n_classes: int) -> dict[str, int]:
        """Returns the kernels' tile: whole rows of few classes, or a piece of a row of many."""
        block = min(triton.next_power_of_2(n_classes), self.elements)
        rows = min(self.elements // block, MAX_ROWS)
        return {"ROWS": rows, "BLOCK": block, "STAGES": self.stages, "num_warps": self.num_warps}


# The candidates, the default first. Only the default was timed with the present loop (50b4b15).
CONFIGS = (Config(2048, 8, 4), Config(4096, 16, 3), Config(4096, 8, 3), Config(2048, 4, 4))


@triton.jit
def row_statistics(
    logits_ptr, offs_n, inside, n_classes, stride_n,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Returns m and s of rows `offs_n`, [ROWS] each.

    Each thread has its own maximum, and compares VECTOR logits at a time with it. One by one would
    take twice the instructions.
    """
    VECTOR: tl.constexpr = min(BLOCK, 8)
    highest = tl.full([ROWS, BLOCK // VECTOR], LEAST, tl.float32)
    total = tl.zeros([ROWS, BLOCK // VECTOR], tl.float32)
    base = logits_ptr + offs_n.to(tl.int64)[:, None] * stride_n
    for start in tl.range(0, n_classes, BLOCK, num_stages=STAGES):
        offs = start + tl.arange(0, BLOCK)[None, :]
        mask = inside[:, None] & (offs < n_classes)
        x = tl.load(base + offs, mask=mask, other=float("-inf")).to(tl.float32)
        x = tl.reshape(x, [ROWS, BLOCK // VECTOR, VECTOR])
        above = tl.maximum(highest, tl.max(x, 2))
        total = total * tl.exp(highest - above) + tl.sum(tl.exp(x - above[:, :, None]), 2)
        highest = above
    m = tl.max(highest, 1)
    s = tl.log(tl.sum(total * tl.exp(highest - m[:, None]), 1))
    return m, s


@triton.jit
def target_logit(logits_ptr, offs_n, target, inside, n_classes, stride_n):
    """Returns the logit of each row's target, or NaN if the target is no class."""
    is_class = inside & (target >= 0) & (target < n_classes)
    ptrs = logits_ptr + offs_n.to(tl.int64) * stride_n + target
    return tl.load(ptrs, mask=is_class, other=float("nan")).to(tl.float32)


@triton.jit
def of_class(s, x_t, target):
    """Returns s, or NaN in rows whose target is no class, so that their gradient is NaN too."""
    return tl.where((x_t == x_t) | (target == IGNORE), s, float("nan"))


@triton.jit
def gradient(x, m, s, target, offs):
    """Returns softmax − onehot, and 0 in rows whose target is ignored."""
    p = tl.exp(x - m[:, None] - s[:, None])
    g = tl.where(offs == target[:, None], p - 1.0, p)
    return tl.where((target == IGNORE)[:, None], 0.0, g)


@triton.jit(do_not_specialize=["n_rows", "stride_t"])
def _cross_entropy_fwd_kernel(
    logits_ptr, target_ptr, nll_ptr, m_ptr, s_ptr, n_rows, n_classes, stride_n, stride_t,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = offs_n < n_rows
    target = tl.load(target_ptr + offs_n.to(tl.int64) * stride_t, mask=inside, other=IGNORE)
    x_t = target_logit(logits_ptr, offs_n, target, inside, n_classes, stride_n)
    m, s = row_statistics(logits_ptr, offs_n, inside, n_classes, stride_n, ROWS, BLOCK, STAGES)
    s = of_class(s, x_t, target)
    nll = tl.where(target == IGNORE, 0.0, m - x_t + s)
    tl.store(nll_ptr + offs_n, nll, mask=inside)
    tl.store(m_ptr + offs_n, m, mask=inside)
    tl.store(s_ptr + offs_n, s, mask=inside)


@triton.jit(do_not_specialize=["n_rows", "stride_t"])
def _cross_entropy_bwd_kernel(
    dloss_ptr, logits_ptr, target_ptr, m_ptr, s_ptr, per_target_ptr, dlogits_ptr,
    n_rows, n_classes, stride_n, stride_t, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offs_n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = offs_n < n_rows
    mask = inside[:, None] & (offs < n_classes)
    target = tl.load(target_ptr + offs_n.to(tl.int64) * stride_t, mask=inside, other=IGNORE)
    m = tl.load(m_ptr + offs_n, mask=inside, other=0.0)
    s = tl.load(s_ptr + offs_n, mask=inside, other=0.0)
    ptrs = logits_ptr + offs_n.to(tl.int64)[:, None] * stride_n + offs
    x = tl.load(ptrs, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(dloss_ptr).to(tl.float32) * tl.load(per_target_ptr)
    dx = gradient(x, m, s, target, offs) * scale
    ptrs = dlogits_ptr + offs_n.to(tl.int64)[:, None] * n_classes + offs
    tl.store(ptrs, cast(dx, dlogits_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["n_rows", "stride_t"])
def _mean_kernel(
    nll_ptr, target_ptr, loss_ptr, per_target_ptr, n_rows, stride_t, BLOCK: tl.constexpr
):
    """Writes in one program the mean over targets that count, and 1 / their number, or 1."""
    total = tl.zeros([BLOCK], tl.float32)
    counted = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, n_rows, BLOCK):
        offs_n = start + tl.arange(0, BLOCK)
        inside = offs_n < n_rows
        total += tl.load(nll_ptr + offs_n, mask=inside, other=0.0)
        target = tl.load(target_ptr + offs_n.to(tl.int64) * stride_t, mask=inside, other=IGNORE)
        counted += (target != IGNORE).to(tl.int32)
    n_counted = tl.sum(counted, 0)
    tl.store(loss_ptr, tl.sum(total, 0) / n_counted.to(tl.float32))
    tl.store(per_target_ptr, 1.0 / tl.maximum(n_counted, 1).to(tl.float32))


def with_classes(launch: Callable, n_classes: int) -> Callable:
    """Returns a launch that with TNP_CHECK=1 asserts that targets, its last input, are valid."""

    def conditions(inputs):
        target = inputs[-1]
        counted = torch.where(target == IGNORE_INDEX, 0, target)
        return [between("target", counted, 0, n_classes - 1)]

    return asserting(launch, conditions)


def mean(n_rows: int, stride_t: int) -> Bound:
    """Returns the launch of the mean.

    Call it with nll [n_rows], target, and the scalars loss and 1 / n_counted, both float32.
    """
    return Bound(_mean_kernel, (1,), n_rows, stride_t, BLOCK=MEAN_BLOCK, num_warps=8)


def with_whole_rows(logits):
    """Returns logits, or a copy whose rows are contiguous."""
    return logits if logits.stride(-1) == 1 else logits.contiguous()


def _grid(call, tile) -> tuple[int, int]:
    n, v = call.problem["rows"], call.problem["classes"]
    return triton.cdiv(n, tile["ROWS"]), triton.cdiv(v, tile["BLOCK"])


def empty(wanted, inputs):
    logits, _target = inputs
    loss, per_target = (logits.new_empty((), dtype=torch.float32) for _ in range(2))
    m, s = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    return (loss,), (m, s, per_target)


def prepare(call, config, inputs):
    n, v = call.problem["rows"], call.problem["classes"]
    stride_n, stride_t = with_whole_rows(inputs[0]).stride(0), inputs[1].stride(0)
    tile = config.tile(v)
    kernel = Bound(
        _cross_entropy_fwd_kernel, _grid(call, tile)[:1], n, v, stride_n, stride_t, **tile
    )
    average = mean(n, stride_t)

    def launch(inputs, scalars):
        logits, target = inputs
        (loss,), (m, s, per_target) = empty(call.wanted, inputs)
        nll = torch.empty_like(m)
        kernel(with_whole_rows(logits), target, nll, m, s)
        average(nll, target, loss, per_target)
        return (loss,), (m, s, per_target)

    return with_classes(launch, v)


def empty_backward(wanted, inputs):
    _, (logits, _target), _ = inputs
    return (logits.new_empty(logits.shape),)


def prepare_backward(call, config, inputs):
    _, (logits, target), _ = inputs
    n, v = call.problem["rows"], call.problem["classes"]
    tile = config.tile(v)
    del tile["STAGES"]
    strides = with_whole_rows(logits).stride(0), target.stride(0)
    kernel = Bound(_cross_entropy_bwd_kernel, _grid(call, tile), n, v, *strides, **tile)

    def launch(inputs, scalars):
        (dloss,), (logits, target), (m, s, per_target) = inputs
        (dlogits,) = empty_backward(call.wanted, inputs)
        kernel(dloss, with_whole_rows(logits), target, m, s, per_target, dlogits)
        return (dlogits,)

    return launch


FORWARD = Kernel("triton", empty, prepare, configs=lambda call: CONFIGS)
BACKWARD = Kernel("triton", empty_backward, prepare_backward, configs=lambda call: CONFIGS)
