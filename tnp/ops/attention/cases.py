"""Holds the cases of attention's gate, its controls that must fail, and the errors of float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from tnp.dispatch.devices import Target
from tnp.dispatch.spec import FLOATS, Case, Operator
from tnp.ops.attention.definition import SCALE
from tnp.ops.attention.torch_forms import LN_2, attend, reference, softmax_scale, visible

if TYPE_CHECKING:
    from torch import Tensor

# Numbers of queries, or of keys, on both sides of every tile's edge. At magnitude 0 all keys are
# equal. From magnitude 8 on, no tile of Hopper's kernel keeps its reference. At 40, 2^s overflows
# float32. From 12 on, one of few keys has all the weight, and dq and dk are differences of equals.
_EDGES = (1, 63, 64, 65, 127, 564, 777, 10_000, 11_000, 205_000)


def cases(operator: Operator, target: Target) -> Iterable[Case]:
    """Returns the cases: attention without a mask, and attention of every kind."""
    return (*_without_a_mask(operator, target), *_of_any_kind(operator, target))


def _of_any_kind(operator: Operator, target: Target) -> Iterable[Case]:
    """Returns cases of every kind.

    They have masks on both sides of every tile's edge, queries that see no key, grouped heads,
    packed sequences, some of them empty, and every head_dim.
    """

    def case(n_q, n_k, head_dim=64, heads=(2, 2), dtype="bfloat16", batch=1, **named) -> Case:
        grouped = heads[1] if heads[1] != heads[0] else 0
        counted = {"n_keys": "lengths" in named, "n_kv_heads": grouped}
        return operator.case(dtype, batch, heads[0], n_q, n_k, head_dim, **counted | named)

    def packed(lengths, key_lengths="", head_dim=64, heads=(2, 2), dtype="bfloat16", **kind):
        n_q, n_k = (sum(map(int, x.split(","))) for x in (lengths, key_lengths or lengths))
        drawn = {"lengths": lengths} | ({"key_lengths": key_lengths} if key_lengths else {})
        given = {"cu_seqlens_q": True, "cu_seqlens_k": True, "n_keys": False}
        kind |= given | {"n_sequences": lengths.count(",") + 1}
        return case(n_q, n_k, head_dim, heads, dtype, **kind, **drawn)

    if target.kind != "cuda":
        one = (1, 1)
        return (
            case(33, 33, 16, one, "float32", causal=True),
            case(20, 40, 16, (4, 2), causal=True),
            case(70, 20, 16, one, "float32", causal=True),  # the first 50 queries see no key
            case(40, 70, 16, one, "float32", window=7),
            case(70, 70, 16, one, causal=True, window=9),
            case(20, 33, 16, one, "float32", batch=2, lengths="7,33", causal=True),
            packed("5,0,17,20", "9,3,17,20", 16, (2, 1), dtype="float32", causal=True),
            packed("5,0,17,20", "9,3,0,20", 16, one),
            *(case(20, 33, head_dim, one) for head_dim in (48, 80, 192)),
            case(20, 40, 16, (4, 2), "float32", causal=True, lse=True),
            packed("5,0,17,20", "9,3,17,20", 16, one, window=9, lse=True),
        )
    edges = (1, 63, 64, 65, 127, 128, 129, 191, 193, 777)
    kinds = ({"causal": True}, {"window": 1}, {"window": 65}, {"causal": True, "window": 200})
    return (
        *(case(n, n, head_dim, causal=True) for n in (*edges, 4095) for head_dim in (64, 128)),
        *(case(200, n, head_dim, causal=True) for n in (*edges, 4097) for head_dim in (64, 128)),
        *(case(777, 777, head_dim, **kind) for kind in kinds[1:] for head_dim in (64, 128)),
        *(case(300, 777, head_dim, **kind) for kind in kinds for head_dim in (64, 128)),
        *(case(777, 300, head_dim, **kind) for kind in kinds for head_dim in (64, 128)),
        *(
            case(n, n, head_dim, heads, causal=True, batch=2)
            for n in (777, 1024)
            for heads in ((8, 2), (6, 1))
            for head_dim in (64, 128)
        ),
        case(4, 777, heads=(8, 1)),
        *(case(777, 777, head_dim, (4, 2), causal=True, window=200) for head_dim in (64, 128)),
        case(700, 600, batch=2, lengths="65,600", causal=True),
        case(700, 600, 128, batch=2, lengths="65,600", window=100),
        *(
            packed(lengths, key_lengths, head_dim, (4, 2), **kind)
            for lengths, key_lengths in (
                ("777", ""),
                ("1,0,64,65,0,300,128", ""),
                ("5,0,170,400", "129,30,17,250"),
                (",".join(["7"] * 200), ""),
            )
            for head_dim in (64, 128)
            for kind in ({}, *kinds)
        ),
        *(case(300, 300, n, (4, 2), causal=True) for n in (16, 32, 48, 80, 96, 192, 256)),
        *(case(200, 300, n) for n in (48, 80, 96, 192, 256)),
        *(packed("77,300,5", "", n, (2, 1), causal=True) for n in (48, 96, 256)),
        case(777, 777, dtype="float16", causal=True),
        case(777, 777, 128, dtype="float16", causal=True),
        *(case(200, 200, n, dtype="float32", causal=True) for n in (64, 96, 128)),
        packed("77,300,5", dtype="float32", window=30),
        # Scores far from zero, where a reference from few keys, or from none, may fail.
        *(
            case(777, 777, head_dim, causal=True, magnitude=magnitude)
            for magnitude in (0.0, 4.0, 8.0, 40.0)
            for head_dim in (64, 128)
        ),
        case(777, 777, causal=True, base2=True),
        case(777, 777, 128, causal=True, window=300, base2=True),
        # More tiles than multiprocessors.
        *(case(4097, 4097, head_dim, (8, 2), causal=True) for head_dim in (64, 128)),
        *(case(300, 777, n, (4, 2), causal=True, lse=True) for n in (48, 64, 128, 256)),
        *(packed("1,64,65,300", "", n, (4, 2), window=65, lse=True) for n in (64, 128)),
        case(200, 300, dtype="float32", causal=True, lse=True),
        *(case(2048, 2048, head_dim, (8, 8), batch=2) for head_dim in (96, 128)),
    )


def _without_a_mask(operator: Operator, target: Target) -> Iterable[Case]:
    """Returns cases without a mask: ragged sizes, scores far apart, one key, and n_keys."""

    def case(batch, n_heads, n_q, n_k, head_dim=64, dtype="bfloat16", **drawn) -> Case:
        sizes = batch, n_heads, n_q, n_k, head_dim
        options = {"n_keys": "lengths" in drawn, "base2": drawn.pop("base2", False)}
        return operator.case(dtype, *sizes, **options, **drawn)

    def of_values(n_q, n_k, values, batch=1, **drawn) -> Case:
        return case(batch, 2, n_q, n_k, values=values, forward_only=True, **drawn)

    if target.kind != "cuda":
        return (
            # The first case of some options is tested most thoroughly, so it is the smallest.
            case(1, 1, 1, 65, 16, dtype="float32"),
            case(1, 1, 67, 65, 16, dtype="float32"),
            case(1, 1, 70, 63),
            case(1, 2, 33, 17, 16, dtype="float16"),
            case(1, 1, 40, 33, 16, dtype="float32", magnitude=30.0),
            *(case(1, 1, 40, 5, 16, dtype=dtype, magnitude=12.0) for dtype in FLOATS[::2]),
            case(2, 1, 33, 20, 16, dtype="float32", lengths="7,20"),
            case(2, 1, 20, 140, 16, lengths="7,140"),
            case(1, 1, 40, 33, 16, base2=True),
            case(2, 1, 20, 70, 16, lengths="7,70", base2=True),
            # These have head_dim 64, which the 8-bit form takes.
            of_values(40, 300, values="one_hot"),
            of_values(33, 300, values="offset", batch=2, lengths="129,300"),
            case(1, 1, 40, 33, magnitude=2.5),
            case(1, 1, 40, 33, 16, dtype="float32", lse=True),
            case(2, 1, 20, 140, 16, lengths="7,140", base2=True, lse=True),
        )
    return (
        *(case(1, 1, n, 200) for n in _EDGES),
        *(case(1, 1, 200, n) for n in _EDGES),
        case(2, 3, 127, 65),
        case(4, 8, 564, 64),
        case(64, 8, 564, 64),
        case(3, 8, 1100, 1000),
        case(1, 2, 777, 564, dtype="float16"),
        case(2, 3, 300, 100, dtype="float16"),
        case(1, 2, 200, 130, dtype="float32"),
        *(case(1, 2, 300, 200, 128, dtype=dtype) for dtype in ("float16", "float32")),
        *(case(1, 2, 300, 200, head_dim) for head_dim in (16, 32, 128)),
        *(case(1, 2, 777, 564, magnitude=size) for size in (0.0, 2.5, 8.0, 40.0)),
        *(case(1, 2, 300, 200, dtype="float32", magnitude=size) for size in (8.0, 12.0, 30.0)),
        *(case(2, 3, 300, 11, dtype=dtype, magnitude=12.0) for dtype in FLOATS),
        *(case(2, 3, 300, 3, dtype=dtype, magnitude=30.0) for dtype in FLOATS),
        case(2, 3, 300, 100, magnitude=8.0),
        case(4, 2, 1500, 1000, lengths="1,64,777,1000"),
        case(3, 2, 300, 128, lengths="1,65,128"),
        case(2, 2, 700, 600, magnitude=8.0, lengths="65,600"),
        case(1, 1, 11_000, 10_000),
        # Values that change most with a wrong order of keys, or with sums that lose their last
        # bits. Their gradients are differences of equals.
        *(of_values(200, n, values="one_hot") for n in (64, 777, 65_536)),
        *(of_values(200, n, values="offset") for n in (1000, 65_536, 205_000)),
        of_values(700, 600, values="offset", batch=3, lengths="65,129,600"),
        # More tiles than multiprocessors: whole tiles and then parts, some computed again.
        case(1, 8, 3300, 3000, magnitude=4.0),
        case(1, 8, 3300, 3000, dtype="float16", magnitude=2.0),
        case(4, 8, 2000, 1000, lengths="1,64,777,1000"),
        # More than four blocks of keys for each multiprocessor, the last ragged, and an odd number
        # of query tiles: persistent programs work on several items.
        *(case(8, 8, 300, 1100, dtype=dtype, magnitude=2.0) for dtype in FLOATS[:2]),
        # From magnitude 8 on some tiles of queries have an lse too far from 0, and at 40 all.
        *(case(1, 2, 777, n, base2=True) for n in (1, 65, 257, 10_000)),
        *(case(1, 2, n, 777, base2=True) for n in (1, 129)),
        *(case(1, 2, 777, 564, magnitude=size, base2=True) for size in (0.0, 4.0, 8.0, 40.0)),
        case(1, 2, 777, 564, dtype="float16", base2=True),
        case(1, 2, 200, 300, dtype="float32", base2=True),
        case(4, 8, 2000, 1000, lengths="1,64,777,1000", base2=True),
        case(2, 2, 700, 600, magnitude=8.0, lengths="65,600", base2=True),
        case(1, 8, 3300, 3000, magnitude=4.0, base2=True),
        *(case(1, 2, 777, n, head_dim, lse=True) for n in (65, 1000) for head_dim in (64, 128)),
        *(case(1, 2, 777, 564, magnitude=size, base2=True, lse=True) for size in (1.0, 8.0)),
        *(case(1, 2, 300, 200, dtype=dtype, lse=True) for dtype in FLOATS[1:]),
        case(4, 8, 2000, 1000, lengths="1,64,777,1000", lse=True),
        case(1, 8, 3300, 3000, lse=True),  # some tiles in parts
        # In some heads every lse is near 0. In the other heads some are not.
        *(case(8, 8, 300, 1100, magnitude=size, base2=True) for size in (2.0, 3.0)),
    )


def _first_key_left_out(q, k, v, n_keys, cu_q, cu_k, scale, **kind):
    n_keys = None if n_keys is None else n_keys - 1
    return reference(q, k[:, :, 1:], v[:, :, 1:], n_keys, None, None, scale, **kind)


def _keys_and_values_exchanged(q, k, v, *rest, **kind):
    return reference(q, v, k, *rest, **kind)


def _scaled_all_the_same(*arguments, base2=False, **kind):
    return reference(*arguments, **kind)


def _values_in_another_order(q, k, v, *rest, **kind):
    """Reorders each 16 values as tensor cores' 8-bit operands are, but not their keys."""
    whole = v.shape[2] // 16 * 16
    groups = v[:, :, :whole].unflatten(2, (-1, 2, 4, 2)).transpose(3, 4)
    v = v.clone()
    v[:, :, :whole] = groups.flatten(2, 5)
    return reference(q, k, v, *rest, **kind)


