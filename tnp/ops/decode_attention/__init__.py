"""Computes decode attention: the last tokens of each sequence attend to a cache of keys, values.

    o = softmax(scale · q kᵀ) v        query t of T sees keys 0 … n_keys − T + t

If `full`, every query sees all keys of its sequence. The cache is contiguous, or in pages that a
table lists in their order. There is no backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tnp.dispatch.spec import (
    ALL_FLOATS,
    Call,
    Implementation,
    Operation,
    Operator,
    Reason,
    triton_from,
)
from tnp.ops._shared.declared import compiled
from tnp.ops.attention import HEAD_DIMS
from tnp.ops.decode_attention import definition, torch_forms
from tnp.util.checks import (
    positive_number,
    require_between,
    require_bools,
    require_floats,
    require_lengths,
    require_no_gradient,
    require_one_device,
    require_pages,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["decode_attention"]

PAGE_MULTIPLE = 16  # keys of a page are a multiple of this
MOST_SEQUENCES = 1024  # a program reads the lengths of all sequences at once
# The most numbers of queries that a program has at once, by itemsize: registers hold no more.
TILE_NUMBERS = {2: 16_384, 4: 4_096}
_INFINITY = float("inf")
_triton = triton_from(80)


def describe(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n_keys: Tensor,
    page_table: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    cache: str | bool = False,
    full: bool = False,
) -> dict[str, int]:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            of = "[B, H, T, D]" if name == "q" else "[B, H_kv, S, D], or [n_pages, H_kv, page, D]"
            raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be {of}")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(
                f"{name} has strides {x.stride()}: its last dimension must be contiguous"
            )
    require_no_gradient("decode_attention", q=q, k=k, v=v)
    given = {"page_table": page_table, "k_descale": k_descale, "v_descale": v_descale}
    given = {name: x for name, x in given.items() if x is not None}
    require_one_device(q=q, k=k, v=v, n_keys=n_keys, **given)
    require_floats(q=q)
    if (k.shape, k.dtype) != (v.shape, v.dtype):
        raise ValueError(
            f"k is {k.dtype} {tuple(k.shape)} and v {v.dtype} {tuple(v.shape)}: they must be equal"
        )
    if k.dtype != q.dtype and not (cache and _is_in(k, cache) and q.element_size() == 2):
        raise ValueError(
            f"k is {k.dtype} and q is {q.dtype}: they must be equal, or k and v "
            "torch.float8_e4m3fn beside a q of 16 bits"
        )
    batch, heads, n_queries, head_dim = q.shape
    n_pages, kv_heads, page, _ = k.shape
    if k.shape[3] != head_dim or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"q is {tuple(q.shape)} and k {tuple(k.shape)}: they must agree in D, and q's heads "
            "must be a multiple of k's"
        )
    require_lengths(q, n_keys=n_keys)
    capacity = page
    if page_table is not None:
        capacity = page * _columns(page_table, batch, n_pages)
    elif n_pages != batch:
        raise ValueError(
            f"q has {batch} sequences and k {n_pages}: without page_table they must be equal"
        )
    for name in ("k_descale", "v_descale"):
        if name in given:
            _require_descale(name, given[name], batch, kv_heads)
    return {
        "batch": batch, "heads": heads, "kv_heads": kv_heads, "n_queries": n_queries,
        "n_keys": capacity, "head_dim": head_dim, "page": page,
    }  # fmt: skip


def _is_in(x: Tensor, cache: str) -> bool:
    """Returns whether a tensor has the dtype of this number format."""
    return str(x.dtype) == f"torch.{definition.CACHES[cache]}"


def _columns(page_table: Tensor, batch: int, n_pages: int) -> int:
    """Returns how many pages a sequence may have."""
    shape = tuple(page_table.shape)
    if str(page_table.dtype) != "torch.int32" or len(shape) != 2 or shape[0] != batch:
        raise ValueError(
            f"page_table is {page_table.dtype} {shape}: it must be int32 [{batch}, max_pages]"
        )
    if n_pages == 0 and shape[1]:
        raise ValueError(f"page_table is {shape} and k has no pages: it must have at least one")
    return shape[1]


def _require_descale(name: str, descale: Tensor, batch: int, kv_heads: int) -> None:
    shape = tuple(descale.shape)
    if str(descale.dtype) != "torch.float32" or shape not in ((kv_heads,), (batch, kv_heads)):
        raise ValueError(
            f"{name} is {descale.dtype} {shape}: it must be float32 [{kv_heads}] or "
            f"[{batch}, {kv_heads}]"
        )


def _require_in_range(k: Tensor, n_keys: Tensor, page_table: Tensor | None) -> None:
    """Raises ValueError if the host knows a length past the cache, or a page that is not there."""
    n_pages, page = k.shape[0], k.shape[2]
    if page_table is None:
        require_between("n_keys", n_keys, 0, page)
    elif getattr(page_table, "ndim", 0) == 2:
        require_between("n_keys", n_keys, 0, page * page_table.shape[1])
        require_pages(page_table, n_keys, page, n_pages)


def _ours(call: Call) -> Reason:
    if (reason := _triton(call)) is not None:
        return reason
    p = call.problem
    head_dim, rows = p["head_dim"], definition.rows_of(p)
    if head_dim not in HEAD_DIMS:
        return f"it takes head_dim {', '.join(map(str, HEAD_DIMS))}, not {head_dim}"
    if p["page_table"] and p["page"] % PAGE_MULTIPLE:
        return f"it takes pages of a multiple of {PAGE_MULTIPLE} tokens, not {p['page']}"
    if p["batch"] > MOST_SEQUENCES:
        return f"it takes up to {MOST_SEQUENCES} sequences, not {p['batch']}"
    if p["cache"] and call.target.kind == "cuda" and call.target.capability < 89:
        return "a cache in e4m3 needs compute capability 8.9 or newer"
    most = TILE_NUMBERS[p.itemsize] // (1 << (head_dim - 1).bit_length())
    if rows > most:
        return (
            f"at head_dim {head_dim} in {p.dtype} it takes up to {most} queries that read the same "
            f"keys, heads of a group times tokens, not {rows}"
        )
    return None


OPERATOR = Operator(
    "decode_attention",
    inputs=("q", "k", "v", "lengths", "page_table?", "k_descale?", "v_descale?"),
    outputs=("o",),
    scalars={"scale": definition.SCALE},
    sizes=("batch", "heads", "kv_heads", "n_queries", "n_keys", "head_dim", "page"),
    options={"cache": tuple(definition.CACHES), "full": bool},
    implementations=(
        Implementation(
            "sdpa",
            run=torch_forms.sdpa,
            provider="torch",
            dtypes=ALL_FLOATS,
            options=definition.OPTIONS,
            gradients=(),
        ),
        *compiled(torch_forms.reference, definition.OPTIONS, gradients=()),
        Implementation(
            "triton",
            forward=Operation("decode_attention.forward", (f"{__name__}.triton_decode:FORWARD",)),
            supported=_ours,
            options=definition.OPTIONS,
        ),
        Implementation(
            "reference",
            run=torch_forms.reference,
            provider="torch",
            dtypes=ALL_FLOATS,
            options=definition.OPTIONS,
            gradients=(),
            selectable=False,
        ),
    ),
    describe=describe,
    draw=definition.draw,
    reference=torch_forms.reference,
    work=definition.work,
    partial_reference=definition.partial_reference,
    cases=lambda target: definition.cases(OPERATOR, target),
    condition=definition.condition,
    controls=definition.CONTROLS,
    other_lengths=definition.other_lengths,
    out_of_range=definition.out_of_range,
    within=lambda model, run: definition.within(OPERATOR, model, run),
)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    n_keys: Tensor,
    page_table: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    *,
    scale: float | None = None,
    full: bool = False,
    implementation: str = "sdpa",
) -> Tensor:
    """Returns softmax(scale · q kᵀ) v of each sequence's last tokens over its cache.

    Args:
        q: [B, H, T, D], a float dtype: the last T tokens of each sequence. Query t sees keys
            0 … n_keys[b] − T + t: a causal mask aligned to the bottom right.
        k, v: the cache, which holds the keys and values of the queries' own tokens too.
            [B, H_kv, S, D], or in pages [n_pages, H_kv, page, D]. Any strides with the last
            dimension contiguous, such as views of [B, S, H_kv, D]. H_kv divides H, and query head h
            reads kv head h // (H // H_kv). In q's dtype, or in torch.float8_e4m3fn if q has 16
            bits. Rows past a sequence's last key hold any finite values; `triton` takes any values.
        n_keys: int32 [B], each from 0 to S, or to max_pages · page: the keys of each sequence. A
            query that sees no key gives 0; there are some if n_keys[b] < T. On the CPU a number out
            of range is a ValueError, and so is an invalid page that a sequence uses. On CUDA the
            host does not know them, and either makes all results of its sequence NaN. With
            TNP_CHECK=1 in the environment `triton` asserts them, at the next synchronization.
        page_table: int32 [B, max_pages], the pages of each sequence in their order, or None for a
            contiguous cache. Entries past a sequence's last key are not read.
        k_descale, v_descale: float32 [H_kv] or [B, H_kv], factors of k and of v, or None.
        scale: a positive, finite number, or None for 1/√D.
        full: whether every query sees all n_keys[b] keys.
        implementation: a name of `tnp.dispatch.registry`, "torch" for `sdpa`, "own" for the best of
            ours, or "auto". `triton` takes D of `HEAD_DIMS`, pages of a multiple of 16 tokens, and
            up to 1,024 sequences. Registers bound the queries that read the same keys, heads of a
            group times tokens: at D = 128 up to 128 in 16 bits and 32 in float32.

    Returns:
        [B, H, T, D] in q's dtype, without a gradient. Ours lies in memory as [B, T, H, D], and is
        equal from run to run.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together; scale is out of range; full is no
            bool; a tensor requires a gradient; or on the CPU a number of keys or a page is invalid.
        RuntimeError: the implementation cannot run here or does not take this, with the reason.
    """
    import tnp.dispatch.call as dispatch

    if full.__class__ is not bool:
        require_bools(full=full)
    if scale is None:
        scale = (q.shape[-1] or 1) ** -0.5 if getattr(q, "ndim", 0) == 4 else 1.0
    elif scale.__class__ is not float or not 0.0 < scale < _INFINITY:
        scale = positive_number("scale", scale)
    if getattr(k, "ndim", 0) == 4:  # `describe` and `call` refuse other objects and dimensions
        _require_in_range(k, n_keys, page_table)
    in_8_bits = str(getattr(k, "dtype", None)) == "torch.float8_e4m3fn"
    options = (("cache", "e4m3"),) if in_8_bits else ()
    if full:
        options += (("full", True),)
    inputs = q, k, v, n_keys, page_table, k_descale, v_descale
    return dispatch.call(OPERATOR, implementation, inputs, (scale,), options)
