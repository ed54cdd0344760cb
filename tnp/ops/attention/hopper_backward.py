"""Attention backward for Hopper: what runs before, between and after its two kernels.

`separate` launches dK/dV (`hopper_dkdv`) and dQ (`hopper_dq`), without atomics and equal from run
to run. `fused` launches one kernel (`hopper_dkdv` with its dQ part), which adds dQ up in float32 in
device memory. Both start from the same statistics: delta = Σ_d do·o and lse in rows padded to whole
query tiles, where lse is +inf, so that no loop over queries needs a mask.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tnp.ops.attention.hopper_dkdv import PADDED_ROWS, DkdvConfig, attention_dkdv
from tnp.ops.attention.hopper_dq import DqConfig, attention_dq
from tnp.ops.attention.hopper_primitives import refuses
from tnp.ops.attention.primitives import empty_rows, head_ptr, load_rows, row_strides, store_rows

if TYPE_CHECKING:
    from tnp.ops.attention.kernels import Problem

TILE_ROWS = 64


@dataclass(frozen=True)
class SeparateConfig:
    dkdv: DkdvConfig
    dq: DqConfig

    def __post_init__(self) -> None:
        for name, kind in (("dkdv", DkdvConfig), ("dq", DqConfig)):
            if isinstance(getattr(self, name), dict):
                object.__setattr__(self, name, kind(**getattr(self, name)))


@triton.jit(do_not_specialize=["n_q"])
def _statistics_kernel(
    o_ptr, do_ptr, lse_ptr, padded_ptr, dq_ptr,
    stride_ob, stride_oh, stride_om,
    stride_dob, stride_doh, stride_dom,
    n_heads, n_q,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, PADDED_ROWS: tl.constexpr, FUSED: tl.constexpr,
):  # fmt: skip
    """A query tile's lse and delta, padded; if FUSED its tile of dq becomes 0."""
    n_tiles = tl.cdiv(n_q, PADDED_ROWS) * (PADDED_ROWS // ROWS)
    pid_bh = tl.program_id(0) // n_tiles
    offs_m = tl.program_id(0) % n_tiles * ROWS + tl.arange(0, ROWS)
    o_ptr = head_ptr(o_ptr, stride_ob, stride_oh, pid_bh, n_heads)
    do_ptr = head_ptr(do_ptr, stride_dob, stride_doh, pid_bh, n_heads)
    o = load_rows(o_ptr, offs_m, n_q, stride_om, HEAD_DIM, True).to(tl.float32)
    do = load_rows(do_ptr, offs_m, n_q, stride_dom, HEAD_DIM, True).to(tl.float32)
    lse_ptrs = lse_ptr + pid_bh.to(tl.int64) * n_q + offs_m
    lse = tl.load(lse_ptrs, mask=offs_m < n_q, other=float("inf"))
    padded = padded_ptr + tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    tl.store(padded, lse)
    tl.store(padded + tl.num_programs(0).to(tl.int64) * ROWS, tl.sum(o * do, 1))
    if FUSED:
        tile = dq_ptr + tl.program_id(0).to(tl.int64) * ROWS * HEAD_DIM
        offs = tl.arange(0, ROWS * HEAD_DIM)
        tl.store(tile + offs, tl.zeros([ROWS * HEAD_DIM], tl.float32))


@triton.jit(do_not_specialize=["n_q"])
def _finish_dq_kernel(
    tile_ptr, dq_ptr, stride_dqb, stride_dqh, stride_dqm, n_heads, n_q, scale,
    HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, PADDED_ROWS: tl.constexpr,
):  # fmt: skip
    """Scaled dq from float32 tiles in the order of a matmul's registers."""
    n_tiles = tl.cdiv(n_q, PADDED_ROWS) * (PADDED_ROWS // ROWS)
    pid_bh = tl.program_id(0) // n_tiles
    offs_m = tl.program_id(0) % n_tiles * ROWS + tl.arange(0, ROWS)
    tile = tile_ptr + tl.program_id(0).to(tl.int64) * ROWS * HEAD_DIM
    # Of a register: row 16·warp + 8·half + lane/4, column 8·block + 2·(lane % 4) + pair.
    x = tl.load(tile + tl.arange(0, ROWS * HEAD_DIM)) * scale
    x = tl.reshape(x.to(dq_ptr.dtype.element_ty), [8, 4, 8, 4, 2, 2])
    dq = tl.reshape(tl.permute(x, (1, 4, 2, 0, 3, 5)), [ROWS, HEAD_DIM])
    dq_ptr = head_ptr(dq_ptr, stride_dqb, stride_dqh, pid_bh, n_heads)
    store_rows(dq_ptr, dq, offs_m, n_q, stride_dqm, HEAD_DIM)


def _n_tiles(q: torch.Tensor) -> int:
    """Query tiles of all heads, each head's padded to PADDED_ROWS."""
    padded = PADDED_ROWS.value
    return q.shape[0] * q.shape[1] * triton.cdiv(q.shape[2], padded) * (padded // TILE_ROWS)


def _statistics(o, do, lse, fused: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded lse and delta [2, rows], and dq's float32 tiles [rows, D], 0, where `fused`."""
    n_heads, n_q, head_dim = o.shape[1:]
    rows = _n_tiles(o) * TILE_ROWS
    statistics = lse.new_empty(2, rows)
    dq = lse.new_empty(rows if fused else TILE_ROWS, head_dim)
    _statistics_kernel[(_n_tiles(o),)](
        o, do, lse, statistics, dq, *row_strides(o), *row_strides(do), n_heads, n_q,
        HEAD_DIM=head_dim, ROWS=TILE_ROWS, PADDED_ROWS=PADDED_ROWS.value, FUSED=fused,
    )  # fmt: skip
    return statistics, dq


def unsupported(problem: "Problem") -> str | None:
    """Why these kernels cannot serve the problem, or None."""
    return refuses(problem)


def backward_separate_configs(problem: "Problem") -> tuple[SeparateConfig, ...]:
    """Candidates, the default first."""
    return tuple(
        SeparateConfig(dkdv, dq)
        for dkdv in (DkdvConfig(4, 2, 240), DkdvConfig(4, 1, 240))
        for dq in (DqConfig(64, 4, 160), DqConfig(64, 8, 160))
    )


def backward_fused_configs(problem: "Problem") -> tuple[DkdvConfig, ...]:
    """Candidates, the default first."""
    return (DkdvConfig(4, 1, 208),)


def backward_separate(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    n_context: torch.Tensor | None,
    scale: float,
    config: SeparateConfig,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv in the shapes and dtype of q, k, v, laid out [B, L, H, D]."""
    statistics, tiles = _statistics(o, do, lse, fused=False)
    dk, dv = attention_dkdv(
        do, q, k, v, statistics, tiles, n_context, scale, config.dkdv, fused=False
    )
    dq = attention_dq(do, q, k, v, statistics, n_context, scale, config.dq)
    return dq, dk, dv


def backward_fused(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    lse: torch.Tensor,
    n_context: torch.Tensor | None,
    scale: float,
    config: DkdvConfig,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv as `backward_separate`; dq differs by rounding from run to run."""
    n_heads, n_q, head_dim = q.shape[1:]
    statistics, tiles = _statistics(o, do, lse, fused=True)
    dk, dv = attention_dkdv(do, q, k, v, statistics, tiles, n_context, scale, config, fused=True)
    dq = empty_rows(q, n_q)
    _finish_dq_kernel[(_n_tiles(q),)](
        tiles, dq, *row_strides(dq), n_heads, n_q, scale,
        HEAD_DIM=head_dim, ROWS=TILE_ROWS, PADDED_ROWS=PADDED_ROWS.value,
    )  # fmt: skip
    return dq, dk, dv