def _values_less_their_mean(q, k, v, *rest, **kind):
    return reference(q, k, v - v.mean(2, keepdim=True), *rest, **kind)


def _diagonal_one_off(q, k, v, n_keys, cu_q, cu_k, scale, **kind):
    """Adds a query at the end, so that each other query is beside the key before its own."""
    if cu_q is not None:
        return reference(q, k, v, n_keys, cu_q, cu_k, scale, **kind)
    import torch

    more = q.new_zeros(*q.shape[:2], 1, q.shape[3])
    found = reference(torch.cat([q, more], 2), k, v, n_keys, None, None, scale, **kind)
    if kind.get("lse"):
        return tuple(x[:, :, :-1] for x in found)
    return found[:, :, :-1]


def _window_one_short(*arguments, window=0, **kind):
    return reference(*arguments, window=window - 1 if window > 1 else window, **kind)


def _heads_grouped_the_other_way(q, k, v, *rest, **kind):
    """Gives head h of queries the keys of head h modulo H_kv."""
    times = q.shape[1] // k.shape[1]
    return reference(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1), *rest, **kind)


def _sequences_as_one(q, k, v, n_keys, cu_q, cu_k, scale, **kind):
    return reference(q, k, v, n_keys, None, None, scale, **kind)


def _lse_to_base_2(*arguments, lse=False, **kind):
    if not lse:
        return reference(*arguments, **kind)
    o, found = reference(*arguments, lse=True, **kind)
    return o, found / LN_2


