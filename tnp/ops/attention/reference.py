"""The specification of attention in plain PyTorch, in whatever dtype it is given."""

import torch


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v; q [B, H, n_q, D], k and v [B, H, n_k, D] → [B, H, n_q, D]."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.softmax(scale * (q @ k.transpose(-2, -1)), dim=-1) @ v
