"""Gradients of weights, for operators that multiply rows by them.

They are summed over all rows in float32 and never rounded to the activations' dtype: cuBLAS does
that where it is asked for a float32 result.
"""

import torch


def weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None = None
) -> torch.Tensor:
    """dyᵀ x of dy [T, N] and x [T, K]: float32 [N, K], in `out` if given."""
    if dy.is_cuda and dy.dtype != torch.float32:
        return torch.mm(dy.t(), x, out_dtype=torch.float32, out=out)
    return torch.mm(dy.t().float(), x.float(), out=out)


def add_weight_gradient(total: torch.Tensor, dy: torch.Tensor, x: torch.Tensor) -> None:
    """total += dyᵀ x, in place; total is float32 [N, K]."""
    if dy.is_cuda and dy.dtype != torch.float32:
        torch.addmm(total, dy.t(), x, out_dtype=torch.float32, out=total)
    else:
        total.addmm_(dy.t().float(), x.float())
