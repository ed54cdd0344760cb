"""Computes a linear layer with codes for up to 16 rows: see `tnp.ops._shared.streamed`."""

from collections.abc import Callable

import torch

from tnp.dispatch.spec import Call, Kernel, Reason, triton_from
from tnp.ops._shared.few_rows import FEW
from tnp.ops._shared.rows import row_layout
from tnp.ops._shared.streamed import MOST_WIDTH, Config, Product, bound, config_of
from tnp.ops.quantized_linear.definition import OPTIONS
from tnp.ops.quantized_linear.triton_tiles import empty

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
    multiply = bound(product, config, call.target, of_x)

    def launch(inputs, scalars):
        x, weight, scales, zeros, bias = inputs
        x, y = of_x.of(x), x.new_empty(shape)
        multiply(
            x, weight.contiguous().view(torch.int8), y, scales=scales.contiguous(),
            zeros=None if zeros is None else zeros.contiguous(),
            bias=None if bias is None else bias.contiguous(),
        )  # fmt: skip
        return (y,), ()

    return launch


FORWARD = Kernel("few_rows", empty, prepare, supported, configs, options=OPTIONS)
