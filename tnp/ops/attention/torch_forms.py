"""Computes attention in PyTorch: by the formula, and by one backend of SDPA.

Functions import torch when they run: the declaration names them, and planning reads it without
torch.
"""

from functools import cache
from itertools import pairwise

from tnp.dispatch.spec import on_cuda
from tnp.ops.attention.layouts import from_rows, to_rows
from tnp.util.checks import require_cumulative, require_end

ALIGNMENT = 16  # bytes
LN_2 = 0.6931471805599453  # the scale with base2


def softmax_scale(scale, base2):
    """Returns the factor of scores in e^(factor · score)."""
    return LN_2 if base2 else scale


def bounded(window, n_q, n_k):
    """Returns the window, at most n_q + n_k, which bounds nothing. A longer one may overflow."""
    return min(window, n_q + n_k)


def visible(q, k, n_keys, cu_seqlens_q, cu_seqlens_k, causal=False, window=0, rows=None):
    """Returns whether a query sees a key: bool, broadcast to [B, 1, n_q, n_k], or None for all.

    Query i is beside key i + n_keys − n_q of its sequence. `rows` is a slice of the queries.
    """
    import torch

    window = bounded(window, q.shape[2], k.shape[2])

    def count(n):
        return torch.arange(n, device=q.device)

    queries, keys = count(q.shape[2])[rows or slice(None), None], count(k.shape[2])
    if cu_seqlens_q is not None:
        of_q, of_k = (
            torch.searchsorted(cu.long(), at.contiguous(), right=True) - 1
            for cu, at in ((cu_seqlens_q, queries), (cu_seqlens_k, keys))
        )
        ends = cu_seqlens_k.long()[of_q + 1] - cu_seqlens_q.long()[of_q + 1]
        seen = of_q == of_k
    else:
        lengths = k.shape[2] if n_keys is None else n_keys[:, None, None, None]
        ends = lengths - q.shape[2]
        seen = None if n_keys is None else keys < lengths
    if not causal and not window:
        return seen
    beside = keys - queries - ends
    right = 0 if causal else window - 1
    near = (beside <= right) & (beside > -window) if window else beside <= right
    return near if seen is None else near & seen


def attend(q, k, v, seen, scale, lse=False):
    """Returns softmax(scale · q kᵀ) v over the keys that are seen, 0 for a query that sees none.

    If `lse`, it returns a pair: this result, and log Σ e^(scale · q kᵀ) over these keys. The
    logarithm is [B, H, n_q], in float32 or float64, and −inf for a query that sees no key.

    Args:
        q: [B, H, n_q, D].
        k, v: [B, H_kv, n_k, D]. H_kv divides H.
        seen: bool, broadcast to [B, 1, n_q, n_k], or None.
        scale: a number.
        lse: whether to return lse too.
    """
    import torch

    group = q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = scale * (q @ k.transpose(-2, -1))
    wide = torch.promote_types(s.dtype, torch.float32)
    if seen is None:
        o = torch.softmax(s, dim=-1) @ v
        return (o, s.to(wide).logsumexp(-1)) if lse else o
    blind = ~seen.any(-1, keepdim=True)
    s = s.masked_fill(~(seen | blind), float("-inf"))
    o = torch.softmax(s, dim=-1).masked_fill(blind, 0.0) @ v
    if not lse:
        return o
    return o, s.to(wide).logsumexp(-1).masked_fill(blind.squeeze(-1), float("-inf"))


def reference(
    q, k, v, n_keys, cu_seqlens_q, cu_seqlens_k, scale, base2=False, causal=False, window=0,
    lse=False,
):  # fmt: skip
    """Returns softmax(scale · q kᵀ) v, in any float dtype.

    Args:
        q: [B, H, n_q, D].
        k, v: [B, H_kv, n_k, D]. H_kv divides H.
        n_keys: [B], keys of each sample, or None for n_k everywhere. Samples with a number out of
            range give NaN.
        cu_seqlens_q, cu_seqlens_k: [n_sequences + 1], of packed sequences, or None.
        scale: a number.
        base2: whether q carries scale · log2(e), so that weights are powers of 2.
        causal, window: see `visible`.
        lse: whether to return the pair of `attend`.
    """
    if n_keys is not None:
        import torch

        outside = (n_keys < 1) | (n_keys > k.shape[2])
        q = q * torch.where(outside, float("nan"), 1.0).to(q.dtype)[:, None, None, None]
        n_keys = n_keys.clamp(1, k.shape[2])
    seen = visible(q, k, n_keys, cu_seqlens_q, cu_seqlens_k, causal, window)
    return attend(q, k, v, seen, softmax_scale(scale, base2), lse)


