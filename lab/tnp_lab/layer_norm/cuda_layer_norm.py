"""Launches LayerNorm in CUDA C++. Comments of `one_pass.cu` explain its steps."""

from __future__ import annotations

from collections.abc import Callable

from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.rows import row_layout
from tnp.ops.layer_norm.triton_layer_norm import empty
from tnp_lab import nvrtc
from tnp_lab.cuda_rows import vector
from tnp_lab.launch import Bound
from tnp_lab.softmax.cuda_softmax import shape

ONE_PASS = "tnp_lab.layer_norm.one_pass:layer_norm_one_pass"


def prepare(call: Call, config: object, inputs: tuple) -> Callable:
    """Prepares one launch, with a block for one row or several short ones."""
    p, rows = call.problem, row_layout(inputs[0])
    width, n_rows = p["width"], p["rows"]
    at_once = vector(p.dtype, width, call.aligned)
    sizes = shape(width, at_once)
    constants = nvrtc.constants(TYPE=nvrtc.TYPES[p.dtype], VECTOR=at_once, **sizes)
    bound = Bound(
        nvrtc.Source(ONE_PASS, constants), call.target.capability, (-(-n_rows // sizes["ROWS"]),),
        sizes["THREADS"] * sizes["ROWS"], *rows.strides, rows.n_inner, width, n_rows,
        int(bool(call.wanted)),
    )  # fmt: skip

    def launch(inputs, scalars):
        x, weight, bias = inputs
        (y,), saved = empty(call.wanted, inputs)
        statistics = saved or (y, y)  # pointers that the kernel does not use
        parameters = weight.float().contiguous(), bias.float().contiguous()
        bound(rows.of(x), *parameters, y, *statistics, *scalars)
        return (y,), saved

    return launch


FORWARD = Kernel("cuda", empty, prepare, compiled_for=tuple(nvrtc.ARCHITECTURES))
