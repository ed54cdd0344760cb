"""Computes the gradients of x, up and down from chunks of the hidden layer's gradient.

A kernel gives dz of a chunk of rows, and partial sums of ddown. A matmul library computes dx = dz
up and dup = dzᵀ x.
"""

from collections.abc import Callable, Iterable

import torch

from tnp.dispatch.spec import Call
from tnp.ops._shared.operands import hidden_width, of_down, of_up
from tnp.ops._shared.weight_gradient import add_product, product

# The first row of a chunk, its number of rows n, dz [n, K · F], rows of x [n, D], partial sums of
# ddown.
Part = tuple[int, int, torch.Tensor, torch.Tensor, torch.Tensor]


def empty(wanted, inputs):
    """Allocates the results of the backward operation, in the layout of all kernels."""
    named = zip(("x", "up", "down"), inputs[1], strict=True)
    return tuple(x.new_empty(x.shape) if name in wanted else None for name, x in named)


def summing(call: Call, kept: tuple[torch.Tensor, ...]) -> Callable[..., tuple]:
    """Returns a function that adds up the gradients of x, up and down.

    A gradient that is not requested is None.

    Call it with up [K, F, D] in x's dtype, and an iterator of chunks. It uses each chunk before it
    takes the next.
    """
    x, up, down = kept
    n_heads, d_ff, n_inner = up.shape
    shape, n_rows, flat = x.shape, x.numel() // n_inner, x.dim() == 2
    up_shape = n_heads, hidden_width(d_ff), n_inner
    units_shape = up_shape[0] * up_shape[1], n_inner
    x_wanted, up_wanted, down_wanted = (name in call.wanted for name in ("x", "up", "down"))
    times, add, as_up, as_down = product(x), add_product(x), of_up(up), of_down(down)

    def gradients(up: torch.Tensor, parts: Iterable[Part]) -> tuple:
        dx, dup, ddown, units = None, None, None, up.view(units_shape)
        for start, n, dz, x, partials in parts:
            if x_wanted and n == n_rows:
                dx = torch.mm(dz, units)
            elif x_wanted:
                dx = x.new_empty(n_rows, n_inner) if dx is None else dx
                torch.mm(dz, units, out=dx.narrow(0, start, n))
            if up_wanted and dup is None:
                dup = times(dz.t(), x)
            elif up_wanted:
                add(dup, dz.t(), x)
            if down_wanted:
                part = partials.sum(0)
                ddown = part if ddown is None else ddown.add_(part)
        if x_wanted and not flat:
            dx = dx.view(shape)
        dup = as_up(dup.view(up_shape)) if up_wanted else None
        return dx, dup, as_down(ddown) if down_wanted else None

    return gradients


def chunks(n_rows: int, chunk_rows: int) -> list[tuple[int, int]]:
    """Returns (first row, number of rows) of each chunk."""
    return [(start, min(chunk_rows, n_rows - start)) for start in range(0, n_rows, chunk_rows)]
