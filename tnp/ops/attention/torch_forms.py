"""Attention in PyTorch: the formula, and scaled_dot_product_attention with one backend forced.

Torch is imported where a function runs: the declaration names these functions, and planning reads
it without torch.
"""

ALIGNMENT = 16  # bytes
LN_2 = 0.6931471805599453  # the scale of base2


def softmax_scale(scale, base2):
    """What scores are multiplied by ahead of e^."""
    return LN_2 if base2 else scale


def reference(q, k, v, n_keys, scale, base2=False):
    """softmax(scale · q kᵀ) v in whatever dtype it is given; sample b has n_keys[b] keys.

    Args:
        q: [B, H, n_q, D].
        k, v: [B, H, n_k, D].
        n_keys: [B], or None for n_k everywhere.
        scale: a number.
        base2: whether q carries scale · log2(e), so that weights are powers of 2.
    """
    import torch

    s = softmax_scale(scale, base2) * (q @ k.transpose(-2, -1))
    if n_keys is not None:
        padding = torch.arange(k.shape[2], device=k.device) >= n_keys[:, None]
        s = s.masked_fill(padding[:, None, None], float("-inf"))
    return torch.softmax(s, dim=-1) @ v


def with_aligned_rows(x):
    """x, copied where a row does not start at a multiple of 16 bytes.

    The flash backend reads 16 bytes at a time and does not check: a misaligned address ends the
    process's CUDA context.
    """
    item = x.element_size()
    strides = (n * item for n, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)
    if any(offset % ALIGNMENT for offset in (x.data_ptr(), *strides)):
        import torch

        return x.clone(memory_format=torch.contiguous_format)
    return x


def _sdpa(backend, q, k, v, scale, mask=None):
    import torch

    if q.is_cuda and not torch.compiler.is_compiling():  # Inductor aligns what it hands over
        q, k, v = map(with_aligned_rows, (q, k, v))
    with torch.nn.attention.sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale
        )


def _is_key(k, n_keys):
    """bool [B, 1, 1, n_k]: whether a row of k is a key of its sample."""
    import torch

    return (torch.arange(k.shape[2], device=k.device) < n_keys[:, None])[:, None, None]


# Of the dimension that tells padding from keys: what queries hold there, and what padding holds.
# 16-bit floats hold both, and with a scale from 1e-6 on their product is out of reach of any score.
_ASKING, _PADDING = 6e4, -3e4
_MORE_DIMENSIONS = 8  # flash takes head_dims that are multiples of 8


def sdpa_flash(q, k, v, n_keys, scale, base2=False):
    """PyTorch's flash backend; RuntimeError where it cannot run.

    It takes no mask. Where samples have numbers of keys of their own, a dimension more tells
    padding from keys, which is exact, and costs what a wider head costs.
    """
    import torch
    from torch.nn.attention import SDPBackend
    from torch.nn.functional import pad

    scale = softmax_scale(scale, base2)
    if n_keys is None:
        return _sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, scale)
    first = torch.arange(_MORE_DIMENSIONS, device=q.device) == 0
    asking = torch.where(first, _ASKING, 0.0).to(q.dtype)
    telling = torch.where(first & ~_is_key(k, n_keys).mT, _PADDING, 0.0).to(k.dtype)
    q, k = (
        torch.cat([x, more.expand(*x.shape[:3], _MORE_DIMENSIONS)], -1)
        for x, more in ((q, asking), (k, telling))
    )
    o = _sdpa(SDPBackend.FLASH_ATTENTION, q, k, pad(v, (0, _MORE_DIMENSIONS)), scale)
    return o[..., : v.shape[-1]]


def sdpa_cudnn(q, k, v, n_keys, scale, base2=False):
    """PyTorch's cuDNN backend; RuntimeError where it cannot run."""
    from torch.nn.attention import SDPBackend

    mask = None if n_keys is None else _is_key(k, n_keys)
    return _sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, softmax_scale(scale, base2), mask)


def flash_supported(call):
    """Any of its dtypes on the CPU, 16-bit floats on GPUs from 8.0 on."""
    if call.target.kind != "cuda":
        return None
    if call.problem.itemsize != 2:
        return f"SDPA's flash backend on CUDA takes bfloat16 or float16, not {call.problem.dtype}"
    if call.target.capability < 80:
        return "SDPA's flash backend needs compute capability 8.0 or newer"
    if call.problem["n_keys"] and call.problem["head_dim"] > 256 - _MORE_DIMENSIONS:
        return f"with n_keys it takes head_dim up to {256 - _MORE_DIMENSIONS}"
    return None


def cudnn_supported(call):
    """16-bit floats on GPUs from 8.0 on."""
    if call.target.kind != "cuda":
        return f"cuDNN needs a CUDA device, not {call.target.kind}"
    if call.problem.itemsize != 2:
        return f"SDPA's cuDNN backend takes bfloat16 or float16, not {call.problem.dtype}"
    if call.target.capability < 80:
        return "SDPA's cuDNN backend needs compute capability 8.0 or newer"
    return None
