"""Offers `attention` with the arguments of `flash_attn_func` of package flash-attn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tnp.dispatch.devices import of_device
from tnp.dispatch.registry import AUTO
from tnp.ops.attention import attention
from tnp.ops.attention.layouts import heads_first, tokens_first
from tnp.util.checks import require_bools, require_tensors

if TYPE_CHECKING:
    from torch import Tensor

UNBOUNDED = -1  # a side of a window without a bound


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (UNBOUNDED, UNBOUNDED),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    implementation: str = AUTO,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """Returns attention of [B, N, H, D] tensors, as flash-attn's `flash_attn_func` does.

    Args:
        q: [B, n_q, H, D], with the last dimension contiguous; see `attention` for dtypes and D.
        k, v: [B, n_k, H_kv, D], with q's dtype and device. H_kv divides H.
        dropout_p: must be 0.
        softmax_scale: a positive, finite number, or None for 1/√D.
        causal: whether later keys are masked. The last query is aligned with the last key.
        window_size: how many keys a query sees to the left and to the right of its own; −1 sets no
            bound. If causal, the right side is 0. Otherwise it must be 0 or equal to the
            left side.
        softcap: must be 0.
        alibi_slopes: must be None.
        deterministic: whether gradients are equal from run to run. True selects `separate`, or
            `reference` on the CPU.
        return_attn_probs: whether to return the logarithms of softmax's denominators too.
        implementation: an implementation of `attention`, by default "auto". On the CPU "auto" is
            `reference` if logarithms are returned.

    Returns:
        [B, n_q, H, D] in q's dtype. With `return_attn_probs` it returns (this result, the natural
        logarithms [B, H, n_q] in float32, None). flash-attn has probabilities in the third place,
        for tests of its dropout.

    Raises:
        ValueError: an argument must have another value, or shapes, dtypes or devices do not fit.
        RuntimeError: the implementation cannot run here or does not take these arguments.
    """
    require_bools(causal=causal, deterministic=deterministic, return_attn_probs=return_attn_probs)
    require_tensors(q=q, k=k, v=v)
    for name, value in (("dropout_p", dropout_p), ("softcap", softcap)):
        if value != 0:
            raise ValueError(f"{name} is {value!r}: it must be 0, because our attention has none")
    if alibi_slopes is not None:
        raise ValueError(
            "alibi_slopes are given: they must be None, because our attention has none"
        )
    on_cpu = of_device(q.device).kind == "cpu"
    equal = "reference" if on_cpu else "separate"
    if deterministic and implementation not in (AUTO, equal):
        raise ValueError(
            f"deterministic is True and implementation {implementation!r}: only {equal!r} "
            "promises equal gradients here"
        )
    if deterministic or (on_cpu and return_attn_probs and implementation == AUTO):
        implementation = equal
    causal, window = _window(causal, window_size)
    found = attention(
        heads_first(q),
        heads_first(k),
        heads_first(v),
        scale=softmax_scale,
        causal=causal,
        window=window,
        lse=return_attn_probs,
        implementation=implementation,
    )
    if return_attn_probs:
        return tokens_first(found[0]), found[1], None
    return tokens_first(found)


def _window(causal: bool, window_size: tuple[int, int]) -> tuple[bool, int | None]:
    """Returns `causal` and `window` of `attention` for a window of flash-attn."""
    try:
        left, right = window_size
        valid = all(type(side) is int and side >= UNBOUNDED for side in (left, right))
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(
            f"window_size is {window_size!r}: it must be two whole numbers, each at least "
            f"{UNBOUNDED}"
        )
    causal = causal or right == 0
    if not causal and left != right:
        raise ValueError(
            f"window_size is {window_size!r}: without causal both sides must be equal, or the "
            "right one 0"
        )
    return causal, None if left == UNBOUNDED else left + 1
