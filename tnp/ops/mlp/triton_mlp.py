"""Feed-forward layer for many rows: SiLU in the epilogue of our matmuls, the rest by cuBLAS.

    forward     z = x upᵀ         h = silu(z)                   y = h downᵀ
    backward    dz = (dy down) ∘ silu'(z)                       dx = dz up
                dup = dzᵀ x       ddown = dyᵀ h

x, y [T, D], up [F, D], down [D, F], z and h [T, F]. Saved for the backward pass are h and z (or
silu'(z)) in x's dtype, of up to `SAVED_ROWS` rows: the hidden rows are written once by the first
matmul and SiLU itself reads nothing. Gradients of the weights are float32, accumulated in float32.
"""

import torch

from tnp.ops.matmul import matmul_dsilu, matmul_silu
from tnp.ops.weight_gradient import add_weight_gradient, weight_gradient

# Of more rows than this the backward pass computes z again, in chunks: h and z of 205,000 rows
# would take 1.1 GiB, and where rows are many, attention leaves the MLP little of a step.
SAVED_ROWS = 65_536
CHUNK_ROWS = 32_768


def forward(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """y; all operands in x's dtype. The hidden layer is there for a chunk of rows at a time."""
    y = x.new_empty(x.shape[0], down.shape[0])
    for rows, out in zip(x.split(CHUNK_ROWS), y.split(CHUNK_ROWS), strict=True):
        h, _ = matmul_silu(rows, up, save=False)
        torch.mm(h, down.t(), out=out)
    return y


def forward_saving(
    x: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, h and what the backward pass needs of z; all operands in x's dtype."""
    h, saved = matmul_silu(x, up, save=True)
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


def backward_again(
    dy: torch.Tensor, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `backward`, of a forward pass that saved nothing."""
    dx = x.new_empty(x.shape)
    dup = x.new_zeros(up.shape, dtype=torch.float32)
    ddown = x.new_zeros(down.shape, dtype=torch.float32)
    chunks = (tensor.split(CHUNK_ROWS) for tensor in (dy, x, dx))
    for dy_rows, rows, out in zip(*chunks, strict=True):
        h, saved = matmul_silu(rows, up, save=True)
        dz = matmul_dsilu(dy_rows, down, saved)
        torch.mm(dz, up, out=out)
        add_weight_gradient(dup, dz, rows)
        add_weight_gradient(ddown, dy_rows, h)
    return dx, dup, ddown
