"""Computes attention forward in 8 bits in portable Triton, with the same numbers as `hopper`.

It has the same scales and blocks of 128 keys, takes the last block first, and adds up in the same
order. It saves `lse` [B, H, n_q] for the backward pass, in float32 and to base 2.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call, Kernel
from tnp.ops._shared.primitives import KernelConfig, cast, dot, key_count
from tnp.ops.attention.eight_bit import RANGE, TAKEN
from tnp.ops.attention.eight_bit.quantize import BLOCK, key_at, quantizer, value_offsets
from tnp.ops.attention.primitives import (
    LOG2_E,
    empty,
    forward,
    head_ptr,
    load_rows,
    lse_layout,
    n_query_tiles,
    rows_layout,
    store_rows,
)

_RANGE = tl.constexpr(RANGE)


@dataclass(frozen=True)
class Config(KernelConfig):
    """Configures the launch: queries of a program, warps and stages. A block has 128 keys."""

    block_m: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["n_q", "n_k"])
def _attention_fwd_8bit_kernel(
    q8_ptr, k8_ptr, v8_ptr, q_scale_ptr, q_vector_ptr, scales_ptr, vector_ptr, o_ptr, lse_ptr,
    n_keys_ptr,
    stride_ob, stride_oh, stride_om, n_heads, n_q, n_k, scale_log2,
    HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, HAS_N_KEYS: tl.constexpr,
):  # fmt: skip
    """Writes o and lse. A program owns a tile of queries."""
    n_tiles = tl.cdiv(n_q, BLOCK_M)
    pid_bh = tl.program_id(0) // n_tiles
    offs_m = tl.program_id(0) % n_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    n_blocks = tl.cdiv(n_k, BLOCK)
    head = pid_bh.to(tl.int64)
    q8_ptr += head * n_q * HEAD_DIM
    k8_ptr += head * n_k * HEAD_DIM
    v8_ptr += head * n_blocks * BLOCK * HEAD_DIM
    scales_ptr += head * n_blocks * 2
    offs_d = tl.arange(0, HEAD_DIM)
    positions = tl.arange(0, BLOCK)

    q = load_rows(q8_ptr, offs_m, n_q, HEAD_DIM, HEAD_DIM, True)
    of_row = tl.load(q_scale_ptr + head * n_q + offs_m, mask=offs_m < n_q, other=0.0) * scale_log2
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    n_keys = key_count(n_keys_ptr, pid_bh // n_heads, n_k, HAS_N_KEYS)
    n_own = tl.cdiv(n_keys, BLOCK)
    unit = tl.load(scales_ptr + 2 * n_own - 1)
    for i in tl.range(0, n_own):
        block = (i + n_own - 1) % n_own
        # Keys are loaded in the order of their values, so that the scores' columns need no
        # exchange.
        keys = block * BLOCK + key_at(positions)
        k = load_rows(k8_ptr, keys, n_keys, HEAD_DIM, HEAD_DIM, True)
        s = dot(q, tl.trans(k)) * (of_row * tl.load(scales_ptr + 2 * block))[:, None]
        s = tl.where(keys[None, :] < n_keys, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.math.ceil(tl.max(s, 1)))
        p = tl.math.exp2(s - m_new[:, None] + _RANGE)
        next_unit = tl.load(scales_ptr + 2 * block + 1)
        l_i = l_i * tl.math.exp2(m_i - m_new) + tl.sum(p, 1)
        v_t = tl.load(v8_ptr + value_offsets(block, positions[None, :], offs_d[:, None], HEAD_DIM))
        o = dot(cast(p, v_t.dtype), tl.trans(v_t))
        # Without `fma` Triton would add it in the tensor cores, which keep 13 bits.
        rescale = tl.math.exp2(m_i - m_new + (unit - next_unit))
        acc = tl.math.fma(acc, tl.broadcast_to(rescale[:, None], [BLOCK_M, HEAD_DIM]), o)
        m_i = m_new
        unit = next_unit
    o = acc * (tl.math.exp2(unit) / l_i)[:, None]
    o += tl.load(vector_ptr + pid_bh * HEAD_DIM + offs_d)[None, :]
    o_ptr = head_ptr(o_ptr, stride_ob, stride_oh, pid_bh, n_heads)
    store_rows(o_ptr, o, offs_m, n_q, stride_om, HEAD_DIM)
    at = head * n_q + offs_m
    q_vector = tl.load(q_vector_ptr + at, mask=offs_m < n_q, other=0.0)
    lse = m_i - _RANGE + tl.math.log2(l_i) + q_vector * scale_log2
    tl.store(lse_ptr + at, lse, mask=offs_m < n_q)


def configs(call: Call) -> tuple[Config, ...]:
    """Returns the candidates, the default first."""
    return (Config(64, 4, 2), Config(128, 8, 2))


def prepare(call: Call, config: Config, inputs: tuple) -> Callable:
    """Prepares the quantization, and one launch with a program for each tile of queries."""
    q, k, _, n_keys = inputs[:4]
    _, n_heads, n_q, head_dim = q.shape
    of_o, of_lse = rows_layout(q), lse_layout(q)
    quantize = quantizer(call, inputs)
    kernel = Bound(
        _attention_fwd_8bit_kernel, (n_query_tiles(call, config.block_m),),
        *of_o[1][:3], n_heads, n_q, k.shape[2],
        HEAD_DIM=head_dim, HAS_N_KEYS=n_keys is not None, **config.kernel_arguments(),
    )  # fmt: skip

    def launch(inputs, scalars):
        q, _, _, n_keys = inputs[:4]
        o = q.new_empty_strided(*of_o)
        lse = q.new_empty_strided(*of_lse, dtype=torch.float32)
        x = quantize(inputs)
        kernel(
            x.q, x.k, x.v, x.q_scale, x.q_vector, x.scales, x.vector, o, lse,
            x.vector if n_keys is None else n_keys, scalars[0] * LOG2_E,
        )  # fmt: skip
        return (o,), (lse,)

    return forward(launch, call)


FORWARD = Kernel("triton_8bit", empty, prepare, configs=configs, options=TAKEN)
