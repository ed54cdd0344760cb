"""The specification of attention in plain PyTorch, in whatever dtype it is given."""

import torch


def attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: float | None = None,
    n_context: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(scale · q kᵀ) v; q [B, H, n_q, D], k and v [B, H, n_k, D] → [B, H, n_q, D].

    With n_context [B], sample b has keys 0 … n_context[b] − 1.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = scale * (q @ k.transpose(-2, -1))
    if n_context is not None:
        padding = torch.arange(k.shape[2], device=k.device) >= n_context[:, None]
        s = s.masked_fill(padding[:, None, None], float("-inf"))
    return torch.softmax(s, dim=-1) @ v
