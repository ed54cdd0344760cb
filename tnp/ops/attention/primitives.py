"""What the attention kernels share: loads of row tiles, launch configurations."""

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
from tnp.ops._shared.primitives import KernelConfig, cast
from tnp.ops._shared.ranges import asserting, between, cumulative
from tnp.ops.attention.keys import all_seen
from tnp.ops.attention.torch_forms import LN_2
from tnp.util.checks import is_expanded

LOG2_E = 1.4426950408889634

# Elements a program of the reduction adds up.
SUM_BLOCK = 1024


@dataclass(frozen=True)
class LaunchConfig(KernelConfig):
    """Tile of queries and keys a program works on."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def candidates(call: Call, configs: dict, masked: dict | None = None) -> tuple:
    """The entry of the problem's bytes per element and columns of a tile, 64's where there is none.

    float32 from 128 on has none: every tile spills there, which is slow and still right. A kernel
    that masks more than the ends of rows needs more registers: of it `masked` has the default.
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
    """Tiles of so many queries, of all heads of all samples."""
    p = call.problem
    return triton.cdiv(p["n_q"], rows) * p["batch"] * p["n_heads"]


def n_key_tiles(call: Call, rows: int) -> int:
    """Tiles of so many keys, of all heads of all samples."""
    p = call.problem
    return triton.cdiv(p["n_k"], rows) * p["batch"] * p["n_heads"]


def of_all_seen(counts: Callable) -> Callable:
    """`Kernel.counts` that hold where every query sees all keys of its sample and no heads share
    keys: tables have costs of such problems alone. Of others no time is predicted.
    """

    @wraps(counts)
    def known(call: Call, config: object) -> tuple[float, ...] | None:
        if not all_seen(call.problem) or call.problem["n_kv_heads"]:
            return None
        return counts(call, config)

    return known


