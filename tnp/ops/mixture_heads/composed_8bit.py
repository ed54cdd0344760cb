"""Computes the mixture heads with their large products in 8 bits (e4m3), in both passes.

    forward     z = x up_kᵀ        out_k = silu(z) down_kᵀ
    backward    dz = (dout_k down_k) ∘ silu'(z)        dx = Σ_k dz up_k
                dup_k = dzᵀ x      ddown_k = dout_kᵀ silu(z)

x and dz have a scale for each 128 rows (`tnp.ops._shared.blocks_8bit`), up one for each row of the
operand (`tnp.ops._shared.rows_8bit`). The sums with down, over three outputs or over rows, are
float32 multiply-adds. The kernel writes dz only in 8 bits: as rows for dx, which is PyTorch's own
product, and as panels for dup. Norms of dout and of down bound its scale beforehand.

Up to `SAVED_ROWS` rows the forward pass saves z and upᵀ in 8 bits, and panels of x. With more rows
it saves nothing ("again"), and the backward pass computes them again. The backward pass, and the
forward pass that saves nothing, take rows in chunks.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tnp.dispatch.spec import Call, Kernel, Reason, Support, anywhere
from tnp.ops._shared.blocks_8bit import Blocks, panels_shape
from tnp.ops._shared.composed_8bit import Kernels, added, for_hopper, portable, saves_up_to
from tnp.ops._shared.e4m3 import BLOCK
from tnp.ops._shared.operands import hidden_width, of_down, of_up
from tnp.ops._shared.rows_8bit import (
    E4M3,
    InRows,
    empty_rows,
    n_norms,
    row_product,
    weight_quantizer,
)
from tnp.ops.mixture_heads import SAVED_ROWS, hopper, hopper_8bit, triton_8bit
from tnp.ops.mixture_heads.eight_bit import Z_FACTOR
from tnp.ops.mixture_heads.gradients import chunks, empty
from tnp.ops.mixture_heads.triton_heads import empty as empty_again

# Rows of a chunk, a multiple of 128. Its dz, which is written twice, takes 461 MB at 10 heads and
# F = 1408.
CHUNK_ROWS = 16_384
NAMES = ("x", "up", "down")


HOPPER, PORTABLE = for_hopper(hopper_8bit), portable(triton_8bit)


class Forward:
    """Computes the outputs of n rows.

    Args:
        call: the layer's.
        x, up: tensors of its layout.
        n: rows of a call.
        kernels: their modules.
        save: whether panels of x, and z, are returned.
    """

    def __init__(
        self, call: Call, x: Tensor, up: Tensor, n: int, kernels: Kernels, save: bool
    ) -> None:
        d, (n_heads, d_ff, _) = x.shape[-1], up.shape
        width = hidden_width(d_ff)
        norms = n_norms((n_heads * width, d))
        self.quantize = kernels.blocks.blocks_quantizer(
            (n, d), kernels.rows(x).stride, norms, panels=save
        )
        self.heads = kernels.products.heads(call.target, n, n_heads, width, save)

    def __call__(self, x: Tensor, up: InRows, down: Tensor) -> tuple[Tensor, Blocks, Tensor | None]:
        """Returns outputs [n, K, 3], x in 8 bits, and z. x may have any shape."""
        x8 = self.quantize(x, up, Z_FACTOR)
        out, z = self.heads(x8, up, down)
        return out, x8, z


class Weights:
    """Quantizes up [K, F, D], and reads down [K, 3, F] in float32, F zero-padded if necessary."""

    def __init__(self, up: Tensor, ordered: bool, both: bool) -> None:
        n_heads, d_ff, d = up.shape
        width = hidden_width(d_ff)
        self.padding, rows = width - d_ff, n_heads * width
        self.quantize = weight_quantizer((rows, d), (d, 1), ordered=(False, ordered), both=both)

    def up(self, up: Tensor) -> tuple[InRows, InRows | None]:
        """Returns up [K·F, D] in 8 bits, and its transpose if it is for both passes."""
        up = F.pad(up, (0, 0, 0, self.padding)) if self.padding else up.contiguous()
        return self.quantize(up)

    def down(self, down: Tensor) -> Tensor:
        down = down.float()
        return F.pad(down, (0, self.padding)) if self.padding else down.contiguous()


# ------------------------------------------------------------------------------- forward


def empty_saved(wanted, inputs, *, kernels: Kernels):
    """Allocates the results of the forward operation that saves z."""
    x, up, _down = inputs
    n, d, width = x.numel() // x.shape[-1], x.shape[-1], up.shape[0] * hidden_width(up.shape[1])
    outputs, _nothing = empty_again(wanted, inputs)
    saved = (
        x.new_empty(panels_shape(n, d), dtype=E4M3), x.new_empty(n, dtype=torch.float32),
        x.new_empty(kernels.products.new_z_shape(n, width), dtype=E4M3),
        x.new_empty(n, dtype=torch.float32), *empty_rows(x, (d, width)),
    )  # fmt: skip
    return outputs, saved if wanted else ()


def prepare(call: Call, config, inputs, *, kernels: Kernels, again: bool = False):
    """Prepares the forward pass, over chunks of rows if `again`."""
    x, up, down = inputs
    save = bool(call.wanted) and not again
    rows, weights = kernels.rows(x), Weights(up, kernels.products.ORDERED, save)
    shape = *x.shape[:-1], *down.shape[:2]
    parts = chunks(rows.n, CHUNK_ROWS if again else rows.n)
    layers = [Forward(call, x, up, n, kernels, save) for _, n in parts]

    def launch(inputs, scalars):
        x, up, down = inputs
        x, (up8, up8_t), down = rows.matrix(x), weights.up(up), weights.down(down)
        if len(parts) > 1:
            found = [
                layer(x.narrow(0, start, n), up8, down)[0]
                for (start, n), layer in zip(parts, layers, strict=True)
            ]
            return (torch.cat(found).view(shape),), ()
        out, x8, z = layers[0](x, up8, down)
        return (out.view(shape),), (x8.panels, x8.scale, z, x8.bound, *up8_t) if save else ()

    return launch


# ------------------------------------------------------------------------------ backward


def prepare_backward(call: Call, config, inputs, *, kernels: Kernels, again: bool = False):
    """Prepares the backward pass over chunks of rows, which computes only the wanted gradients.

    `again`: it computes z again.
    """
    (dout,), (x, up, down), _saved = inputs
    (n_heads, d_ff, d), shape = up.shape, x.shape
    width, rows = hidden_width(d_ff), kernels.rows(x)
    dx_wanted, dup_wanted, ddown_wanted = (name in call.wanted for name in NAMES)
    weights = Weights(up, kernels.products.ORDERED, both=True)
    parts = chunks(rows.n, CHUNK_ROWS)
    layers = [Forward(call, x, up, n, kernels, True) for _, n in parts] if again else []
    of_dz = [kernels.products.dz(n, n_heads, width) for _, n in parts]
    of_up_weight = [
        kernels.gradients.gradient(call.target, n, n_heads * width, d) for _, n in parts
    ]
    times, as_up, as_down = row_product(x), of_up(up), of_down(down)
    dout_shape, up_shape = (rows.n, *down.shape[:2]), (n_heads, width, d)

    def launch(inputs, scalars):
        (dout,), (x, up, down), saved = inputs
        dout, down = dout.contiguous().view(dout_shape), weights.down(down)
        dx, dup, ddown = None, None, None
        if again:
            x_rows, (up8, up8_t) = rows.matrix(x), weights.up(up)
        else:
            up8_t = InRows(*saved[4:])  # upᵀ and its scales
        if dx_wanted:
            dx = x.new_empty(rows.n, d)
        for i, (start, n) in enumerate(parts):
            if again:
                _, x8, z = layers[i](x_rows.narrow(0, start, n), up8, down)
                z_scale = x8.bound  # the scale of the product's rows
            else:
                x8, z, z_scale = _part(saved, start, n)
            dz8, partials = of_dz[i](z, z_scale, dout.narrow(0, start, n), down)
            if dx_wanted:
                times(dz8.rows, dz8.scale, up8_t, out=dx.narrow(0, start, n))
            if dup_wanted:
                dup = added(dup, of_up_weight[i](dz8, x8))
            if ddown_wanted:
                ddown = added(ddown, partials.sum(0))
            del dz8, partials  # before the next chunk's are made: a step's memory peaks here
        return (
            dx.view(shape) if dx_wanted else None,
            as_up(dup.view(up_shape)) if dup_wanted else None,
            as_down(ddown) if ddown_wanted else None,
        )

    return launch


def _part(saved: tuple[Tensor, ...], start: int, n: int) -> tuple[Blocks, Tensor, Tensor]:
    """Returns x of a chunk in 8 bits, z, and the scale of z's rows."""
    panels, scale, z, z_scale, *_ = saved
    first, last = start // BLOCK, -(-(start + n) // BLOCK)
    scale = scale.narrow(0, start, n)
    x8 = Blocks(None, scale, panels[first:last], scale)
    return x8, z[start : last * BLOCK], z_scale.narrow(0, start, n)