def _lse_without_gradient(*arguments, lse=False, **kind):
    if not lse:
        return reference(*arguments, **kind)
    o, found = reference(*arguments, lse=True, **kind)
    return o, found.detach()


CONTROLS = {
    "the first key left out": _first_key_left_out,
    "keys and values exchanged": _keys_and_values_exchanged,
    "base2 and scaled all the same": _scaled_all_the_same,
    "values in another order than keys": _values_in_another_order,
    "values less their mean": _values_less_their_mean,
}
CONTROLS_OF = {  # the controls of each option
    "causal": {"the diagonal one off": _diagonal_one_off},
    "window": {"a window one short": _window_one_short},
    "n_kv_heads": {"heads grouped the other way": _heads_grouped_the_other_way},
    "n_sequences": {"packed sequences as one": _sequences_as_one},
    "lse": {"lse to base 2": _lse_to_base_2, "lse that gives no gradient": _lse_without_gradient},
}


def condition(operator: Operator, case: Case, inputs: Mapping) -> dict[str, float]:
    """Returns the relative error of each result that float32 may have: see `lost`."""
    p = case.problem
    q, k, v, *lengths = (inputs[name] for name in operator.tensors)
    seen = visible(q, k, *lengths, p["causal"], p["window"])
    return lost(q, k, v, softmax_scale(SCALE, p["base2"]), seen)


