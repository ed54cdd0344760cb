"""Attention: every query attends to the keys that it sees.

    o = softmax(scale · q kᵀ) v

A query sees all keys of its sample; where asked to, those up to its own (`causal`) or near it
(`window`) alone, or those of its packed sequence. Heads of queries may share heads of keys. Which
keys these are is answered in `keys`.

Ours, `separate` and `fused`, share the forward pass and differ in the backward. `separate` gives
gradients that are equal from run to run: the portable kernels by two launches, dk and dv and then
dq, Hopper's by one that adds dq up in one order. `fused` may add it up in any. `portable` is
`separate` without Hopper's warp-specialized kernels. `wmma` and `cute` are CUDA C++ to learn from,
and the portable backward pass reads their lse. `e4m3` has both products of the forward pass in
8 bits, and no backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tnp.dispatch import nvrtc
from tnp.dispatch.spec import (
    ALL_FLOATS,
    Budget,
    Call,
    Implementation,
    Operation,
    Operator,
    Reason,
    triton_from,
)
from tnp.ops._shared.declared import by_cuda
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

HEAD_DIMS = (16, 32, 48, 64, 80, 96, 128, 192, 256)
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
    """Sizes, n_kv_heads and n_sequences; ValueError where the tensors do not go together."""
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
        raise ValueError(f"k has {n_kv_heads} heads and q {n_heads}: theirs must divide q's")
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
    """How many sequences are packed; ValueError where what says so is no such thing."""
    if cu_seqlens_q is None or cu_seqlens_k is None:
        missing = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ValueError(f"{missing} is None: packed sequences need cu_seqlens of both sides")
    if n_keys is not None:
        raise ValueError("n_keys and cu_seqlens are both given: of packed sequences cu_seqlens say")
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
            "they must have as many"
        )
    return len(cu_seqlens_q) - 1


def _ours(call: Call) -> Reason:
    if (reason := _triton(call)) is not None:
        return reason
    if call.problem["head_dim"] not in HEAD_DIMS:
        taken = ", ".join(map(str, HEAD_DIMS))
        return f"it takes head_dim {taken}, not {call.problem['head_dim']}"
    return None


def _in_cuda(call: Call) -> Reason:
    p = call.problem
    if p["head_dim"] not in (64, 128):
        return f"it takes head_dim 64 and 128, not {p['head_dim']}"
    if call.wanted and call.target.capability < 80:
        return "its backward pass is Triton's, from compute capability 8.0 on"
    if p.dtype == "bfloat16" and call.target.capability < 80:
        return "tensor cores take bfloat16 from compute capability 8.0 on"
    return None


def _in_cute(call: Call) -> Reason:
    if call.target.capability < 80:
        return "its instructions are of compute capability 8.0 and newer"
    return _in_cuda(call)


def _operation(name: str, *kernels: str) -> Operation:
    return Operation(f"attention.{name}", tuple(f"{__name__}.{kernel}" for kernel in kernels))


FORWARD = _operation(
    "forward", "few_keys:FORWARD", "hopper_forward:FORWARD", "triton_forward:FORWARD"
)
# The backward pass for few keys is one launch without atomics: the deterministic form, and fused.
SEPARATE = _operation(
    "separate",
    "few_keys:BACKWARD",
    "hopper_backward:SEPARATE_BY_HEAD",
    "hopper_backward:SEPARATE",
    "triton_backward:SEPARATE",
)
FUSED = _operation(
    "fused",
    "few_keys:BACKWARD",
    "hopper_backward:FUSED_BY_HEAD",
    "hopper_backward:FUSED",
    "triton_backward:FUSED",
)
PORTABLE_FORWARD = _operation("portable_forward", "triton_forward:FORWARD")
PORTABLE_BACKWARD = _operation("portable_backward", "triton_backward:SEPARATE")
IN_8_BITS = _operation("forward_8bit", "hopper_8bit:FORWARD", "triton_8bit:FORWARD")
OPERATOR = Operator(
    "attention",
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
    shown=("n_kv_heads", "n_sequences"),
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
            "separate",
            forward=FORWARD,
            backward=SEPARATE,
            supported=_ours,
            options=definition.WITH_LSE,
        ),
        Implementation(
            "fused",
            forward=FORWARD,
            backward=FUSED,
            supported=_ours,
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
        by_cuda(
            "wmma",
            "attention",
            f"{__name__}.cuda_attention:FORWARD_WMMA",
            _in_cuda,
            backward=PORTABLE_BACKWARD,
            dtypes=("bfloat16", "float16"),
            options=definition.IN_CUDA,
        ),
        by_cuda(
            "cute",
            "attention",
            f"{__name__}.cuda_attention:FORWARD_CUTE",
            _in_cute,
            nvrtc.missing_for_cute,
            backward=PORTABLE_BACKWARD,
            dtypes=("bfloat16", "float16"),
            options=definition.IN_CUDA,
        ),
        Implementation(
            "e4m3",
            forward=IN_8_BITS,
            supported=eight_bit.supported,
            dtypes=("bfloat16",),
            options=definition.OPTIONS,
            precision="e4m3",
            budget=Budget(emulate=eight_bit.held, rounded=eight_bit.rounded),
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
    spot=definition.spot,
    cases=lambda target: cases.cases(OPERATOR, target),
    condition=lambda case, inputs: cases.condition(OPERATOR, case, inputs),
    controls=cases.CONTROLS,
    other_lengths=definition.other_lengths,
    out_of_range=definition.out_of_range,
    controls_of=cases.CONTROLS_OF,
    within=lambda model, run: definition.within(OPERATOR, model, run),
    compiled=lambda target: definition.compiled(OPERATOR, target),
    fixed=("head_dim", "causal", "window"),
    coordinates=definition.coordinates,
    drawn=lambda random, dtype: definition.drawn(OPERATOR, random, dtype),
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
    """softmax(scale · q kᵀ) v over the keys that each query sees; 0 where it sees none.

    Query i stands beside key i + n − n_q, where n is n_k or the sample's n_keys: the last query
    beside the last key. So a cache of keys may be longer than the queries.

    Args:
        q: [B, H, n_q, D], a float dtype. Any strides with the last dimension contiguous, such as
            views of a fused projection. Ours take D = 16, 32, 48, 64, 80, 96, 128, 192 and 256,
            `e4m3` bfloat16 and 64.
        k, v: [B, H_kv, n_k, D], n_k ≥ 1, like q in dtype and device. H_kv divides H: heads
            h · H / H_kv … of q share head h of k and v.
        scale: a number, positive and finite; 1/√D where None.
        base2: q carries scale · log2(e) already, as `project_qkv` hands it over where asked to:
            o = Σ_j 2^(q·k_j) v_j / Σ_j 2^(q·k_j). Kernels for Hopper then do without a reference
            and are some 5 % faster.
        causal: a query sees no key after the one it stands beside. The mask is aligned bottom
            right, as in FlashAttention; PyTorch's `is_causal` is aligned top left.
        window: how many keys a query sees at most to one side, the one it stands beside among
            them: the last `window` where causal, else window − 1 more on either side. One of
            n_q + n_k or more bounds nothing and is left out.
        n_keys: int32 [B] on q's device, each from 1 to n_k, or None for n_k everywhere: sample b
            has keys 0 … n_keys[b] − 1. Rows of k and v past them are padding: any finite values, of
            weight exactly 0 and gradient exactly 0. A number out of range is a ValueError on the
            CPU. On CUDA, where the host does not know it, ours make all results of its sample NaN;
            with TNP_CHECK=1 in the environment, they assert it instead,
            at the next synchronization. PyTorch's take it as the mask that it makes.
        cu_seqlens_q, cu_seqlens_k: int32 [n_sequences + 1] on q's device: sequence s has rows
            cu_seqlens[s] … cu_seqlens[s + 1] − 1 of queries and of keys. B is 1. They begin with 0,
            never decrease, and end with n_q and n_k. Anything else is a ValueError on the CPU, and
            from `sdpa_flash`, which asks the device. On CUDA it makes all results of ours NaN, or
            with TNP_CHECK=1 an assertion.
        lse: whether to return the logarithm of what softmax divides by as well, by which attention
            over parts of the keys can be put together. Ours and `reference` take it.
        compute_dtype: torch.bfloat16 or torch.float16 for float32 inputs that may be computed in 16
            bits, on request: q, k and v are cast to it and o back, and gradients come in the
            inputs' dtypes. None: they are computed in their own.
        implementation: a name of `tnp.dispatch.registry`, "torch" for `sdpa_flash`, "own" for the
        best of
            ours, or "auto".

    Returns:
        [B, H, n_q, D] in q's dtype, laid out [B, n_q, H, D] by ours. If `lse`, the pair of it and
        log Σ e^(scale · q kᵀ) over the keys that a query sees, natural, [B, H, n_q] in float32
        (float64 of what is computed in float64), −inf where it sees none; gradients pass through
        both.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together, a scale or a window out of
            range, both scale and base2, a compute_dtype of other than 16 bits, a base2, causal or
            lse that is no bool, or on the CPU n_keys or cu_seqlens that cannot be.
        RuntimeError: the implementation cannot run here or does not take this, with the reason.
    """
    from tnp.dispatch.call import call

    if not (base2.__class__ is causal.__class__ is lse.__class__ is bool):
        require_bools(base2=base2, causal=causal, lse=lse)
    # What is no tensor or of other dimensions `describe` and `call` refuse.
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
        return call(OPERATOR, implementation, inputs, (scale,), options)
    require_16_bits("compute_dtype", compute_dtype)
    require_floats(q=q, k=k, v=v)
    require_alike(q=q, k=k)
    require_alike(q=q, v=v)
    cast = tuple([x.to(compute_dtype) for x in (q, k, v)])
    inputs = (*cast, n_keys, cu_seqlens_q, cu_seqlens_k)
    found = call(OPERATOR, implementation, inputs, (scale,), options)
    return (found[0].to(q.dtype), found[1]) if lse else found.to(q.dtype)
