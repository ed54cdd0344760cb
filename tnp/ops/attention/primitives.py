"""Shares code of attention kernels: tiles of rows, allocations, wrappers of launches."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps

import torch
import triton
import triton.language as tl
from torch import Tensor

from tnp.dispatch.devices import Target
from tnp.dispatch.launcher import Bound
from tnp.dispatch.spec import Call
from tnp.ops._shared.operands import Layout
from tnp.ops._shared.primitives import KernelConfig, add_dot, cast, dot
from tnp.ops._shared.ranges import asserting, between, cumulative
from tnp.ops.attention.keys import all_seen
from tnp.ops.attention.torch_forms import LN_2
from tnp.util.checks import is_expanded

LOG2_E = 1.4426950408889634

SUM_BLOCK = 1024  # elements that a program of the reduction adds up


@dataclass(frozen=True)
class LaunchConfig(KernelConfig):
    """Configures a launch: a program's tile of queries and keys, warps and stages."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def candidates(call: Call, configs: dict, masked: dict | None = None) -> tuple:
    """Returns the candidates for the problem's bytes per element and columns of a tile.

    If `configs` has no entry for these columns, it returns the entry for 64 columns. float32 has no
    entry from 128 columns on: every tile spills there, which is slow but right. A kernel that masks
    more than the ends of rows needs more registers: `masked` holds its default.
    """
    p = call.problem
    width = triton.next_power_of_2(p["head_dim"])
    masks = width > p["head_dim"] or any(
        p[option] for option in ("causal", "window", "n_sequences", "n_kv_heads")
    )
    key = p.itemsize, width if (p.itemsize, width) in configs else 64
    first = masked.get(key, ()) if masked and masks else ()
    return tuple(dict.fromkeys(first + configs[key]))


def n_query_tiles(call: Call, rows: int) -> int:
    """Returns how many tiles of `rows` queries all heads of all samples have."""
    p = call.problem
    return triton.cdiv(p["n_q"], rows) * p["batch"] * p["n_heads"]


def n_key_tiles(call: Call, rows: int) -> int:
    """Returns how many tiles of `rows` keys all heads of all samples have."""
    p = call.problem
    return triton.cdiv(p["n_k"], rows) * p["batch"] * p["n_heads"]


def of_all_seen(counts: Callable) -> Callable:
    """Wraps `Kernel.counts` so that it returns None with a mask or with shared heads.

    Tables hold no costs of such problems, so no time is predicted for them.
    """

    @wraps(counts)
    def known(call: Call, config: object) -> tuple[float, ...] | None:
        if not all_seen(call.problem) or call.problem["n_kv_heads"]:
            return None
        return counts(call, config)

    return known