def lost(q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor | None) -> dict[str, float]:
    """Returns the relative error of each result that float32 may have (`gates.rounding`).

    If one key has all the weight, dq and dk are differences of equal terms, which no arithmetic in
    float32 has right. If they are zeros, the terms may have been rounded to the inputs' dtype. The
    output gradient is random; any will do.
    """
    import torch

    from tnp.ops._shared import rounding_error

    generator = torch.Generator(q.device).manual_seed(0)
    do = torch.randn(q.shape, device=q.device, generator=generator)
    floors = rounding_error.attention(q, k, v, do, scale, seen)
    squares = dict.fromkeys(("o", "lse", "dq", "dk", "dv"), 0.0)
    squares_of_terms = dict.fromkeys(squares, 0.0)
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        of_sample = seen if seen is None or seen.dim() < 4 else seen[b : b + 1]
        for h in range(k.shape[1]):  # a head at a time: memory
            of_queries = (slice(b, b + 1), slice(h * group, (h + 1) * group))
            of_keys = (slice(b, b + 1), slice(h, h + 1))
            rows = q[of_queries], k[of_keys], v[of_keys]
            head = [x.detach().double().requires_grad_() for x in rows]
            o, lse = attend(*head, of_sample, scale, lse=True)
            of_o = do[of_queries].double()
            gradients = torch.autograd.grad(o, head, of_o, retain_graph=True)
            for name, x in zip(squares, (o, lse, *gradients), strict=True):
                squares[name] += x.detach().square().sum().item()
            if not gradients[0].any():
                # At a constant sum of weights nothing is subtracted, and terms do not cancel.
                growth = (lse - lse.detach()).masked_fill(lse.isinf(), 0.0).exp()
                terms = torch.autograd.grad(o * growth[..., None], head[:2], of_o)
                for name, x in zip(("dq", "dk"), terms, strict=True):
                    squares_of_terms[name] += x.square().sum().item()
    least, rounding = rounding_error.LEAST_NORM, torch.finfo(q.dtype).eps / 4
    return {
        name: floors[name] / square**0.5
        if square
        else max(floors[name], rounding * squares_of_terms[name] ** 0.5) / least
        for name, square in squares.items()
    }
