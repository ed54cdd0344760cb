"""Computes the feed-forward layer with products of rows in 8 bits (e4m3), in both passes.

    forward     z = x upᵀ         h = silu(z)                   y = h downᵀ
    backward    dz = (dy down) ∘ silu'(z)                       dx = dz up
                dup = dzᵀ x       ddown = dyᵀ h

It differs from `composed` in the first two products of each pass, whose operands are e4m3. Each row
of the left operand, and of the transposed right one, has a power of two as its scale
(`tnp.ops._shared.rows_8bit`). Weights are quantized anew in each pass, because the summed dimension
differs, and so do the rows. The first product writes its result in 8 bits for the second, which is
PyTorch's own.

Gradients of the weights are sums over rows, whose scales differ. Their products stay in 16 bits, as
in torchao's recipe `rowwise_with_gw_hp`.
"""

from functools import partial
from types import ModuleType

from tnp.dispatch.spec import Call, Kernel, anywhere
from tnp.ops._shared import hopper_silu_8bit, triton_silu_8bit
from tnp.ops._shared.operands import hidden_width, of_down, of_up, rows_of
from tnp.ops._shared.rows_8bit import n_norms, row_product, rows_quantizer
from tnp.ops._shared.weight_gradient import product, transposed
from tnp.ops.mlp.composed import NAMES, empty_backward, hopper_refuses
from tnp.ops.mlp.eight_bit import DZ_FACTOR, H_FACTOR


def empty(wanted, inputs, *, products: ModuleType):
    x, up, _down = inputs
    shape = x.numel() // x.shape[-1], hidden_width(up.shape[0])
    saved = (x.new_empty(shape), products.new_saved(x, shape, x.dtype)) if wanted else ()
    return (x.new_empty(x.shape),), saved


def prepare(call: Call, config, inputs, *, products: ModuleType):
    """Prepares the forward pass. It saves h, and z or its slope, if a gradient is wanted."""
    x, up, down = inputs
    shape, flat, dtype = x.shape, x.dim() == 2, x.dtype
    rows, width, d = rows_of(x), hidden_width(up.shape[0]), x.shape[-1]
    save = bool(call.wanted)
    of_up = rows_quantizer(up, up.shape, up.stride(), (width, d))
    of_down = rows_quantizer(down, down.shape, down.stride(), (d, width))
    of_x = rows_quantizer(x, (rows.n, d), (rows.stride, 1), norms=n_norms((width, d)))
    silu = products.matmul_silu(call.target, (rows.n, width), d, dtype, save)
    times, read = row_product(x), rows.pointed

    def launch(inputs, scalars):
        x, up, down = inputs
        up8, down8 = of_up(up), of_down(down)
        x8 = of_x(read(x), up8.bound, H_FACTOR)
        h8, h, saved = silu(x8, up8)
        y = times(h8, x8.bound, down8)
        return (y if flat else y.view(shape),), (h, saved) if save else ()

    return launch


def prepare_backward(call: Call, config, inputs, *, products: ModuleType):
    """Prepares the backward pass, which computes only the wanted gradients."""
    (dy,), (x, up, down), _saved = inputs
    shape, flat, dtype = x.shape, x.dim() == 2, x.dtype
    width, d = hidden_width(up.shape[0]), x.shape[-1]
    dy_rows, x_rows = rows_of(dy, contiguous=True), rows_of(x)
    n = x_rows.n
    dx_wanted, dup_wanted, ddown_wanted = (name in call.wanted for name in NAMES)
    dz_wanted = dx_wanted or dup_wanted
    up_t, down_t = up.t(), down.t()
    of_down_t = rows_quantizer(down, down_t.shape, down_t.stride(), (width, d))
    of_up_t = rows_quantizer(up, up_t.shape, up_t.stride(), (d, width))
    of_dy = rows_quantizer(dy, (n, d), (dy_rows.stride, 1), norms=n_norms((width, d)))
    dsilu = products.matmul_dsilu(call.target, (n, width), d, dtype, dup_wanted, dx_wanted)
    times, gradient, dy_t = row_product(x), product(x), transposed(n, d)
    as_up, as_down = of_up(up), of_down(down)
    read_dy, read_x = dy_rows.pointed, x_rows.matrix

    def launch(inputs, scalars):
        (dy,), (x, up, down), (h, saved) = inputs
        dy, dx, dup, ddown = read_dy(dy), None, None, None
        if dz_wanted:
            down8 = of_down_t(down)
            dy8 = of_dy(dy, down8.bound, DZ_FACTOR)
            dz8, dz = dsilu(dy8, down8, saved)
        if dx_wanted:
            dx = times(dz8, dy8.bound, of_up_t(up))
            dx = dx if flat else dx.view(shape)
        if dup_wanted:
            dup = as_up(gradient(dz.t(), read_x(x)))
        if ddown_wanted:
            ddown = as_down(gradient(dy_t(dy), h))
        return dx, dup, ddown

    return launch


FORWARD_SLOPE = Kernel(
    "hopper_8bit", partial(empty, products=hopper_silu_8bit),
    partial(prepare, products=hopper_silu_8bit), hopper_refuses, saves="slope",
)  # fmt: skip
FORWARD_Z = Kernel(
    "triton_8bit", partial(empty, products=triton_silu_8bit),
    partial(prepare, products=triton_silu_8bit), anywhere, saves="z",
)  # fmt: skip
BACKWARD_SLOPE = Kernel(
    "hopper_8bit", empty_backward,
    partial(prepare_backward, products=hopper_silu_8bit), hopper_refuses, saves="slope",
)  # fmt: skip
BACKWARD_Z = Kernel(
    "triton_8bit", empty_backward,
    partial(prepare_backward, products=triton_silu_8bit), anywhere, saves="z",
)  # fmt: skip