def segments(n_tiles: int, wanted: int, least: int) -> tuple[int, int]:
    """Returns how many programs share `n_tiles` query tiles, and the tiles of one program.

    There are about `wanted` programs at most. Each has at least `least` tiles if there are so many.
    """
    tiles = triton.cdiv(n_tiles, max(1, min(wanted, n_tiles // least)))
    return triton.cdiv(n_tiles, tiles), tiles


def full_grid(target: Target) -> int:
    """Returns how many programs give every multiprocessor two."""
    return 2 * target.multiprocessors


@triton.constexpr_function
def tile_width(head_dim):
    """Returns the columns of a tile that holds rows of head_dim elements: a power of two."""
    return triton.next_power_of_2(head_dim)


@triton.jit
def load_rows(ptr, offs_row, n_rows, stride_row, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Loads rows `offs_row` of a [n_rows, HEAD_DIM] matrix into a tile of `tile_width` columns.

    Columns past HEAD_DIM are 0. Rows past the end are 0 if MASKED, and else must not be loaded.
    """
    offs_d = tl.arange(0, tile_width(HEAD_DIM))
    # Offsets have 64 bits: 205,000 rows of a projection of 1,536 columns pass 2³¹ in a batch of 7.
    ptrs = ptr + offs_row.to(tl.int64)[:, None] * stride_row + offs_d[None, :]
    if tile_width(HEAD_DIM) > HEAD_DIM:
        inside = offs_d[None, :] < HEAD_DIM
        if MASKED:
            inside = inside & (offs_row[:, None] < n_rows)
        return tl.load(ptrs, mask=inside, other=0.0)
    elif MASKED:
        return tl.load(ptrs, mask=offs_row[:, None] < n_rows, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def store_rows(ptr, tile, offs_row, n_rows, stride_row, HEAD_DIM: tl.constexpr):
    """Stores the rows of a tile before n_rows, without the columns past HEAD_DIM."""
    offs_d = tl.arange(0, tile_width(HEAD_DIM))
    ptrs = ptr + offs_row.to(tl.int64)[:, None] * stride_row + offs_d[None, :]
    inside = offs_row[:, None] < n_rows
    if tile_width(HEAD_DIM) > HEAD_DIM:
        inside = inside & (offs_d[None, :] < HEAD_DIM)
    tl.store(ptrs, cast(tile, ptr.dtype.element_ty), mask=inside)


@triton.jit
def head_ptr(ptr, stride_b, stride_h, pid_bh, n_heads):
    """Returns the address of head `pid_bh` of all samples' heads."""
    b = (pid_bh // n_heads).to(tl.int64)
    h = (pid_bh % n_heads).to(tl.int64)
    return ptr + b * stride_b + h * stride_h


@triton.jit
def row_ptr(ptr, row, stride_row):
    """Returns the address of a row of a head."""
    return ptr + tl.cast(row, tl.int64) * stride_row


# -------------------------------------------------------------- gradients of a tile of few keys


@triton.jit
def own_delta(p, dp):
    """Returns Σ_j p_j dp_j of each row of a tile that holds all keys of its rows.

    An lse with a rounding error scales all p of a row. Divided by their sum, delta is exact.
    """
    return tl.sum(p * dp, 1) / tl.sum(p, 1)


@triton.jit
def add_gradients(q, do, k, p, dp, delta, dk_t, dv_t):
    """Returns dq, unscaled, and dkᵀ and dvᵀ with what these rows of queries add to them.

    Transposed sums need no transpose of p and ds, only of tiles in shared memory. A computed left
    operand that is transposed came out wrong on 64-wide tiles (Triton 3.4 to 3.7).
    """
    ds = cast(p * (dp - delta[:, None]), k.dtype)
    dv_t = add_dot(tl.trans(do), cast(p, do.dtype), dv_t)
    dk_t = add_dot(tl.trans(q), ds, dk_t)
    return dot(ds, k), dk_t, dv_t


# ---------------------------------------------------------------------- what a launch allocates


def row_strides(x: Tensor) -> tuple[int, int, int]:
    """Returns the batch, head and row strides of [B, H, L, D], contiguous in the last dimension."""
    return x.stride()[:3]


def rows_layout(like: Tensor) -> Layout:
    """Returns the layout of [B, H, L, D] in memory as [B, L, H, D], which the projections read."""
    _batch, n_heads, n_rows, head_dim = like.shape
    row = n_heads * head_dim
    return tuple(like.shape), (n_rows * row, head_dim, row, 1)


class KeyGradients:
    """Allocates dk and dv [B, H, n_k, D].

    They are halves of rows [B, n_k, 2, H, D], which the projections multiply as one matrix. If they
    must lie apart, each is [B, n_k, H, D] in memory.

    Args:
        k: a tensor of their shape, dtype and device.
        apart: whether they must share no memory. Else each keeps the memory of both alive.
    """

    def __init__(self, k: Tensor, apart: bool) -> None:
        shape, (of_b, of_h, width, _) = rows_layout(k)
        self.width, self.apart = width, apart
        # The strides of dk, and of dv: batch, head and row.
        self.strides = (of_b, of_h, width) if apart else (2 * of_b, of_h, 2 * width)
        self.one = shape, (*self.strides, 1)
        self.both = (2, *shape), (width, *self.strides, 1)

    def allocate(self, k: Tensor) -> tuple[Tensor, ...]:
        """Returns dk and dv, uninitialized."""
        if self.apart:
            return k.new_empty_strided(*self.one), k.new_empty_strided(*self.one)
        return k.new_empty_strided(*self.both).unbind()


def lse_layout(q: Tensor) -> Layout:
    """Returns the layout of [B, H, n_q], contiguous."""
    batch, n_heads, n_q, _head_dim = q.shape
    return (batch, n_heads, n_q), (n_heads * n_q, n_q, 1)


def flat(n: int) -> Layout:
    """Returns the layout of a workspace of n numbers."""
    return (n,), (1,)


def empty(wanted: tuple[str, ...], inputs: tuple, lse: bool = False) -> tuple[tuple, tuple]:
    """Returns o [B, H, n_q, D], in memory [B, n_q, H, D], and the saved lse [B, H, n_q].

    lse is float32 and to base 2. If `lse`, another one in nats stands beside o.
    """
    q = inputs[0]
    o = q.new_empty_strided(*rows_layout(q))
    saved, *given = [
        q.new_empty_strided(*lse_layout(q), dtype=torch.float32) for _ in range(1 + lse)
    ]
    return (o, *given), (saved,)


def empty_backward(wanted: tuple[str, ...], inputs: tuple) -> tuple[Tensor | None, ...]:
    """Returns dq, dk, dv in the shapes and dtype of q, k, v, each in memory [B, L, H, D]."""
    named = zip(("q", "k", "v"), inputs[1], strict=False)
    return tuple(x.new_empty_strided(*rows_layout(x)) if n in wanted else None for n, x in named)


# ------------------------------------------------------------------------------- around a launch


def forward(launch: Callable, call: Call) -> Callable:
    """Returns the launch of a forward pass as an operation wants it.

    It passes the scale, returns lse if asked to, and with TNP_CHECK=1 asserts that lengths are in
    range.
    """
    launch, p = scaled(launch, call), call.problem
    if p["lse"]:
        launch = _with_lse(launch)
    if p["n_sequences"]:
        return asserting(launch, lambda inputs: (
            cumulative("cu_seqlens_q", inputs[4], "q", p["n_q"]),
            cumulative("cu_seqlens_k", inputs[5], "k", p["n_k"]),
        ))  # fmt: skip
    return with_counted_keys(launch, call, p["n_k"], "n_k")


def with_counted_keys(launch: Callable, call: Call, most: int, what: str) -> Callable:
    """Returns a launch that with TNP_CHECK=1 asserts n_keys in 1 … `most`, which `what` names."""
    if not call.problem["n_keys"]:
        return launch
    return asserting(launch, lambda inputs: [between("n_keys", inputs[3], 1, most, f"{what} = ")])


def scaled(launch: Callable, call: Call) -> Callable:
    """Returns the launch, with a scale of ln 2 if q carries scale · log2(e)."""
    if not call.problem["base2"]:
        return launch
    scalars = (LN_2,)
    return lambda inputs, _: launch(inputs, scalars)


def _with_lse(launch: Callable) -> Callable:
    """Returns a forward launch that returns lse in nats too. `launch` saves it to base 2."""

    def both(inputs, scalars):
        (o,), (lse,) = launch(inputs, scalars)
        return (o, lse * LN_2), (lse,)

    return both


def backward(decide: Callable) -> Callable:
    """Turns `decide` into the `prepare` of a backward kernel.

    `decide(call, config, do, q, k, v, lengths, o, lse, dlse)` returns a launch. It takes the same
    tensors and the scale, and returns dq, dk and dv. `lengths` are n_keys and, in attention, both
    cu_seqlens.

    do is one that kernels can read: a copy if its last dimension is not contiguous, or if it is
    expanded, as the gradient of a sum is. `dlse` is the gradient of lse in nats, contiguous, or
    None. The gradient of a score is p (dp − delta + dlse), so that kernels subtract it from delta.
    """

    def prepare(call: Call, config: object, inputs: tuple) -> Callable:
        gradients, kept, (lse,) = inputs
        do, dlse = _arriving(gradients, kept[-1])
        copies = _is_unreadable(do)
        readable = do.contiguous() if copies else do
        run = decide(call, config, readable, *kept[:3], kept[3:-1], kept[-1], lse, dlse)
        given = tuple(name in call.wanted for name in ("q", "k", "v"))
        some = not all(given)

        def launch(inputs, scalars):
            gradients, kept, (lse,) = inputs
            do, dlse = _arriving(gradients, kept[-1])
            if copies:
                do = do.contiguous()
            gradients = run(do, *kept[:3], kept[3:-1], kept[-1], lse, dlse, *scalars)
            if some:
                return tuple([x if one else None for x, one in zip(gradients, given, strict=True)])
            return gradients

        return scaled(launch, call)

    return prepare


def _arriving(gradients: tuple, o: Tensor) -> tuple[Tensor, Tensor | None]:
    """Returns do, which is zeros if o was not used, and dlse or None."""
    do, dlse = gradients if len(gradients) == 2 else (*gradients, None)
    if do is None:
        do = torch.zeros_like(o)
    return do, None if dlse is None else dlse.contiguous()


def _is_unreadable(x: Tensor) -> bool:
    """Returns whether kernels need a copy: it is expanded, or its rows are not contiguous."""
    return is_expanded(x) or (x.stride(-1) != 1 and x.shape[-1] > 1)


# --------------------------------------------------------------------- gradients in several parts


@triton.jit
def _sum_partials_kernel(
    partials_ptr, dk_ptr, dv_ptr, n, n_segments, stride_row, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes dk and dv, the sums of their parts."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dk = tl.zeros([BLOCK], tl.float32)
    dv = tl.zeros([BLOCK], tl.float32)
    for _ in range(n_segments):
        dk += tl.load(partials_ptr + offs, mask=offs < n, other=0.0)
        partials_ptr += n
        dv += tl.load(partials_ptr + offs, mask=offs < n, other=0.0)
        partials_ptr += n
    places = offs // WIDTH * stride_row + offs % WIDTH
    tl.store(dk_ptr + places, cast(dk, dk_ptr.dtype.element_ty), mask=offs < n)
    tl.store(dv_ptr + places, cast(dv, dv_ptr.dtype.element_ty), mask=offs < n)


class Partials:
    """Holds dk and dv as float32 parts, one for each segment of queries, and adds them up in order.

    Call `add(parts, dk, dv)` to write the sums.

    Args:
        k: [B, H, n_k, D], like dk and dv.
        segments: how many parts there are.
        whole: how dk and dv lie in memory.
    """

    def __init__(self, k: Tensor, segments: int, whole: KeyGradients) -> None:
        self.n = k.numel()
        self.segment = 2 * self.n  # numbers of one part: dk and dv
        self.strides = rows_layout(k)[1][:3]
        self.layout = flat(segments * self.segment)
        self.add = Bound(
            _sum_partials_kernel, (triton.cdiv(self.n, SUM_BLOCK),), self.n, segments,
            whole.strides[2], WIDTH=whole.width, BLOCK=SUM_BLOCK,
        )  # fmt: skip

    def allocate(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the workspace, which begins with dk's first part, and the first part of dv."""
        parts = like.new_empty_strided(*self.layout, dtype=torch.float32)
        return parts, parts.narrow(0, self.n, self.n)
