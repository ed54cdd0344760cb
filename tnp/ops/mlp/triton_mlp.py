"""Feed-forward layer for many rows: SiLU in the epilogue of our matmuls, the rest by cuBLAS.

    forward     z = x upᵀ         h = silu(z)                   y = h downᵀ
    backward    dz = (dy down) ∘ silu'(z)                       dx = dz up
                dup = dzᵀ x       ddown = dyᵀ h

x, y [T, D], up [F, D], down [D, F], z and h [T, F]. Saved for the backward pass are h and z (or
silu'(z)) in x's dtype: the hidden rows are written once by the first matmul and SiLU itself reads
nothing. The weights' cast copies are made anew in the backward pass, which is cheaper than keeping
them. Gradients of the weights are float32, accumulated in float32.
"""

import torch

from tnp.ops.matmul import matmul_dsilu, matmul_silu, weight_gradient


def forward(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, save: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """y, h and, where `save`, what the backward pass needs of z; all operands in x's dtype."""
    h, saved = matmul_silu(x, up, save)
    return torch.mm(h, down.t()), h, saved


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    h: torch.Tensor,
    saved: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dx in x's dtype, dup and ddown in float32; all operands in x's dtype."""
    dz = matmul_dsilu(dy, down, saved)
    return torch.mm(dz, up), weight_gradient(dz, x), weight_gradient(dy, h)
