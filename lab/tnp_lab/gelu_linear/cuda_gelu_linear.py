"""Launches a linear layer with GELU in CUDA C++. Comments of `wmma.cu` explain it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tnp.dispatch.selection import aligned
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.casting import cast_weight
from tnp.ops.products.triton_gelu_linear import empty
from tnp_lab import nvrtc
from tnp_lab.launch import Bound

WMMA = "tnp_lab.gelu_linear.wmma:gelu_linear_wmma"
ROWS, COLUMNS, WARPS = 128, 128, 8  # of a block
PACK = 8  # 16-bit numbers in 16 bytes, the least that the kernel copies


def as_read(x: torch.Tensor) -> torch.Tensor:
    """Returns x, or a zero-padded copy, in contiguous, aligned rows of a multiple of 8 numbers."""
    n_rows, width = x.shape
    if width % PACK == 0 and x.stride(1) == 1 and aligned((x,)):
        return x
    copy = x.new_zeros(n_rows, width + -width % PACK)
    copy[:, :width] = x
    return copy


def _operands(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return as_read(x.reshape(-1, x.shape[-1])), as_read(cast_weight(weight, x.dtype))


def prepare(call: Call, config: object, inputs: tuple) -> Callable:
    """Prepares one launch, with a block for each tile of the result."""
    p, (rows, w) = call.problem, _operands(*inputs[:2])
    n_rows, n_out = p["rows"], p["n_out"]
    constants = nvrtc.constants(TYPE=nvrtc.TYPES[p.dtype], ROWS=ROWS, COLUMNS=COLUMNS, WARPS=WARPS)
    bound = Bound(
        nvrtc.Source(WMMA, constants), call.target.capability,
        (-(-n_rows // ROWS) * -(-n_out // COLUMNS),), WARPS * nvrtc.WARP,
        rows.stride(0), w.stride(0), n_rows, w.shape[1], n_out, int(bool(call.wanted)),
    )  # fmt: skip

    def launch(inputs, scalars):
        x, weight, bias = inputs
        outputs, saved = empty(call.wanted, inputs)
        (y,) = outputs
        z = saved[0] if saved else y  # a pointer that the kernel does not use
        bound(*_operands(x, weight), bias.float().contiguous(), y, z)
        return outputs, saved

    return launch


FORWARD = Kernel("cuda", empty, prepare, saves="z", compiled_for=tuple(nvrtc.ARCHITECTURES))