def _saves(call: Call) -> Reason:
    return saves_up_to(call, SAVED_ROWS)


def _hopper_saves(call: Call) -> Reason:
    return hopper.refuses(call) or _saves(call)


def _forward(name: str, saves: str, kernels: Kernels, supported: Support) -> Kernel:
    again = saves == "again"
    allocate = empty_again if again else partial(empty_saved, kernels=kernels)
    launch = partial(prepare, kernels=kernels, again=again)
    return Kernel(name, allocate, launch, supported, saves=saves)


def _backward(name: str, saves: str, kernels: Kernels, supported: Support) -> Kernel:
    launch = partial(prepare_backward, kernels=kernels, again=saves == "again")
    return Kernel(name, empty, launch, supported, saves=saves)


FORWARD_ORDERED = _forward("hopper_8bit", "ordered z", HOPPER, _hopper_saves)
FORWARD_Z = _forward("triton_8bit", "z", PORTABLE, _saves)
FORWARD_HOPPER_AGAIN = _forward("hopper_8bit_again", "again", HOPPER, hopper.refuses)
FORWARD_AGAIN = _forward("triton_8bit_again", "again", PORTABLE, anywhere)
BACKWARD_ORDERED = _backward("hopper_8bit", "ordered z", HOPPER, hopper.refuses)
BACKWARD_Z = _backward("triton_8bit", "z", PORTABLE, anywhere)
BACKWARD_HOPPER_AGAIN = _backward("hopper_8bit_again", "again", HOPPER, hopper.refuses)
BACKWARD_AGAIN = _backward("triton_8bit_again", "again", PORTABLE, anywhere)