def with_aligned_rows(x):
    """Returns x, or a copy if some row does not start at a multiple of 16 bytes.

    The flash backend reads 16 bytes at a time and does not check. A misaligned address ends the
    process's CUDA context.
    """
    item = x.element_size()
    strides = (n * item for n, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1)
    if any(offset % ALIGNMENT for offset in (x.data_ptr(), *strides)):
        import torch

        return x.clone(memory_format=torch.contiguous_format)
    return x


def _sdpa(backend, q, k, v, scale, mask=None, causal=False):
    import torch

    if q.is_cuda and not torch.compiler.is_compiling():  # Inductor aligns what it hands over
        q, k, v = map(with_aligned_rows, (q, k, v))
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    with torch.nn.attention.sdpa_kernel(backend):
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, **grouped
        )


def _is_key(k, n_keys):
    """Returns whether a row of k is a key of its sample: bool [B, 1, 1, n_k]."""
    import torch

    return (torch.arange(k.shape[2], device=k.device) < n_keys[:, None])[:, None, None]


def _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal, window):
    """Calls PyTorch's flash kernel for packed sequences. A batch becomes sequences of equal length.

    PyTorch needs the length of the longest sequence on the host, because it decides the grid.
    """
    from inspect import signature

    import torch
    from torch.nn.attention.varlen import varlen_attn

    window = bounded(window, q.shape[2], k.shape[2])

    def ends(x):
        return torch.arange(len(x) + 1, dtype=torch.int32, device=x.device) * x.shape[2]

    if cu_seqlens_q is None:
        longest = q.shape[2], k.shape[2]
        cu_seqlens_q, cu_seqlens_k = ends(q), ends(k)
    else:
        longest = (
            longest_sequence(cu_seqlens_q, "cu_seqlens_q", "q", q.shape[2]),
            longest_sequence(cu_seqlens_k, "cu_seqlens_k", "k", k.shape[2]),
        )
    reach = (window - 1 if window else -1, 0 if causal else window - 1 if window else -1)
    told = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
    if "enable_gqa" not in signature(varlen_attn).parameters:
        told = {}  # torch 2.11 has no such argument and takes grouped heads
    o = varlen_attn(
        to_rows(q), to_rows(k), to_rows(v), cu_seqlens_q, cu_seqlens_k, *longest, scale=scale,
        window_size=reach, **told,
    )  # fmt: skip
    return from_rows(o, len(q))


def longest_sequence(cu_seqlens, name, of, n_rows):
    """Returns the longest of the sequences that are packed into the `n_rows` rows of `of`.

    Raises ValueError if sequences do not follow one another to the last row. See `on_host`.
    """
    ends = on_host(cu_seqlens)
    lengths = [end - begin for begin, end in pairwise(ends)]
    if ends[0] or min(lengths) < 0:
        require_cumulative(name, cu_seqlens.cpu(), of, n_rows)
    require_end(name, ends[-1], of, n_rows)
    return max(lengths)


def on_host(x):
    """Returns a tensor's current numbers, in lists. The host waits for the device.

    The host cannot know whether a replayed CUDA graph has changed them, so every call reads them.
    It cannot read while a graph is captured. Then it takes the numbers of the last call with this
    tensor, and the graph keeps the decisions made from them.

    Raises:
        RuntimeError: a graph is captured, and no call read them before, or the tensor has changed.
    """
    import torch

    if not x.is_cuda:
        return x.tolist()
    version = None if x.is_inference() else x._version
    if torch.cuda.is_current_stream_capturing():
        asked, numbers = _asked().get(x, (None, None))
        if numbers is None or asked != version:
            raise RuntimeError(
                "a CUDA graph is captured, where the host cannot read lengths from the device: "
                "make the same call once before, with the same tensor of lengths"
            )
        return numbers
    numbers = x.tolist()
    _asked()[x] = version, numbers
    return numbers


@cache
def _asked():
    """Returns the map from a tensor to its version and its numbers when the host last read it."""
    from torch.utils.weak import WeakTensorKeyDictionary

    return WeakTensorKeyDictionary()


# An extra dimension separates padding from keys. Queries hold the first number there, and padding
# the second. 16-bit floats hold both. With a scale of 1e-6 or more no score reaches their product.
_ASKING, _PADDING = 6e4, -3e4
_MORE_DIMENSIONS = 8  # the flash backend takes multiples of 8


