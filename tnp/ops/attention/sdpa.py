"""PyTorch's scaled_dot_product_attention with one backend forced: it runs or says why not."""

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

BACKENDS = {
    "sdpa_flash": SDPBackend.FLASH_ATTENTION,
    "sdpa_cudnn": SDPBackend.CUDNN_ATTENTION,
}


ALIGNMENT = 16  # bytes


def with_aligned_rows(x: torch.Tensor) -> torch.Tensor:
    """x, copied where a row does not start at a multiple of 16 bytes.

    The flash backend reads 16 bytes at a time and does not check: a misaligned address ends the
    process's CUDA context.
    """
    item = x.element_size()
    strides = (n * item for n, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)
    if any(offset % ALIGNMENT for offset in (x.data_ptr(), *strides)):
        return x.clone(memory_format=torch.contiguous_format)
    return x


def sdpa_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, implementation: str
) -> torch.Tensor:
    """q [B, H, n_q, D], k and v [B, H, n_k, D] → [B, H, n_q, D]; RuntimeError if it cannot run."""
    if q.is_cuda and not torch.compiler.is_compiling():  # Inductor aligns what it hands over
        q, k, v = map(with_aligned_rows, (q, k, v))
    with sdpa_kernel(BACKENDS[implementation]):
        return F.scaled_dot_product_attention(q, k, v, scale=scale)
