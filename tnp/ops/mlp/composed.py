"""Computes the feed-forward layer for many rows: SiLU in the epilogue of our matmuls, the rest by
cuBLAS.

    forward     z = x upᵀ         h = silu(z)                   y = h downᵀ
    backward    dz = (dy down) ∘ silu'(z)                       dx = dz up
                dup = dzᵀ x       ddown = dyᵀ h

x, y [T, D], up [F, D], down [D, F], z and h [T, F]. The first matmul writes the hidden rows once,
and SiLU reads nothing from memory. That matmul is in portable Triton, or written for Hopper and the
model's width. Gradients of the weights are accumulated in float32.

Kernels of the forward pass differ in the saved tensors, and a backward kernel reads the form of its
own matmul. They save h and z ("z"), or h and silu'(z) in the order of a matmul's registers
("slope"), both for up to `SAVED_ROWS` rows. Or they save nothing ("again"), and z is computed
again.
"""

from dataclasses import replace
from functools import partial
from types import ModuleType

import torch
import torch.nn.functional as F

from tnp.dispatch.spec import Call, Kernel, Reason, Support, anywhere
from tnp.ops._shared import hopper_matmul, hopper_silu, triton_matmul
from tnp.ops._shared.operands import (
    Rows,
    hidden_width,
    of_down,
    of_up,
    rows_of,
    saves_rows,
    weights,
)
from tnp.ops._shared.weight_gradient import add_product, product, transposed
from tnp.ops.mlp import SAVED_ROWS

CHUNK_ROWS = 32_768
NAMES = ("x", "up", "down")


def _chunks(rows: Rows) -> list[tuple[int, int]]:
    """Returns (first row, number of rows) of each chunk."""
    return [(start, min(CHUNK_ROWS, rows.n - start)) for start in range(0, rows.n, CHUNK_ROWS)]


# ------------------------------------------------------------------------------- forward


def empty(wanted, inputs, *, products: ModuleType):
    x, up, _down = inputs
    shape = x.numel() // x.shape[-1], hidden_width(up.shape[0])
    return (x.new_empty(x.shape),), (x.new_empty(shape), products.new_saved(x, shape, x.dtype))


def prepare(call: Call, config, inputs, *, products: ModuleType):
    """Prepares the forward pass that saves h, and z or its slope."""
    x, up, down = inputs
    shape, flat, dtype = x.shape, x.dim() == 2, x.dtype
    rows, cast = _read(x, products), weights(up, down, dtype, tma=products is hopper_silu)
    width = hidden_width(up.shape[0])
    silu, read = products.matmul_silu(call.target, rows, width, dtype, save=True), rows.pointed

    def launch(inputs, scalars):
        x, up, down = inputs
        up, down = cast(up, down)
        h, saved = silu(read(x), up)
        y = F.linear(h, down)
        return (y if flat else y.view(shape),), (h, saved)

    return launch


def empty_again(wanted, inputs):
    return (inputs[0].new_empty(inputs[0].shape),), ()


def prepare_again(call: Call, config, inputs, *, products: ModuleType):
    """Prepares the forward pass that saves nothing, over chunks of rows."""
    x, up, down = inputs
    shape, dtype, flat = x.shape, x.dtype, x.dim() == 2
    rows, cast = _read(x, products), weights(up, down, dtype, tma=products is hopper_silu)
    width = hidden_width(up.shape[0])
    chunks = _chunks(rows)
    silu = [
        products.matmul_silu(call.target, replace(rows, n=n), width, dtype, save=False)
        for _, n in chunks
    ]

    def launch(inputs, scalars):
        x, up, down = inputs
        up, down = cast(up, down)
        if len(chunks) == 1:
            y = F.linear(silu[0](rows.pointed(x), up)[0], down)
            return (y if flat else y.view(shape),), ()
        y, x = x.new_empty(shape), rows.matrix(x)
        out, down = y.view(x.shape), down.t()
        for (start, n), of_chunk in zip(chunks, silu, strict=True):
            h, _ = of_chunk(x.narrow(0, start, n), up)
            torch.mm(h, down, out=out.narrow(0, start, n))
        return (y,), ()

    return launch


def _read(x: torch.Tensor, products: ModuleType | None, contiguous: bool = False) -> Rows:
    return rows_of(x, tma=products is hopper_silu, contiguous=contiguous)


# ------------------------------------------------------------------------------ backward


def empty_backward(wanted, inputs):
    named = zip(NAMES, inputs[1], strict=True)
    return tuple(x.new_empty(x.shape) if name in wanted else None for name, x in named)


