"""Computes RMSNorm and a linear layer of up to 16 rows: see `tnp.ops._shared.streamed`."""

from collections.abc import Callable

import torch

from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.casting import cast_weight
from tnp.ops._shared.rows import row_layout
from tnp.ops._shared.streamed import Config, Product, bound, config_of
from tnp.ops.rms_norm_linear import supports_few
from tnp.ops.rms_norm_linear.triton_rms_norm_linear import empty


def _product(call: Call) -> Product:
    p = call.problem
    return Product(
        p["rows"], p["width"], p["n_out"], update=True, norm="rms",
        epilogue="silu" if p["silu"] else "",
    )  # fmt: skip


def configs(call: Call) -> tuple[Config, ...]:
    return (config_of(_product(call), call.target),)


def prepare(call: Call, config: Config, inputs: tuple) -> Callable:
    x, update, _norm_weight, weight = inputs
    of_x, of_update = row_layout(x), row_layout(update)
    shape = (*x.shape[:-1], len(weight))
    multiply = bound(_product(call), config, call.target, of_x, of_update)

    def launch(inputs, scalars):
        x, update, norm_weight, weight = inputs
        total, y = torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(shape)
        weight = cast_weight(weight, x.dtype).contiguous()
        multiply(
            of_x.of(x), weight, y, update=of_update.of(update), total=total,
            norm_weight=norm_weight.contiguous(), eps=scalars[0],
        )  # fmt: skip
        return (total, y), ()

    return launch


FORWARD = Kernel("few_rows", empty, prepare, supports_few, configs, options=("silu",))
