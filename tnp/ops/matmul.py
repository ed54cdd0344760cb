"""Matrix products that the feed-forward operators share, and who computes each.

SiLU and its derivative ride in the epilogue of kernels of our own, so that what they read and
write passes through memory once.

The last dimension of every operand is contiguous, rows may lie further apart.
"""

import torch
import torch.nn.functional as F

from tnp.ops import hopper_matmul, hopper_silu, triton_matmul
from tnp.ops.casting import cast_weight

# Hidden widths are padded to multiples of this many units: what Triton knows to be a multiple of 16
# it loads 16 bytes at a time.
HIDDEN_MULTIPLE = 16


def hidden_width(d_ff: int) -> int:
    """d_ff rounded up to what the kernels multiply."""
    return -(-d_ff // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE


def cast_weights(
    up: torch.Tensor, down: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """up [..., F, D] and down [..., O, F] in `dtype`, contiguous, F zero-padded where it must be.

    Padding is exact: silu(0) = 0.
    """
    padding = hidden_width(up.shape[-2]) - up.shape[-2]
    up, down = cast_weight(up, dtype), cast_weight(down, dtype)
    if padding:
        up, down = F.pad(up, (0, 0, 0, padding)), F.pad(down, (0, padding))
    return up.contiguous(), down.contiguous()


def weight_gradients(
    dup: torch.Tensor, ddown: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of what `cast_weights` gave, as those of up and down: unpadded, in their dtype."""
    d_ff = up.shape[-2]
    dup, ddown = dup[..., :d_ff, :], ddown[..., :d_ff]
    return dup.to(up.dtype).contiguous(), ddown.to(down.dtype).contiguous()


def saved_shape(x: torch.Tensor, width: int) -> tuple[int, int]:
    """Of what `matmul_silu` saves of x [T, K] for a hidden layer of `width` units."""
    if hopper_matmul.serves(x, width):
        return hopper_silu.slope_shape(x.shape[0], width)
    return x.shape[0], width


def matmul_silu(
    x: torch.Tensor, w: torch.Tensor, save: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """h = silu(x wᵀ), contiguous [T, N] in x's dtype, and what `matmul_dsilu` needs of it.

    That is z = x wᵀ, or silu'(z) in the order of a kernel's registers; None unless `save`.

    Args:
        x: [T, K], T ≥ 1.
        w: [N, K], in x's dtype.
    """
    if hopper_matmul.serves(x, w.shape[0]):
        return hopper_silu.matmul_silu(x, w, save)
    return triton_matmul.matmul_silu(x, w, save)


def matmul_dsilu(dy: torch.Tensor, w: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """dz = (dy w) ∘ silu'(z), contiguous [T, N] in dy's dtype.

    Args:
        dy: [T, K], T ≥ 1.
        w: [K, N], in dy's dtype.
        saved: by `matmul_silu`, of an x like dy in shape and dtype.
    """
    if hopper_matmul.serves(dy, w.shape[1]):
        return hopper_silu.matmul_dsilu(dy, w, saved)
    return triton_matmul.matmul_dsilu(dy, w, saved)
