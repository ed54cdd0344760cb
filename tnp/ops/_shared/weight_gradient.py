"""Computes gradients of weights, for operators that multiply rows by weights.

Gradients are summed over all rows in float32, and never rounded to the activations' dtype. cuBLAS
does so if asked for a float32 result.
"""

from collections.abc import Callable
from functools import partial

import torch


def transposed(n_rows: int, width: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function that transposes contiguous rows [..., width] to [width, n_rows]."""
    size, strides = (width, n_rows), (1, width)
    return lambda dy: dy.as_strided(size, strides)


def product(x: torch.Tensor, factor: float = 1.0) -> Callable[..., torch.Tensor]:
    """Returns a function that multiplies dyᵀ [N, T], a matrix [T, K] like x, and `factor`.

    The result is float32 [N, K], in `out` if given. With a factor `out` must be given.
    """
    if factor != 1.0:
        wide = x.dtype == torch.float32 or not x.is_cuda
        return partial(_scaled_upcast if wide else _scaled, factor=factor)
    if x.dtype == torch.float32:
        return torch.mm
    return partial(torch.mm, out_dtype=torch.float32) if x.is_cuda else _upcast


def add_product(x: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Returns a function of (total, dyᵀ, matrix) that adds the product to `total` in place."""
    if x.dtype != torch.float32 and x.is_cuda:
        return _add
    return lambda total, dy_t, x: total.addmm_(dy_t.float(), x.float())


def _upcast(dy_t: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    return torch.mm(dy_t.float(), x.float(), out=out)


def _scaled(dy_t: torch.Tensor, x: torch.Tensor, out: torch.Tensor, factor: float) -> torch.Tensor:
    return torch.addmm(out, dy_t, x, torch.float32, beta=0, alpha=factor, out=out)


def _scaled_upcast(
    dy_t: torch.Tensor, x: torch.Tensor, out: torch.Tensor, factor: float
) -> torch.Tensor:
    return torch.addmm(out, dy_t.float(), x.float(), beta=0, alpha=factor, out=out)


def _add(total: torch.Tensor, dy_t: torch.Tensor, x: torch.Tensor) -> None:
    torch.addmm(total, dy_t, x, out_dtype=torch.float32, out=total)
