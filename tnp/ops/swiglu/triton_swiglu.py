"""silu(gate) ∘ up in one pass over memory, and both gradients in another, in float32 inside."""

from dataclasses import dataclass

import triton
import triton.language as tl

from tnp.contract import Kernel
from tnp.launch import Bound
from tnp.ops.primitives import KernelConfig, cast


@dataclass(frozen=True)
class Config(KernelConfig):
    """Elements a program takes."""

    block: int
    num_warps: int


CONFIGS = (Config(1024, 4), Config(4096, 8))


@triton.jit
def _swiglu_fwd_kernel(gate_ptr, up_ptr, y_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    tl.store(y_ptr + offs, cast(y, y_ptr.dtype.element_ty), mask=offs < n)


@triton.jit
def _swiglu_bwd_kernel(dy_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n, BLOCK: tl.constexpr):
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dy = tl.load(dy_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + offs, mask=offs < n, other=0.0).to(tl.float32)
    s = tl.sigmoid(gate)
    dgate = dy * up * (s + gate * s * (1.0 - s))
    tl.store(dgate_ptr + offs, cast(dgate, dgate_ptr.dtype.element_ty), mask=offs < n)
    tl.store(dup_ptr + offs, cast(dy * gate * s, dup_ptr.dtype.element_ty), mask=offs < n)


def configs(call):
    return CONFIGS


def empty(wanted, inputs):
    gate, _up = inputs
    return (gate.new_empty(gate.shape),), ()


def prepare(call, config, inputs):
    n = inputs[0].numel()
    kernel = Bound(
        _swiglu_fwd_kernel, (triton.cdiv(n, config.block),), n, **config.kernel_arguments()
    )

    def launch(inputs, scalars):
        gate, up = inputs
        y = gate.new_empty(gate.shape)
        kernel(gate.contiguous(), up.contiguous(), y)
        return (y,), ()

    return launch


def empty_backward(wanted, inputs):
    _gradients, kept, _saved = inputs
    named = zip(("gate", "up"), kept, strict=True)
    return tuple(x.new_empty(x.shape) if name in wanted else None for name, x in named)


def prepare_backward(call, config, inputs):
    n = inputs[1][0].numel()
    kernel = Bound(
        _swiglu_bwd_kernel, (triton.cdiv(n, config.block),), n, **config.kernel_arguments()
    )
    wants_gate, wants_up = "gate" in call.wanted, "up" in call.wanted

    def launch(inputs, scalars):
        (dy,), (gate, up), _saved = inputs
        dgate, dup = gate.new_empty(gate.shape), up.new_empty(up.shape)
        kernel(dy.contiguous(), gate.contiguous(), up.contiguous(), dgate, dup)
        return dgate if wants_gate else None, dup if wants_up else None

    return launch


FORWARD = Kernel("triton", empty, prepare, configs=configs)
BACKWARD = Kernel("triton", empty_backward, prepare_backward, configs=configs)
