"""Launches attention in CUDA C++. Comments of the .cu files explain it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from tnp.dispatch.spec import Call, Kernel
from tnp.ops.attention.primitives import (
    LOG2_E,
    KeyGradients,
    backward,
    empty,
    empty_backward,
    forward,
    lse_layout,
    row_strides,
    rows_layout,
)
from tnp.ops.attention.torch_forms import with_aligned_rows
from tnp_lab import nvrtc
from tnp_lab.attention import OPTIONS
from tnp_lab.launch import Bound

WMMA = "tnp_lab.attention.wmma:attention_wmma"
WMMA_STEPS = "tnp_lab.attention.wmma_steps:attention_wmma_steps"
CUTE = "tnp_lab.attention.cute:attention_cute"
DELTA, DKDV, DQ = (
    f"tnp_lab.attention.backward:attention_{name}" for name in ("delta", "dkdv", "dq")
)
CUTE_TYPES = {"bfloat16": "cute::bfloat16_t", "float16": "cute::half_t"}
WARPS = 4
BACKWARD_ROWS_A_WARP = 16  # keys or queries that a warp of `backward.cu` owns


def prepare_wmma(call: Call, config: object, inputs: tuple) -> Callable:
    """Prepares one launch of `wmma.cu`, with a block for 64 queries of a head."""
    return _prepare(call, inputs, WMMA, nvrtc.TYPES, 16)


def prepare_cute(call: Call, config: object, inputs: tuple) -> Callable:
    """Prepares one launch of `cute.cu`.

    A block has 128 queries, or 64 if there are no more blocks of 128 than multiprocessors.
    """
    batch, n_heads, n_q = inputs[0].shape[:3]
    n_blocks = batch * n_heads * -(-n_q // (32 * WARPS))
    queries = 16 if n_blocks <= call.target.multiprocessors else 32
    return _prepare(
        call, inputs, CUTE, CUTE_TYPES, queries, nvrtc.cutlass() or "", QUERIES_A_WARP=queries
    )


def prepare_wmma_step(call: Call, config: object, inputs: tuple, step: int) -> Callable:
    """Prepares one launch of `wmma_steps.cu`, with a block for 64 queries of a head, or for 32."""
    # Step 1 holds q and o in shared memory: 64 queries at D = 128 do not fit in 48 KB.
    warps = WARPS if call.problem["head_dim"] <= 64 or step > 1 else WARPS // 2
    return _prepare(call, inputs, WMMA_STEPS, nvrtc.TYPES, 16, warps=warps, STEP=step)


def _prepare(
    call: Call,
    inputs: tuple,
    kernel: str,
    types: Mapping[str, str],
    queries_a_warp: int,
    cutlass: str = "",
    warps: int = WARPS,
    **constants: int,
) -> Callable:
    as_read = with_aligned_rows if not call.aligned else lambda x: x
    q, k, v = map(as_read, inputs[:3])
    n_heads, n_q, head_dim = q.shape[1:]
    o_shape, o_strides = rows_layout(q)
    lse_shape, lse_strides = lse_layout(q)
    n_tiles = -(-n_q // (warps * queries_a_warp))
    lines = nvrtc.constants(
        TYPE=types[call.problem.dtype], HEAD_DIM=head_dim, WARPS=warps, **constants
    )
    bound = Bound(
        nvrtc.Source(kernel, lines, cutlass), call.target.capability,
        (n_tiles * q.shape[0] * n_heads,), warps * nvrtc.WARP,
        *row_strides(q), *row_strides(k), *row_strides(v), *o_strides[:3],
        n_heads, n_heads // k.shape[1], n_q, k.shape[2], n_tiles, int(call.problem["causal"]),
    )  # fmt: skip

    def launch(inputs, scalars):
        q, k, v = map(as_read, inputs[:3])
        o = q.new_empty_strided(o_shape, o_strides)
        lse = q.new_empty_strided(lse_shape, lse_strides, dtype=torch.float32)
        bound(q, k, v, o, lse, scalars[0] * LOG2_E)
        return (o,), (lse,)

    return forward(launch, call)


@backward
def prepare_backward(call, config, do, q, k, v, lengths, o, lse, dlse):
    """Prepares the three launches of `backward.cu`: delta; dk and dv; and dq."""
    as_read = with_aligned_rows if not call.aligned else lambda x: x
    do, q, k, v = map(as_read, (do, q, k, v))
    batch, n_heads, n_q, head_dim = q.shape
    n_kv_heads, n_k = k.shape[1:3]
    dq_shape, dq_strides = rows_layout(q)
    key_gradients, delta_layout = KeyGradients(k, call.apart), lse_layout(q)
    # 64 owned rows at D = 128 do not fit in 48 KB of shared memory.
    warps = WARPS if head_dim <= 64 else WARPS // 2
    constants = nvrtc.constants(
        TYPE=nvrtc.TYPES[call.problem.dtype], HEAD_DIM=head_dim, WARPS=warps
    )
    strides = *row_strides(q), *row_strides(k), *row_strides(v), *row_strides(do)
    causal = int(call.problem["causal"])

    def bound(kernel: str, blocks: int, *integers: int) -> Bound:
        source = nvrtc.Source(kernel, constants)
        return Bound(source, call.target.capability, (blocks,), warps * nvrtc.WARP, *integers)

    def walking(kernel: str, n_owned: int, heads: int, written: tuple[int, int, int]) -> Bound:
        """Returns a launch in which each block owns one tile of a head's `n_owned` rows.

        `heads` counts the heads per sample that own rows. `written` are the gradients' strides.
        """
        n_tiles = -(-n_owned // (warps * BACKWARD_ROWS_A_WARP))
        sizes = n_heads, n_heads // n_kv_heads, n_q, n_k, n_tiles, causal
        return bound(kernel, n_tiles * batch * heads, *strides, *written, *sizes)

    n_rows = batch * n_heads * n_q
    delta_strides = *row_strides(o), *row_strides(do)
    fill_delta = bound(DELTA, -(-n_rows // warps), *delta_strides, n_heads, n_q, n_rows)
    dkdv_kernel = walking(DKDV, n_k, n_kv_heads, key_gradients.strides)
    dq_kernel = walking(DQ, n_q, n_heads, dq_strides[:3])

    def launch(do, q, k, v, lengths, o, lse, dlse, scale):
        do, q, k, v = map(as_read, (do, q, k, v))
        delta = lse.new_empty_strided(*delta_layout)
        fill_delta(o, do, delta)
        if dlse is not None:
            delta -= dlse  # dlse enters every score's gradient like -delta
        dk, dv = key_gradients.allocate(k)
        dkdv_kernel(q, k, v, do, lse, delta, dk, dv, scale, scale * LOG2_E)
        dq = q.new_empty_strided(dq_shape, dq_strides)
        dq_kernel(q, k, v, do, lse, delta, dq, scale, scale * LOG2_E)
        return dq, dk, dv

    return launch


_BUILT = tuple(nvrtc.ARCHITECTURES)
FORWARD_WMMA = Kernel("cuda", empty, prepare_wmma, options=OPTIONS, compiled_for=_BUILT)
FORWARD_CUTE = Kernel("cuda", empty, prepare_cute, options=OPTIONS, compiled_for=_BUILT)
BACKWARD_WMMA = Kernel(
    "cuda", empty_backward, prepare_backward, options=OPTIONS, compiled_for=_BUILT
)


def _step(step: int) -> Kernel:
    by = partial(prepare_wmma_step, step=step)
    return Kernel("cuda", empty, by, options=OPTIONS, compiled_for=_BUILT)


FORWARD_WMMA_STEP_1 = _step(1)
FORWARD_WMMA_STEP_2 = _step(2)
FORWARD_WMMA_STEP_3 = _step(3)
