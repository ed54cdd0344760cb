"""Computes a linear layer with codes for up to 16 rows: see `tnp.ops._shared.streamed`."""

from collections.abc import Callable

import torch

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel, Reason, triton_from
from tnp.ops._shared.few_rows import FEW
from tnp.ops._shared.rows import row_layout
from tnp.ops._shared.streamed import Config, Product, config_of, launch_of, streamed_kernel
from tnp.ops.quantized_linear.definition import OPTIONS
from tnp.ops.quantized_linear.triton_tiles import empty

# A program holds all rows' columns one part after another, and its code grows with their number.
MOST_WIDTH = 32_768
_triton = triton_from(80)


def supported(call: Call) -> Reason:
    p = call.problem
    if p["rows"] > FEW:
        return f"it takes up to {FEW} rows, not {p['rows']}"
    if p["n_in"] > MOST_WIDTH:
        return f"it takes n_in up to {MOST_WIDTH}, not {p['n_in']}"
    return _triton(call)


def _product(call: Call) -> Product:
    p = call.problem
    return Product(
        p["rows"], p["n_in"], p["n_out"], p["bits"], p["group"], zeros=p["zeros"], bias=p["bias"]
    )


def configs(call: Call) -> tuple[Config, ...]:
    return (config_of(_product(call), call.target),)


def prepare(call: Call, config: Config, inputs: tuple) -> Callable:
    x, product = inputs[0], _product(call)
    of_x, shape = row_layout(x), (*x.shape[:-1], product.n_out)
    programs, constants = launch_of(product, config, call.target, constant=False)
    sizes = *of_x.strides, 0, product.n_in, product.n_rows, of_x.n_inner, 1, product.n_out
    kernel = Bound(streamed_kernel, (programs,), *sizes, 0, 0, 0, 0, 0, 0, **constants)

    def launch(inputs, scalars):
        x, weight, scales, zeros, bias = inputs
        x, y = of_x.of(x), x.new_empty(shape)
        zeros = x if zeros is None else zeros.contiguous()
        bias = x if bias is None else bias.contiguous()
        weight = weight.contiguous().view(torch.int8)
        unread = (y, y, x, x, x, x, x, x)
        kernel(x, x, x, x, weight, scales.contiguous(), zeros, bias, x, y, *unread, 1.0)
        return (y,), ()

    return launch


FORWARD = Kernel("few_rows", empty, prepare, supported, configs, options=OPTIONS)