def prepare_backward(call: Call, config, inputs, *, products: ModuleType, again: bool = False):
    """Prepares the backward pass. `again`: it computes h and z again, in chunks of rows."""
    (dy,), (x, up, down), _saved = inputs
    shape, flat, dtype, width = x.shape, x.dim() == 2, x.dtype, hidden_width(up.shape[0])
    # If z was saved, only a library's product reads x.
    dy_rows, x_rows = _read(dy, products, contiguous=True), _read(x, products if again else None)
    cast = weights(up, down, dtype, tma=products is hopper_silu)
    chunks = _chunks(x_rows) if again else [(0, x_rows.n)]
    silu, dsilu = [], []
    for _, n in chunks:
        dsilu.append(products.matmul_dsilu(call.target, replace(dy_rows, n=n), width, dtype))
        if again:
            of_x = replace(x_rows, n=n)
            silu.append(products.matmul_silu(call.target, of_x, width, dtype, save=True))
    dx_wanted, dup_wanted, ddown_wanted = (name in call.wanted for name in NAMES)
    dz_wanted = dx_wanted or dup_wanted
    times, add, dy_t = product(x), add_product(x), transposed(dy_rows.n, dy_rows.width)
    as_up, as_down = of_up(up), of_down(down)
    read_dy, read_x = dy_rows.pointed, x_rows.matrix

    def launch(inputs, scalars):
        (dy,), (x, *both), saved = inputs
        up, down = cast(*both)
        dy, x, dx, dup, ddown = read_dy(dy), read_x(x), None, None, None
        h, z = saved or silu[0](x, up)
        if dz_wanted:
            dz = dsilu[0](dy, down, z)
        if dx_wanted:
            dx = torch.mm(dz, up)
            dx = dx if flat else dx.view(shape)
        if dup_wanted:
            dup = as_up(times(dz.t(), x))
        if ddown_wanted:
            ddown = as_down(times(dy_t(dy), h))
        return dx, dup, ddown

    def launch_chunks(inputs, scalars):
        (dy,), (x, *both), _saved = inputs
        up, down = cast(*both)
        dy, x, dx, dup, ddown = dy_rows.matrix(dy), read_x(x), None, None, None
        if dx_wanted:
            dx = x.new_empty(shape)
            out = dx.view(x.shape)
        for (start, n), of_h, of_dz in zip(chunks, silu, dsilu, strict=True):
            dy_chunk, x_chunk = dy.narrow(0, start, n), x.narrow(0, start, n)
            h, z = of_h(x_chunk, up)
            dz = of_dz(dy_chunk, down, z)
            if dx_wanted:
                torch.mm(dz, up, out=out.narrow(0, start, n))
            if dup_wanted:
                dup = summed(dup, dz.t(), x_chunk)
            if ddown_wanted:
                ddown = summed(ddown, dy_chunk.t(), h)
        return dx, as_up(dup) if dup_wanted else None, as_down(ddown) if ddown_wanted else None

    def summed(total, left, right):
        if total is None:
            return times(left, right)
        add(total, left, right)
        return total

    return launch if len(chunks) == 1 else launch_chunks


def hopper_refuses(call: Call) -> Reason:
    problem = call.problem
    return hopper_matmul.refuses(call, problem["d_model"], hidden_width(problem["d_ff"]))


def _few_rows(call: Call) -> Reason:
    return saves_rows(call, SAVED_ROWS)


def _hopper_few_rows(call: Call) -> Reason:
    return hopper_refuses(call) or _few_rows(call)


def _forward(name: str, saves: str, products: ModuleType, supported: Support) -> Kernel:
    launch, shapes = partial(prepare, products=products), partial(empty, products=products)
    return Kernel(name, shapes, launch, supported, saves=saves)


def _forward_again(name: str, products: ModuleType, supported: Support) -> Kernel:
    launch = partial(prepare_again, products=products)
    return Kernel(name, empty_again, launch, supported, saves="again")


def _backward(name: str, saves: str, products: ModuleType, supported: Support) -> Kernel:
    launch = partial(prepare_backward, products=products, again=saves == "again")
    return Kernel(name, empty_backward, launch, supported, saves=saves)


FORWARD_SLOPE = _forward("hopper", "slope", hopper_silu, _hopper_few_rows)
FORWARD_Z = _forward("triton", "z", triton_matmul, _few_rows)
FORWARD_HOPPER_AGAIN = _forward_again("hopper_again", hopper_silu, hopper_refuses)
FORWARD_AGAIN = _forward_again("triton_again", triton_matmul, anywhere)
BACKWARD_SLOPE = _backward("hopper", "slope", hopper_silu, hopper_refuses)
BACKWARD_Z = _backward("triton", "z", triton_matmul, anywhere)
BACKWARD_HOPPER_AGAIN = _backward("hopper_again", "again", hopper_silu, hopper_refuses)
BACKWARD_AGAIN = _backward("triton_again", "again", triton_matmul, anywhere)
