"""Computes the feed-forward layer with all products in 8 bits (e4m3), in both passes.

    forward     z = x upᵀ         h = silu(z)                   y = h downᵀ
    backward    dz = (dy down) ∘ silu'(z)                       dx = dz up
                dup = dzᵀ x       ddown = dyᵀ h

up and down have a scale for each row in the forward pass, upᵀ and downᵀ in the backward pass
(`tnp.ops._shared.rows_8bit`). Activations and gradients have one for 128 rows
(`tnp.ops._shared.blocks_8bit`). The first product of a pass writes its result in 8 bits alone: as
rows for the next product, which is PyTorch's own, and as panels for the gradient of a weight.

Up to `SAVED_ROWS` rows the forward pass saves panels of x and h, either z ("z") or its slope
("slope"), and upᵀ and downᵀ in 8 bits. With more rows it saves nothing ("again"), and the backward
pass computes them again, in chunks of rows.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tnp.dispatch.spec import Call, Kernel, Reason, Support, anywhere
from tnp.ops._shared import hopper_silu_8bit, triton_silu_8bit
from tnp.ops._shared.blocks_8bit import Blocks, panels_shape
from tnp.ops._shared.composed_8bit import Kernels, added, for_hopper, portable, saves_up_to
from tnp.ops._shared.hopper_norm_8bit import norm_quantizer
from tnp.ops._shared.operands import hidden_width, of_down, of_up
from tnp.ops._shared.rows_8bit import (
    E4M3,
    InRows,
    empty_rows,
    n_norms,
    row_product,
    weight_quantizer,
)
from tnp.ops.mlp import SAVED_ROWS
from tnp.ops.mlp.composed import NAMES, empty_again, empty_backward, hopper_refuses
from tnp.ops.mlp.composed import _chunks as chunks_of
from tnp.ops.mlp.eight_bit import DZ_FACTOR, H_FACTOR

HOPPER, PORTABLE = for_hopper(hopper_silu_8bit), portable(triton_silu_8bit)


# ------------------------------------------------------------------------------- forward


def empty(wanted, inputs, *, kernels: Kernels):
    x, up, _down = inputs
    n, d, width = x.numel() // x.shape[-1], x.shape[-1], hidden_width(up.shape[0])
    saved = (
        x.new_empty(panels_shape(n, d), dtype=E4M3), x.new_empty(n, dtype=torch.float32),
        x.new_empty(panels_shape(n, width), dtype=E4M3), x.new_empty(n, dtype=torch.float32),
        kernels.products.new_saved(x, (n, width), x.dtype),
        *empty_rows(x, (d, width)), *empty_rows(x, (width, d)),  # upᵀ, downᵀ
    )  # fmt: skip
    return (x.new_empty(x.shape),), saved if wanted else ()


class Weights:
    """Quantizes up [F, D] and down [D, F], with F padded, for one pass or for both."""

    def __init__(self, up: Tensor, down: Tensor, ordered: bool, both: bool) -> None:
        (d_ff, d), width = up.shape, hidden_width(up.shape[0])
        # Kernels write h and dz in the order of `column_at`, so their other operands have it too.
        self.up = weight_quantizer((d_ff, d), up.stride(), (width, d), (False, ordered), both)
        self.down = weight_quantizer((d, d_ff), down.stride(), (d, width), (ordered, False), both)


class Hidden:
    """Computes the hidden layer of n rows.

    Args:
        call: the call of the layer.
        x, up: examples that fix shapes and strides.
        n: rows of each chunk.
        kernels: the modules of the kernels.
        rows: whether rows of h are returned.
        save: whether panels of x and h, and z or its slope, are returned.
    """

    def __init__(
        self, call: Call, x: Tensor, up: Tensor, n: int, kernels: Kernels, rows: bool,
        save: bool,
    ) -> None:  # fmt: skip
        d, width = x.shape[-1], hidden_width(up.shape[0])
        stride = kernels.rows(x).stride
        self.quantize = kernels.blocks.blocks_quantizer(
            (n, d), stride, n_norms((width, d)), panels=save
        )
        self.silu = kernels.products.matmul_silu(call.target, (n, width), d, rows, save)

    def __call__(self, x: Tensor, up: InRows) -> tuple[Blocks, Blocks, Tensor | None]:
        """Returns x and h in 8 bits, and z or its slope. x may have any shape."""
        x8 = self.quantize(x, up, H_FACTOR)
        h8, panels, saved = self.silu(x8, up)
        return x8, Blocks(h8, x8.bound, panels, x8.bound), saved


def prepare(call: Call, config, inputs, *, kernels: Kernels, again: bool = False):
    """Prepares the forward pass, over chunks of rows if `again`."""
    x, up, down = inputs
    shape, rows, d = x.shape, kernels.rows(x), x.shape[-1]
    save = bool(call.wanted) and not again
    weights = Weights(up, down, kernels.products.ORDERED, save)
    chunks = chunks_of(rows) if again else [(0, rows.n)]
    hidden = [Hidden(call, x, up, n, kernels, True, save) for _, n in chunks]
    times = row_product(x)

    def launch(inputs, scalars):
        x, up, down = inputs
        (up8, up8_t), (down8, down8_t) = weights.up(up), weights.down(down)
        x = rows.matrix(x)
        if len(chunks) > 1:
            y = x.new_empty(rows.n, d)
            for (start, n), layer in zip(chunks, hidden, strict=True):
                _, h8, _ = layer(x.narrow(0, start, n), up8)
                times(h8.rows, h8.scale, down8, out=y.narrow(0, start, n))
            return (y.view(shape),), ()
        x8, h8, saved = hidden[0](x, up8)
        y = times(h8.rows, h8.scale, down8).view(shape)
        if not save:
            return (y,), ()
        return (y,), (x8.panels, x8.scale, h8.panels, h8.scale, saved, *up8_t, *down8_t)

    return launch


def prepare_normed(call: Call, inputs: tuple[Tensor, ...]) -> Callable:
    """Prepares add_rms_norm and the layer, for calls that kernel `FORWARD_SLOPE` serves.

    The norm writes its result in 8 bits alone. The launch takes (x, update, weight of the norm, up,
    down) and (eps,), and returns (sum, y) and what the layer saves.
    """
    x, update, _weight, up, down = inputs
    shape, n, d, width = x.shape, x.numel() // x.shape[-1], x.shape[-1], hidden_width(up.shape[0])
    save = bool(call.wanted)
    weights = Weights(up, down, hopper_silu_8bit.ORDERED, save)
    norm = norm_quantizer(x, update, n_norms((width, d)), panels=save)
    silu = hopper_silu_8bit.matmul_silu(call.target, (n, width), d, True, save)
    times = row_product(x)

    def launch(inputs: tuple, scalars: tuple) -> tuple[tuple, tuple]:
        x, update, weight, up, down = inputs
        (up8, up8_t), (down8, down8_t) = weights.up(up), weights.down(down)
        total, x8 = norm(x, update, weight, *scalars, up8, H_FACTOR)
        h8, panels, slope = silu(x8, up8)
        y = times(h8, x8.bound, down8).view(shape)
        if not save:
            return (total, y), ()
        return (total, y), (x8.panels, x8.scale, panels, x8.bound, slope, *up8_t, *down8_t)

    return launch


# ------------------------------------------------------------------------------ backward


def prepare_backward(call: Call, config, inputs, *, kernels: Kernels, again: bool = False):
    """Prepares the backward pass, which computes only the wanted gradients.

    `again`: it computes the hidden layer again, in chunks of rows.
    """
    (dy,), (x, up, down), _saved = inputs
    shape, width, d = x.shape, hidden_width(up.shape[0]), x.shape[-1]
    dy_rows, x_rows = kernels.rows(dy, contiguous=True), kernels.rows(x)
    dx_wanted, dup_wanted, ddown_wanted = (name in call.wanted for name in NAMES)
    weights = Weights(up, down, kernels.products.ORDERED, both=True)
    chunks = chunks_of(x_rows) if again else [(0, x_rows.n)]
    gradient, quantizer = kernels.gradients.gradient, kernels.blocks.blocks_quantizer
    quantize_dy, hidden, dsilu, gradients = [], [], [], []
    for _, n in chunks:
        if again:
            hidden.append(Hidden(call, x, up, n, kernels, False, True))
        quantize_dy.append(quantizer((n, d), d, n_norms((width, d)), panels=ddown_wanted))
        dsilu.append(
            kernels.products.matmul_dsilu(call.target, (n, width), d, dx_wanted, dup_wanted)
        )
        gradients.append((gradient(call.target, n, width, d), gradient(call.target, n, d, width)))
    times, as_up, as_down = row_product(x), of_up(up), of_down(down)

    def launch(inputs, scalars):
        (dy,), (x, up, down), saved = inputs
        dy, dx, dup, ddown = dy_rows.matrix(dy), None, None, None
        if again:
            x, (up8, up8_t), (_, down8_t) = x_rows.matrix(x), weights.up(up), weights.down(down)
        else:
            x_panels, x_scale, h_panels, h_scale, slope, *weights_t = saved
            up8_t, down8_t = InRows(*weights_t[:3]), InRows(*weights_t[3:])
        if dx_wanted:
            dx = dy.new_empty(dy.shape)
        for i, (start, n) in enumerate(chunks):
            if again:
                x8, h8, slope = hidden[i](x.narrow(0, start, n), up8)
            else:
                x8 = Blocks(None, x_scale, x_panels, x_scale)
                h8 = Blocks(None, h_scale, h_panels, h_scale)
            dy8 = quantize_dy[i](dy.narrow(0, start, n), down8_t, DZ_FACTOR)
            if dx_wanted or dup_wanted:
                dz8, panels = dsilu[i](dy8, down8_t, slope)
                dz = Blocks(dz8, dy8.bound, panels, dy8.bound)
            if dx_wanted:
                times(dz8, dy8.bound, up8_t, out=dx.narrow(0, start, n))
            gradient_of_up, gradient_of_down = gradients[i]
            if dup_wanted:
                dup = added(dup, gradient_of_up(dz, x8))
            if ddown_wanted:
                ddown = added(ddown, gradient_of_down(dy8, h8))
        return (
            dx.view(shape) if dx_wanted else None,
            as_up(dup) if dup_wanted else None,
            as_down(ddown) if ddown_wanted else None,
        )

    return launch


def _saves(call: Call) -> Reason:
    return saves_up_to(call, SAVED_ROWS)


def _hopper_saves(call: Call) -> Reason:
    return hopper_refuses(call) or _saves(call)


def _forward(name: str, saves: str, kernels: Kernels, supported: Support) -> Kernel:
    again = saves == "again"
    allocate = empty_again if again else partial(empty, kernels=kernels)
    launch = partial(prepare, kernels=kernels, again=again)
    return Kernel(name, allocate, launch, supported, saves=saves)


def _backward(name: str, saves: str, kernels: Kernels, supported: Support) -> Kernel:
    launch = partial(prepare_backward, kernels=kernels, again=saves == "again")
    return Kernel(name, empty_backward, launch, supported, saves=saves)


FORWARD_SLOPE = _forward("hopper_8bit", "slope", HOPPER, _hopper_saves)
FORWARD_Z = _forward("triton_8bit", "z", PORTABLE, _saves)
FORWARD_HOPPER_AGAIN = _forward("hopper_8bit_again", "again", HOPPER, hopper_refuses)
FORWARD_AGAIN = _forward("triton_8bit_again", "again", PORTABLE, anywhere)
BACKWARD_SLOPE = _backward("hopper_8bit", "slope", HOPPER, hopper_refuses)
BACKWARD_Z = _backward("triton_8bit", "z", PORTABLE, anywhere)
BACKWARD_HOPPER_AGAIN = _backward("hopper_8bit_again", "again", HOPPER, hopper_refuses)
BACKWARD_AGAIN = _backward("triton_8bit_again", "again", PORTABLE, anywhere)