def sdpa_flash(
    q, k, v, n_keys, cu_seqlens_q, cu_seqlens_k, scale, base2=False, causal=False, window=0
):
    """Calls PyTorch's flash backend. Raises RuntimeError if it cannot run.

    On CUDA it takes no mask. With n_keys, an extra dimension separates padding from keys. That is
    exact, and costs as much as a wider head. `varlen_attn` serves windows, packed sequences, and
    causal attention with unequal numbers of queries and keys. On the CPU the backend takes masks.
    """
    import torch
    from torch.nn.attention import SDPBackend
    from torch.nn.functional import pad

    scale = softmax_scale(scale, base2)
    of_varlen = window or cu_seqlens_q is not None or (causal and q.shape[2] != k.shape[2])
    if not q.is_cuda and (of_varlen or (causal and n_keys is not None)):
        seen = visible(q, k, n_keys, cu_seqlens_q, cu_seqlens_k, causal, window)
        blind = ~seen.any(-1, keepdim=True)
        return _sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, scale, seen | blind).masked_fill(blind, 0)
    if of_varlen:
        return _varlen(q, k, v, cu_seqlens_q, cu_seqlens_k, scale, causal, window)
    if n_keys is None:
        return _sdpa(SDPBackend.FLASH_ATTENTION, q, k, v, scale, causal=causal)
    first = torch.arange(_MORE_DIMENSIONS, device=q.device) == 0
    asking = torch.where(first, _ASKING, 0.0).to(q.dtype)
    telling = torch.where(first & ~_is_key(k, n_keys).mT, _PADDING, 0.0).to(k.dtype)
    q, k = (
        torch.cat([x, more.expand(*x.shape[:3], _MORE_DIMENSIONS)], -1)
        for x, more in ((q, asking), (k, telling))
    )
    o = _sdpa(SDPBackend.FLASH_ATTENTION, q, k, pad(v, (0, _MORE_DIMENSIONS)), scale)
    return o[..., : v.shape[-1]]


def sdpa_cudnn(q, k, v, n_keys, cu_seqlens_q, cu_seqlens_k, scale, base2=False, causal=False):
    """Calls PyTorch's cuDNN backend. Raises RuntimeError if it cannot run."""
    from torch.nn.attention import SDPBackend

    mask = None if n_keys is None else _is_key(k, n_keys)
    scale = softmax_scale(scale, base2)
    return _sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v, scale, mask, causal)


def sdpa_efficient(q, k, v, n_keys, cu_seqlens_q, cu_seqlens_k, scale, base2=False, causal=False):
    """Calls PyTorch's memory-efficient backend. Raises RuntimeError if it cannot run."""
    from torch.nn.attention import SDPBackend

    scale = softmax_scale(scale, base2)
    return _sdpa(SDPBackend.EFFICIENT_ATTENTION, q, k, v, scale, causal=causal)


def _on_cuda(call, backend):
    """Returns why neither backend can serve a call on a GPU, or None."""
    p = call.problem
    if p.itemsize != 2:
        return f"SDPA's {backend} backend on CUDA takes bfloat16 or float16, not {p.dtype}"
    if call.target.capability < 80:
        return f"SDPA's {backend} backend needs compute capability 8.0 or newer"
    if p["causal"] and p["n_keys"]:
        return f"SDPA's {backend} backend takes no causal attention with n_keys"
    if p["head_dim"] % 8:
        return f"SDPA's {backend} backend takes head_dims that 8 divides, not {p['head_dim']}"
    return None


def flash_supported(call):
    """Returns why the flash backend cannot serve a call, or None.

    It takes any of its dtypes on the CPU, and 16-bit floats on GPUs from 8.0 on.
    """
    p = call.problem
    if call.target.kind != "cuda":
        return None
    if p["window"] and p["n_keys"]:
        return "PyTorch's flash kernel takes no window with n_keys"
    if p["n_keys"] and p["head_dim"] > 256 - _MORE_DIMENSIONS:
        return f"with n_keys it takes head_dim up to {256 - _MORE_DIMENSIONS}"
    return _on_cuda(call, "flash")


def cudnn_supported(call):
    """Returns why cuDNN cannot serve a call, or None. It takes 16 bits on GPUs from 8.0 on."""
    p = call.problem
    if call.target.kind != "cuda":
        return f"cuDNN needs a CUDA device, not {call.target.kind}"
    if p["causal"] and p["n_q"] != p["n_k"]:
        return "SDPA's cuDNN backend takes causal attention where there are as many queries as keys"
    return _on_cuda(call, "cuDNN")


def efficient_supported(call):
    """Returns why the memory-efficient backend cannot serve a float32 call, or None."""
    p = call.problem
    if (reason := on_cuda(80)(call)) is not None:
        return reason
    if p["causal"] and p["n_q"] != p["n_k"]:
        return (
            "SDPA's memory-efficient backend takes causal attention where there are as many "
            "queries as keys"
        )
    if p["head_dim"] % 4:
        return (
            "SDPA's memory-efficient backend takes head_dims that 4 divides in float32, not "
            f"{p['head_dim']}"
        )
    return None
