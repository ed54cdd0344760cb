"""Computes a linear layer of up to 16 rows: see `tnp.ops._shared.streamed`."""

from collections.abc import Callable

from tnp.dispatch.spec import Call, Kernel, Reason, triton_from
from tnp.ops._shared.casting import cast_weight
from tnp.ops._shared.few_rows import FEW
from tnp.ops._shared.rows import row_layout
from tnp.ops._shared.streamed import Config, Product, bound, config_of
from tnp.ops.projection.products import empty_linear

MOST_WIDTH = 2048  # cuBLAS is as fast for wider products, and faster at 16 rows (H200)
_triton = triton_from(80)


def supported(call: Call) -> Reason:
    p = call.problem
    if p["rows"] > FEW:
        return f"it takes up to {FEW} rows, not {p['rows']}"
    if p["n_in"] > MOST_WIDTH:
        return f"it takes n_in up to {MOST_WIDTH}, not {p['n_in']}"
    if p.itemsize != 2:
        return f"it takes floats of 16 bits, not {p.dtype}"
    return _triton(call)


def _product(call: Call) -> Product:
    p = call.problem
    return Product(p["rows"], p["n_in"], p["n_out"])


def configs(call: Call) -> tuple[Config, ...]:
    return (config_of(_product(call), call.target),)


def prepare(call: Call, config: Config, inputs: tuple) -> Callable:
    x, weight = inputs
    of_x, shape = row_layout(x), (*x.shape[:-1], len(weight))
    multiply = bound(_product(call), config, call.target, of_x)

    def launch(inputs, scalars):
        x, weight = inputs
        weight, y = cast_weight(weight, x.dtype).contiguous(), x.new_empty(shape)
        multiply(of_x.of(x), weight, y)
        return (y,), ()

    return launch


LINEAR = Kernel("few_rows", empty_linear, prepare, supported, configs)
