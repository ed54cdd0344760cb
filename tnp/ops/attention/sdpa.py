"""PyTorch's scaled_dot_product_attention with one backend forced: it runs or says why not."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


def sdpa_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, implementation: str
) -> torch.Tensor:
    """q [B, H, n_q, D], k and v [B, H, n_k, D] → [B, H, n_q, D]; RuntimeError if it cannot run."""
    with sdpa_kernel(BACKENDS[implementation]):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