def segments(n_tiles: int, wanted: int, least: int) -> tuple[int, int]:
    """Of query tiles that programs share: how many share them, and the tiles of one.

    At most about `wanted`, each with at least `least` tiles where there are as many.
    """
    tiles = triton.cdiv(n_tiles, max(1, min(wanted, n_tiles // least)))
    return triton.cdiv(n_tiles, tiles), tiles


def full_grid(target: Target) -> int:
    """Programs that keep every multiprocessor busy twice over."""
    return 2 * target.multiprocessors


@triton.constexpr_function
def tile_width(head_dim):
    """Columns of a tile that holds rows of head_dim elements: a power of two."""
    return triton.next_power_of_2(head_dim)


@triton.jit
def load_rows(ptr, offs_row, n_rows, stride_row, HEAD_DIM: tl.constexpr, MASKED: tl.constexpr):
    """Rows `offs_row` of a [n_rows, HEAD_DIM] matrix, in a tile of `tile_width` columns.

    Rows past the end are 0 where MASKED, and columns past HEAD_DIM always.
    """
    offs_d = tl.arange(0, tile_width(HEAD_DIM))
    # 64-bit: 205,000 rows of a projection of 1,536 columns pass 2³¹ in a batch of 7.
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
    """Store the rows before n_rows of a tile, less the columns past HEAD_DIM."""
    offs_d = tl.arange(0, tile_width(HEAD_DIM))
    ptrs = ptr + offs_row.to(tl.int64)[:, None] * stride_row + offs_d[None, :]
    inside = offs_row[:, None] < n_rows
    if tile_width(HEAD_DIM) > HEAD_DIM:
        inside = inside & (offs_d[None, :] < HEAD_DIM)
    tl.store(ptrs, cast(tile, ptr.dtype.element_ty), mask=inside)


@triton.jit
def head_ptr(ptr, stride_b, stride_h, pid_bh, n_heads):
    """Start of one batch's head."""
    b = (pid_bh // n_heads).to(tl.int64)
    h = (pid_bh % n_heads).to(tl.int64)
    return ptr + b * stride_b + h * stride_h


@triton.jit
def row_ptr(ptr, row, stride_row):
    """A head's row, from which on those of one sequence lie."""
    return ptr + tl.cast(row, tl.int64) * stride_row


# ---------------------------------------------------------------------- what a launch allocates


def row_strides(x: Tensor) -> tuple[int, int, int]:
    """Batch, head and row strides of [B, H, L, D], whose last dimension is contiguous."""
    return x.stride()[:3]


def rows_layout(like: Tensor) -> Layout:
    """[B, H, L, D] laid out [B, L, H, D], as the projections read it."""
    _batch, n_heads, n_rows, head_dim = like.shape
    row = n_heads * head_dim
    return tuple(like.shape), (n_rows * row, head_dim, row, 1)


class KeyGradients:
    """dk and dv [B, H, n_k, D]: halves of rows [B, n_k, 2, H, D], which the projections multiply
    as one matrix, or where they are to lie apart [B, n_k, H, D] each.

    Args:
        k: their shape, dtype and device.
        apart: whether they must share no memory. Otherwise either of them keeps that of both.
    """

    def __init__(self, k: Tensor, apart: bool) -> None:
        shape, (of_b, of_h, width, _) = rows_layout(k)
        self.width, self.apart = width, apart
        # Of dk and of dv: batch, head and row.
        self.strides = (of_b, of_h, width) if apart else (2 * of_b, of_h, 2 * width)
        self.one = shape, (*self.strides, 1)
        self.both = (2, *shape), (width, *self.strides, 1)

    def allocate(self, k: Tensor) -> tuple[Tensor, ...]:
        """dk and dv."""
        if self.apart:
            return k.new_empty_strided(*self.one), k.new_empty_strided(*self.one)
        return k.new_empty_strided(*self.both).unbind()


def lse_layout(q: Tensor) -> Layout:
    """[B, H, n_q], contiguous."""
    batch, n_heads, n_q, _head_dim = q.shape
    return (batch, n_heads, n_q), (n_heads * n_q, n_q, 1)


def flat(n: int) -> Layout:
    """Of a workspace of n numbers."""
    return (n,), (1,)


def empty(wanted: tuple[str, ...], inputs: tuple, lse: bool = False) -> tuple[tuple, tuple]:
    """o [B, H, n_q, D] laid out [B, n_q, H, D], and saved lse [B, H, n_q], float32, base 2; another
    in nats beside o where asked for.
    """
    q = inputs[0]
    o = q.new_empty_strided(*rows_layout(q))
    saved, *given = [
        q.new_empty_strided(*lse_layout(q), dtype=torch.float32) for _ in range(1 + lse)
    ]
    return (o, *given), (saved,)


def empty_backward(wanted: tuple[str, ...], inputs: tuple) -> tuple[Tensor | None, ...]:
    """dq, dk, dv in the shapes and dtype of q, k, v, laid out [B, L, H, D] each."""
    named = zip(("q", "k", "v"), inputs[1], strict=False)
    return tuple(x.new_empty_strided(*rows_layout(x)) if n in wanted else None for n, x in named)


# ------------------------------------------------------------------------------- around a launch


def forward(launch: Callable, call: Call) -> Callable:
    """The launch of a forward pass: given scale; where asked to it gives lse too, and asserts
    first that lengths are in range.
    """
    launch, p = _scaled(launch, call), call.problem
    if p["lse"]:
        launch = _with_lse(launch)
    if p["n_sequences"]:
        return asserting(launch, lambda inputs: (
            cumulative("cu_seqlens_q", inputs[4], "q", p["n_q"]),
            cumulative("cu_seqlens_k", inputs[5], "k", p["n_k"]),
        ))  # fmt: skip
    return with_counted_keys(launch, call, p["n_k"], "n_k")


def with_counted_keys(launch: Callable, call: Call, most: int, what: str) -> Callable:
    """A forward launch that, where asked to, asserts first that n_keys lie from 1 to `most`, which
    is called `what`.
    """
    if not call.problem["n_keys"]:
        return launch
    return asserting(launch, lambda inputs: [between("n_keys", inputs[3], 1, most, f"{what} = ")])


def _scaled(launch: Callable, call: Call) -> Callable:
    """The launch whose scale times log2(e) is 1 where q carries both."""
    if not call.problem["base2"]:
        return launch
    scalars = (LN_2,)
    return lambda inputs, _: launch(inputs, scalars)


def _with_lse(launch: Callable) -> Callable:
    """A forward launch that gives lse as well, which it saves to base 2."""

    def both(inputs, scalars):
        (o,), (lse,) = launch(inputs, scalars)
        return (o, lse * LN_2), (lse,)

    return both


def backward(decide: Callable) -> Callable:
    """`prepare` of a backward kernel.

    `decide(call, config, do, q, k, v, lengths, o, lse, dlse)` returns a launch of the same tensors
    and the scale, which gives dq, dk and dv; `lengths` are n_keys and both cu_seqlens. It sees do
    as the kernels can read it: copied where its last dimension is not contiguous, or where another
    is expanded, as of a sum's gradient. `dlse` is the gradient of lse in nats, contiguous, or None:
    what a score gains is p (dp − delta + dlse), so that it is taken off delta.
    """

    def prepare(call: Call, config: object, inputs: tuple) -> Callable:
        gradients, kept, (lse,) = inputs
        do, dlse = _arriving(gradients, kept[6])
        copies = is_unreadable(do)
        readable = do.contiguous() if copies else do
        run = decide(call, config, readable, *kept[:3], kept[3:6], kept[6], lse, dlse)
        given = tuple(name in call.wanted for name in ("q", "k", "v"))
        some = not all(given)

        def launch(inputs, scalars):
            gradients, kept, (lse,) = inputs
            do, dlse = _arriving(gradients, kept[6])
            if copies:
                do = do.contiguous()
            gradients = run(do, *kept[:3], kept[3:6], kept[6], lse, dlse, *scalars)
            if some:
                return tuple([x if one else None for x, one in zip(gradients, given, strict=True)])
            return gradients

        return _scaled(launch, call)

    return prepare


def _arriving(gradients: tuple, o: Tensor) -> tuple[Tensor, Tensor | None]:
    """do, zeros where o was not used, and dlse."""
    do, dlse = gradients if len(gradients) == 2 else (*gradients, None)
    if do is None:
        do = torch.zeros_like(o)
    return do, None if dlse is None else dlse.contiguous()


def is_unreadable(x: Tensor) -> bool:
    """Whether kernels need a copy of it: expanded, or its last dimension not contiguous."""
    return is_expanded(x) or (x.stride(-1) != 1 and x.shape[-1] > 1)


# --------------------------------------------------------------------- gradients in several parts


@triton.jit
def _sum_partials_kernel(
    partials_ptr, dk_ptr, dv_ptr, n, n_segments, stride_row, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
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
    """dk and dv as float32 parts, one a segment of the queries, and their sum in a fixed order.

    Args:
        k: [B, H, n_k, D], like dk and dv.
        segments: how many parts there are.
        whole: how dk and dv lie.
    """

    def __init__(self, k: Tensor, segments: int, whole: KeyGradients) -> None:
        self.n = k.numel()
        self.segment = 2 * self.n  # dk and dv of one
        self.strides = rows_layout(k)[1][:3]
        self.layout = flat(segments * self.segment)
        self.add = Bound(
            _sum_partials_kernel, (triton.cdiv(self.n, SUM_BLOCK),), self.n, segments,
            whole.strides[2], WIDTH=whole.width, BLOCK=SUM_BLOCK,
        )  # fmt: skip

    def allocate(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """The workspace, which starts with the first part of dk, and the first part of dv."""
        parts = like.new_empty_strided(*self.layout, dtype=torch.float32)
        return parts, parts.narrow(0, self.n, self.n)
