"""Computes attention: every query attends to the keys that it sees.

    o = softmax(scale · q kᵀ) v

A query sees all keys of its sample or of its packed sequence. With `causal` it sees only keys up to
its own, with `window` only keys near it. Heads of queries may share heads of keys. `keys` defines
which keys a query sees.

Our implementations, `separate` and `fused`, share the forward pass and differ in the backward pass.
`separate` gives gradients that are equal from run to run. `fused` may add dq up in any order.
`portable` is `separate` without Hopper's warp-specialized kernels. `e4m3` computes both products
of the forward pass in 8 bits, and has the backward pass of `fused`. `tnp_lab` adds `simple`,
`wmma` with three steps on the way to it, and `cute`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tnp.dispatch.spec import (
    ALL_FLOATS,
    Budget,
    Call,
    Implementation,
    Operation,
    Operator,
    Reason,
    lacks_shared,
    triton_from,
)
from tnp.ops._shared.declared import compiled
from tnp.ops.attention import cases, definition, eight_bit, torch_forms
from tnp.util.checks import (
    positive_number,
    require_16_bits,
    require_alike,
    require_between,
    require_bools,
    require_count,
    require_cumulative,
    require_floats,
    require_lengths,
    require_one_device,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["attention"]

HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 192, 256)
# Bytes of shared memory that the backward pass for few keys needs, where it needs more than 99 KB:
# by the keys that it holds, bytes of an element, and head_dim.
FEW_KEYS_BYTES = {(128, 2, 128): 110_592, (64, 4, 64): 106_496, (128, 4, 32): 114_688}
_INFINITY = float("inf")
_triton = triton_from(80)


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n_keys: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    base2: bool = False,
    causal: bool = False,
    window: int = 0,
    lse: bool = False,
) -> dict[str, int]:
    """Returns sizes, n_kv_heads and n_sequences. Raises ValueError if tensors do not fit."""
    definition.require_heads(q, k, v)
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}: they must agree in batch and head_dim"
        )
    if k.shape[2] == 0:
        raise ValueError("n_k is 0: attention needs at least one key")
    batch, n_heads, n_q, head_dim = q.shape
    n_kv_heads = k.shape[1]
    if n_heads == 0:
        raise ValueError("q has 0 heads: attention needs at least one")
    if n_kv_heads == 0 or n_heads % n_kv_heads:
        raise ValueError(f"k has {n_kv_heads} heads and q {n_heads}: k's heads must divide q's")
    found = {"batch": batch, "n_heads": n_heads, "n_q": n_q, "n_k": k.shape[2]}
    found |= {"head_dim": head_dim}
    if n_kv_heads != n_heads:
        found["n_kv_heads"] = n_kv_heads
    if cu_seqlens_q is not None or cu_seqlens_k is not None:
        found["n_sequences"] = _n_sequences(q, n_keys, cu_seqlens_q, cu_seqlens_k)
    elif n_keys is not None:
        require_lengths(q, n_keys=n_keys)
    return found


def _n_sequences(
    q: Tensor, n_keys: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> int:
    """Returns how many sequences are packed. Raises ValueError if cu_seqlens cannot say."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{missing} is None: packed sequences need cu_seqlens of both sides")
    if n_keys is not None:
        raise ValueError("n_keys and cu_seqlens are both given: packed sequences take cu_seqlens")
    if q.shape[0] != 1:
        raise ValueError(f"q has a batch of {q.shape[0]}: packed sequences lie in a batch of 1")
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x.dim() != 1 or len(x) < 2 or str(x.dtype) != "torch.int32" or not x.is_contiguous():
            raise ValueError(
                f"{name} is {x.dtype} {tuple(x.shape)} with strides {x.stride()}: it must be int32 "
                "[n_sequences + 1], contiguous"
            )
    require_one_device(q=q, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    if len(cu_seqlens_q) != len(cu_seqlens_k):
        raise ValueError(
            f"cu_seqlens_q has {len(cu_seqlens_q)} numbers and cu_seqlens_k {len(cu_seqlens_k)}: "
            "they must have equally many"
        )
    return len(cu_seqlens_q) - 1


def _ours(call: Call) -> Reason:
    if (reason := _triton(call)) is not None:
        return reason
    if call.problem["head_dim"] not in HEAD_DIMS:
        taken = ", ".join(map(str, HEAD_DIMS))
        return f"it takes head_dim {taken}, not {call.problem['head_dim']}"
    return None


def _fastest(call: Call) -> Reason:
    """Returns why `separate` and `fused` cannot serve a call, or None."""
    p = call.problem
    few = all(name in (*definition.OPTIONS, "lse") for name, _ in p.options)
    if (reason := _ours(call)) is not None or not (call.wanted and few):
        return reason
    held = next((block for block in (64, 128) if p["n_k"] <= block), p["n_k"])
    needed = FEW_KEYS_BYTES.get((held, p.itemsize, p["head_dim"]), 0)
    return lacks_shared(call, needed)


def _operation(name: str, *kernels: str) -> Operation:
    return Operation(f"attention.{name}", tuple(f"{__name__}.{kernel}" for kernel in kernels))


FORWARD = _operation(
    "forward", "few_keys:FORWARD", "hopper.forward:FORWARD", "portable.forward:FORWARD"
)
# The backward pass for few keys is one launch without atomics. It serves as both forms.
SEPARATE = _operation(
    "separate", "few_keys:BACKWARD", "hopper.backward:SEPARATE", "portable.backward:SEPARATE"
)
FUSED = _operation("fused", "few_keys:BACKWARD", "hopper.backward:FUSED", "portable.backward:FUSED")
PORTABLE_FORWARD = _operation("portable_forward", "portable.forward:FORWARD")
PORTABLE_BACKWARD = _operation("portable_backward", "portable.backward:SEPARATE")
IN_8_BITS = _operation("forward_8bit", "eight_bit.hopper:FORWARD", "eight_bit.portable:FORWARD")
OPERATOR = Operator(
    "attention",
    phase=2,
    phases={SEPARATE: 3, PORTABLE_BACKWARD: 3, FUSED: 4},
    inputs=("q", "k", "v", "n_keys?", "cu_seqlens_q?", "cu_seqlens_k?"),
    outputs=("o", "lse"),
    scalars={"scale": definition.SCALE},
    sizes=("batch", "n_heads", "n_q", "n_k", "head_dim"),
    options={
        "base2": bool,
        "causal": bool,
        "window": int,
        "n_kv_heads": int,
        "n_sequences": int,
        "lse": bool,
    },
    read_off=("n_kv_heads", "n_sequences"),
    differentiated=("q", "k", "v"),
    keeps=("q", "k", "v", "n_keys", "cu_seqlens_q", "cu_seqlens_k", "o"),
    implementations=(
        Implementation(
            "sdpa_flash",
            run=torch_forms.sdpa_flash,
            provider="torch",
            supported=torch_forms.flash_supported,
            options=definition.OF_ANY_KIND,
            dispatches=("aten::_scaled_dot_product_flash_attention",),
        ),
        Implementation(
            "sdpa_cudnn",
            run=torch_forms.sdpa_cudnn,
            provider="torch",
            supported=torch_forms.cudnn_supported,
            options=(*definition.OPTIONS, "causal", "n_kv_heads"),
            dispatches=("aten::_scaled_dot_product_cudnn_attention",),
        ),
        Implementation(
            "sdpa_efficient",
            run=torch_forms.sdpa_efficient,
            provider="torch",
            supported=torch_forms.efficient_supported,
            dtypes=("float32",),
            options=("base2", "causal"),
            dispatches=("aten::_scaled_dot_product_efficient_attention",),
            selectable=False,
        ),
        *compiled(torch_forms.reference, definition.WITH_LSE, selectable=False),
        Implementation(
            "separate",
            forward=FORWARD,
            backward=SEPARATE,
            supported=_fastest,
            options=definition.WITH_LSE,
        ),
        Implementation(
            "fused",
            forward=FORWARD,
            backward=FUSED,
            supported=_fastest,
            options=definition.WITH_LSE,
        ),
        Implementation(
            "portable",
            forward=PORTABLE_FORWARD,
            backward=PORTABLE_BACKWARD,
            supported=_ours,
            options=definition.WITH_LSE,
            selectable=False,
        ),
        Implementation(
            "e4m3",
            forward=IN_8_BITS,
            backward=FUSED,
            supported=eight_bit.supported,
            dtypes=("bfloat16",),
            options=eight_bit.TAKEN,
            precision="e4m3",
            budget=Budget(
                emulate=eight_bit.held,
                rounded=eight_bit.rounded,
                differentiates=eight_bit.differentiates,
            ),
            work=eight_bit.work,
        ),
        Implementation(
            "reference",
            run=torch_forms.reference,
            provider="torch",
            dtypes=ALL_FLOATS,
            options=definition.WITH_LSE,
            selectable=False,
        ),
    ),
    describe=describe,
    draw=definition.draw,
    reference=torch_forms.reference,
    work=definition.work,
    partial_reference=definition.partial_reference,
    cases=lambda target: cases.cases(OPERATOR, target),
    condition=lambda case, inputs: cases.condition(OPERATOR, case, inputs),
    controls=cases.CONTROLS,
    other_lengths=definition.other_lengths,
    out_of_range=definition.out_of_range,
    controls_of=cases.CONTROLS_OF,
    within=lambda model, run: definition.within(OPERATOR, model, run),
    compiled=lambda target: definition.compiled(OPERATOR, target),
    suite=lambda dtype: definition.suite(OPERATOR, dtype),
    fixed=("head_dim", "causal", "window"),
    random_problem=lambda random, dtype: definition.random_problem(OPERATOR, random, dtype),
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    base2: bool = False,
    causal: bool = False,
    window: int | None = None,
    n_keys: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    lse: bool = False,
    compute_dtype: torch.dtype | None = None,
    implementation: str = "sdpa_flash",
) -> Tensor | tuple[Tensor, Tensor]:
    """Returns softmax(scale · q kᵀ) v over the keys that each query sees, and 0 if it sees none.

    Query i is beside key i + n − n_q, where n is n_k or the sample's n_keys. So the last query is
    beside the last key, and a cache of keys may be longer than the queries.

    Args:
        q: [B, H, n_q, D], a float dtype. Any strides with the last dimension contiguous, such as
            views of a fused projection. Ours take D = 16, 32, 48, 64, 80, 96, 128, 192 and 256.
            `e4m3` takes bfloat16 and D = 64.
        k, v: [B, H_kv, n_k, D], n_k ≥ 1, with q's dtype and device. H_kv divides H. The H / H_kv
            heads of q from h · H / H_kv on share head h of k and v.
        scale: a positive, finite number, or None for 1/√D.
        base2: q carries scale · log2(e) already, as `project_qkv` returns it on request:
            o = Σ_j 2^(q·k_j) v_j / Σ_j 2^(q·k_j). Kernels for Hopper then need no reference and
            are faster.
        causal: a query sees no key after the one beside it. The mask is aligned bottom right, as in
            FlashAttention. PyTorch's `is_causal` is aligned top left.
        window: the most keys that a query sees to one side, with the key beside it. If causal these
            are the last `window` keys, else window − 1 more on either side. A window of n_q + n_k
            or more bounds nothing.
        n_keys: int32 [B] on q's device, each from 1 to n_k, or None for n_k. Sample b has keys
            0 … n_keys[b] − 1. Later rows of k and v are padding: any finite values. Their weight
            and gradient are exactly 0. A number out of range is a ValueError on the CPU. On CUDA
            the host does not know it: ours make all results of its sample NaN. With TNP_CHECK=1 in
            the environment they assert it, at the next synchronization. PyTorch's implementations
            use the mask that the number gives.
        cu_seqlens_q, cu_seqlens_k: int32 [n_sequences + 1] on q's device. Sequence s has rows
            cu_seqlens[s] … cu_seqlens[s + 1] − 1 of queries, and of keys. B is 1. They begin with
            0, never decrease, and end with n_q and n_k. Else they are a ValueError on the CPU, and
            with `sdpa_flash`, which reads them from the device. On CUDA ours make all results NaN,
            or with TNP_CHECK=1 assert.
        lse: whether to return the logarithm of softmax's denominator too. It serves to combine
            attention over parts of the keys. Ours and `reference` take it.
        compute_dtype: torch.bfloat16 or torch.float16 to compute float32 inputs in 16 bits. q, k
            and v are cast to it, and o is cast back. Gradients have the inputs' dtypes. None: the
            inputs' own dtype.
        implementation: a name of `tnp.dispatch.registry`, "torch" for `sdpa_flash`, "own" for
            the best of ours, or "auto".

    Returns:
        [B, H, n_q, D] in q's dtype. Ours lie in memory as [B, n_q, H, D]. If `lse`, it returns a
        pair: this result, and log Σ e^(scale · q kᵀ) over the keys that a query sees. The logarithm
        is natural, [B, H, n_q], in float32, or float64 for float64 inputs, and −inf if a query sees
        no key. Gradients pass through both.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together; a scale or window is out of
            range; both scale and base2 are given; compute_dtype has not 16 bits; base2, causal or
            lse is no bool; or on the CPU n_keys or cu_seqlens are invalid.
        RuntimeError: the implementation cannot run here or does not take this, with the reason.
    """
    import tnp.dispatch.call as dispatch

    if not (base2.__class__ is causal.__class__ is lse.__class__ is bool):
        require_bools(base2=base2, causal=causal, lse=lse)
    # `describe` and `call` refuse other objects and dimensions.
    shaped = getattr(q, "ndim", 0) == getattr(k, "ndim", 0) == 4
    if scale is None:
        scale = (q.shape[-1] or 1) ** -0.5 if shaped else 1.0
    elif base2:
        raise ValueError(f"scale is {scale} and base2 is set: q carries the scale then")
    elif scale.__class__ is not float or not 0.0 < scale < _INFINITY:
        scale = positive_number("scale", scale)
    options = (("base2", True),) if base2 else ()
    if causal:
        options += (("causal", True),)
    if window is not None:
        window = require_count("window", window, 1)
        if not shaped or window < q.shape[2] + k.shape[2]:
            options += (("window", window),)
    if lse:
        options += (("lse", True),)
    if shaped:
        if n_keys is not None:
            require_between("n_keys", n_keys, 1, k.shape[2])
        if cu_seqlens_q is not None:
            require_cumulative("cu_seqlens_q", cu_seqlens_q, "q", q.shape[2])
        if cu_seqlens_k is not None:
            require_cumulative("cu_seqlens_k", cu_seqlens_k, "k", k.shape[2])
    if compute_dtype is None:
        inputs = (q, k, v, n_keys, cu_seqlens_q, cu_seqlens_k)
        return dispatch.call(OPERATOR, implementation, inputs, (scale,), options)
    require_16_bits("compute_dtype", compute_dtype)
    require_floats(q=q, k=k, v=v)
    require_alike(q=q, k=k)
    require_alike(q=q, v=v)
    cast = tuple([x.to(compute_dtype) for x in (q, k, v)])
    inputs = (*cast, n_keys, cu_seqlens_q, cu_seqlens_k)
    found = dispatch.call(OPERATOR, implementation, inputs, (scale,), options)
    return (found[0].to(q.dtype), found[1]) if lse else found.to(q.dtype)
