"""Computes silu(gate) ∘ rms_norm(x) by our kernels of both operators, one after the other.

    normalized = rms_norm(x)    y = silu(gate) ∘ normalized

`normalized` is written to memory and read again, which the fused kernel saves: it moves three
tensors [rows, width] where these two move five. Each kernel has its default configuration.
"""

from tnp.dispatch.spec import Kernel
from tnp.ops.rms_norm import triton_rms_norm
from tnp.ops.rms_norm_swiglu.triton_rms_norm_swiglu import empty
from tnp.ops.swiglu import triton_swiglu


def prepare(call, config, inputs):
    x, gate, weight = inputs
    norm = triton_rms_norm.FORWARD
    if norm.refuses(call) is not None:
        norm = triton_rms_norm.WIDE_FORWARD
    # The call has the sizes that both operators have, rows and width.
    normalize = norm.prepare(call, norm.configs(call)[0], (x, weight))
    gated = triton_swiglu.FORWARD
    both = gate, x.new_empty(x.shape)
    multiply = gated.prepare(call, gated.configs(call)[0], both)

    def launch(inputs, scalars):
        x, gate, weight = inputs
        (normalized,), _ = normalize((x, weight), scalars)
        return multiply((gate, normalized), ())

    return launch


FORWARD = Kernel("two_kernels", empty, prepare)
