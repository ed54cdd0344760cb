"""What attention is measured by: inputs, work, the cases of its gate, and what must fail there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from typing import TYPE_CHECKING

from tnp.contract import FLOATS, Case, Operator, Problem, Work
from tnp.ops.attention.torch_forms import LN_2, reference, softmax_scale
from tnp.targets import Target

if TYPE_CHECKING:
    import random

    from torch import Tensor

    from tnp.values import Random


def draw(case: Case, random: Random) -> dict[str, Tensor | None]:
    """q, k, v, views of one projection [B, L, 3, H, D] as in a model.

    `magnitude` scales q and k; `lengths` names n_keys, "7,40", which else are drawn; `values` are
    "offset", of mean 1, or "one_hot", where o says how much weight which keys have. With base2 q
    carries the scale, and scores are to base 2 what they are to base e without.
    """
    import torch

    p, drawn = case.problem, dict(case.draw)
    projection = random(p["batch"], max(p["n_q"], p["n_k"]), 3, p["n_heads"], p["head_dim"])
    projection[:, :, :2] *= drawn.get("magnitude", 1.0)
    if p["base2"]:
        projection[:, :, 0] *= SCALE / LN_2
    q, k, v = projection.permute(2, 0, 3, 1, 4)
    if drawn.get("values") == "offset":
        v += 1.0
    elif drawn.get("values") == "one_hot":
        key = torch.arange(v.shape[2], device=v.device)[:, None]
        v.copy_(key % p["head_dim"] == torch.arange(p["head_dim"], device=v.device))
    n_keys = None
    if "lengths" in drawn:
        lengths = [int(length) for length in drawn["lengths"].split(",")]
        n_keys = torch.tensor(lengths, dtype=torch.int32, device=projection.device)
    elif p["n_keys"]:
        n_keys = random.integers(1, p["n_k"], p["batch"])
    tensors = {"q": q[:, :, : p["n_q"]], "k": k[:, :, : p["n_k"]], "v": v[:, :, : p["n_k"]]}
    return tensors | {"n_keys": n_keys}


def work(case: Case, pass_: str) -> Work:
    """Two products forward; five backward, since the scores are computed again."""
    p = case.problem
    products = {"forward": 2.0, "backward": 5.0}[pass_]
    flops = products * 2 * p["batch"] * p["n_heads"] * p["n_q"] * p["n_k"] * p["head_dim"]
    row = p["batch"] * p["n_heads"] * p["head_dim"] * p.itemsize
    n_q, n_k = row * p["n_q"], row * p["n_k"]
    if pass_ == "forward":
        return Work({p.dtype: flops}, n_q + 2 * n_k, n_q)
    return Work({p.dtype: flops}, 3 * n_q + 2 * n_k, n_q + 2 * n_k)


SCALE = 0.125  # that gates and benchmarks pass
OPTIONS = ("base2", "n_keys")  # that PyTorch's forms and all kernels of ours take
ENDS = [0, -1], [0, -1]  # the first head of the first sample, the last of the last
SCORES_AT_ONCE = 1 << 27  # of them in float64, 1 GiB


def spot(case: Case, inputs: dict, gradients: dict | None) -> dict[str, tuple]:
    """Two heads, some queries at a time: all scores of 200,000 keys would take terabytes."""
    import torch

    q, k, v = (inputs[name][ENDS][:, None].double().requires_grad_() for name in "qkv")
    n_keys = None if inputs["n_keys"] is None else inputs["n_keys"][ENDS[0]]
    n_q, n_k = q.shape[2], k.shape[2]
    step = max(1, SCORES_AT_ONCE // (2 * n_k))
    o, dq, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
    for part in (slice(begin, begin + step) for begin in range(0, n_q, step)):
        some = q[:, :, part].detach().requires_grad_()
        with torch.set_grad_enabled(gradients is not None):
            o.append(reference(some, k, v, n_keys, SCALE, case.problem["base2"]))
        if gradients is not None:
            do = gradients["o"][ENDS][:, None, part].double()
            of_part = torch.autograd.grad(o.pop(), (some, k, v), do)
            dq.append(of_part[0])
            dk += of_part[1]
            dv += of_part[2]
    if gradients is None:
        return {"o": (ENDS, torch.cat(o, 2)[:, 0])}
    whole = {"dq": torch.cat(dq, 2), "dk": dk, "dv": dv}
    return {name: (ENDS, x[:, 0]) for name, x in whole.items()}


KEY_BLOCK = 64  # keys that every kernel reads at a time, or a multiple of it


def coordinates(problem: Problem) -> tuple[float, ...]:
    """What costs: heads of all samples, queries, keys; past one block, in whole blocks."""
    n_k = problem["n_k"]
    read = n_k if n_k <= KEY_BLOCK else -(-n_k // KEY_BLOCK) * KEY_BLOCK
    return problem["batch"] * problem["n_heads"], problem["n_q"], read


def drawn(operator: Operator, chance: random.Random, dtype: str) -> Problem:
    """Sizes as neural processes have them, up to half a millisecond forward on an H200.

    Most of them have at most 256 keys, which a kernel of its own takes.
    """
    while True:
        batch = chance.choice((1, 2, 4, 8, 16, 24, 32, 48, 64))
        n_q = round(100 * 200 ** chance.random())
        n_k = chance.choice((chance.randint(1, 256), round(20_000 ** chance.random())))
        if batch * n_q * n_k < 1.2e8 and batch * max(n_q, n_k) < 300_000:
            return operator.problem(dtype, batch=batch, n_heads=8, n_q=n_q, n_k=n_k, head_dim=64)


def within(operator: Operator, model: Mapping, run: Mapping) -> Problem:
    """A layer's: every row asks, context rows answer."""
    return operator.problem(
        run["dtype"],
        batch=run["batch"],
        n_heads=model["n_heads"],
        n_q=run["n_context"] + run["n_target"],
        n_k=run["n_context"],
        head_dim=model["d_model"] // model["n_heads"],
    )


# ---------------------------------------------------------------------------------- the compiler

# dtype, head_dim, and options. Away from the model's own type only the form with n_keys is
# compiled, which needs more registers, and float16 needs what bfloat16 needs.
_TYPES = (
    ("bfloat16", 64, ()),
    ("bfloat16", 64, ("n_keys",)),
    ("bfloat16", 64, ("base2",)),
    ("bfloat16", 64, ("base2", "n_keys")),
    ("float16", 64, ("n_keys",)),
    ("float32", 64, ("n_keys",)),
    *((dtype, head_dim, ("n_keys",)) for dtype in ("bfloat16", "float32") for head_dim in (16, 32)),
    ("bfloat16", 128, ("n_keys",)),  # float32 spills there in every tile: slow, and still right
)
# Batch, queries and keys: many keys and few; enough programs to fill a GPU, and too few; so many
# keys that the forward pass splits tiles along them.
_SIZES = ((1, 1100, 1000), (64, 1100, 1000), (1, 564, 128), (64, 564, 64), (1, 3300, 3000))


def compiled(operator: Operator, target: Target) -> Iterable[Problem]:
    """What kernels are compiled for, of 8 heads; at other sizes they are the same.

    Every type for the GPU that has all kernels, the model's own for the others; other head_dims
    for many keys and for few alone.
    """
    types = _TYPES if target.capability == 90 else _TYPES[:2]
    for dtype, head_dim, options in types:
        for batch, n_q, n_k in _SIZES if head_dim == 64 else _SIZES[1:3]:
            sizes = {"batch": batch, "n_heads": 8, "n_q": n_q, "n_k": n_k, "head_dim": head_dim}
            yield operator.problem(dtype, **sizes, **dict.fromkeys(options, True))


# --------------------------------------------------------------------------------------- the gate

# On both sides of every tile's edge, in turn for queries and keys; at magnitude 40 scores go past
# where 2^s overflows float32, from 8 on no tile of Hopper's keeps its reference, at 0 all keys are
# equal. Of few keys at magnitude 12 and more one has all the weight, and dq and dk are differences
# of equals.
_EDGES = (1, 63, 64, 65, 127, 564, 777, 10_000, 11_000, 205_000)


def cases(operator: Operator, target: Target) -> Iterable[Case]:
    """Ragged, far apart, of one key, and of a length for every sample."""

    def case(batch, n_heads, n_q, n_k, head_dim=64, dtype="bfloat16", **drawn) -> Case:
        sizes = batch, n_heads, n_q, n_k, head_dim
        options = {"n_keys": "lengths" in drawn, "base2": drawn.pop("base2", False)}
        return operator.case(dtype, *sizes, **options, **drawn)

    def of_values(n_q, n_k, values, batch=1, **drawn) -> Case:
        return case(batch, 2, n_q, n_k, values=values, forward_only=True, **drawn)

    if target.kind != "cuda":
        return (
            # The first of its options is tested most thoroughly, so it is the smallest.
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
            # Of head_dim 64, as the 8-bit form takes it.
            of_values(40, 300, values="one_hot"),
            of_values(33, 300, values="offset", batch=2, lengths="129,300"),
            case(1, 1, 40, 33, magnitude=2.5),
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
        # What a wrong order of keys, and sums that lose their last bits, would do most to. Their
        # gradients are differences of equals.
        *(of_values(200, n, values="one_hot") for n in (64, 777, 65_536)),
        *(of_values(200, n, values="offset") for n in (1000, 65_536, 205_000)),
        of_values(700, 600, values="offset", batch=3, lengths="65,129,600"),
        # More tiles than multiprocessors: whole ones and then parts, some done again; by sample.
        case(1, 8, 3300, 3000, magnitude=4.0),
        case(1, 8, 3300, 3000, dtype="float16", magnitude=2.0),
        case(4, 8, 2000, 1000, lengths="1,64,777,1000"),
        # More blocks of keys than four for each multiprocessor, the last ragged, and an odd number
        # of query tiles: what persistent programs take up again and again.
        *(case(8, 8, 300, 1100, dtype=dtype, magnitude=2.0) for dtype in FLOATS[:2]),
        # From magnitude 8 on some tiles of queries, and at 40 all, have an lse too far from 0.
        *(case(1, 2, 777, n, base2=True) for n in (1, 65, 257, 10_000)),
        *(case(1, 2, n, 777, base2=True) for n in (1, 129)),
        *(case(1, 2, 777, 564, magnitude=size, base2=True) for size in (0.0, 4.0, 8.0, 40.0)),
        case(1, 2, 777, 564, dtype="float16", base2=True),
        case(1, 2, 200, 300, dtype="float32", base2=True),
        case(4, 8, 2000, 1000, lengths="1,64,777,1000", base2=True),
        case(2, 2, 700, 600, magnitude=8.0, lengths="65,600", base2=True),
        case(1, 8, 3300, 3000, magnitude=4.0, base2=True),
        # In some heads every lse is near 0, in the others not.
        *(case(8, 8, 300, 1100, magnitude=size, base2=True) for size in (2.0, 3.0)),
    )


def _first_key_left_out(q, k, v, n_keys, scale, base2=False):
    n_keys = None if n_keys is None else n_keys - 1
    return reference(q, k[:, :, 1:], v[:, :, 1:], n_keys, scale, base2)


def _keys_and_values_exchanged(q, k, v, n_keys, scale, base2=False):
    return reference(q, v, k, n_keys, scale, base2)


def _scaled_all_the_same(q, k, v, n_keys, scale, base2=False):
    return reference(q, k, v, n_keys, scale)


def _values_in_another_order(q, k, v, n_keys, scale, base2=False):
    """Of each 16 in the order of tensor cores' 8-bit operands, left to their own keys."""
    whole = v.shape[2] // 16 * 16
    groups = v[:, :, :whole].unflatten(2, (-1, 2, 4, 2)).transpose(3, 4)
    v = v.clone()
    v[:, :, :whole] = groups.flatten(2, 5)
    return reference(q, k, v, n_keys, scale, base2)


def _values_less_their_mean(q, k, v, n_keys, scale, base2=False):
    return reference(q, k, v - v.mean(2, keepdim=True), n_keys, scale, base2)


CONTROLS = {
    "the first key left out": _first_key_left_out,
    "keys and values exchanged": _keys_and_values_exchanged,
    "base2 and scaled all the same": _scaled_all_the_same,
    "values in another order than keys": _values_in_another_order,
    "values less their mean": _values_less_their_mean,
}


def condition(operator: Operator, case: Case, inputs: Mapping) -> dict[str, float]:
    """What float32 must be expected to lose of each result, relative to it (`gates.rounding`).

    Where one key has all the weight dq and dk are what equal terms leave of one another: no
    arithmetic in float32 has them right. An output gradient is drawn, any will do.
    """
    import torch

    from tnp.gates import rounding

    scale = softmax_scale(SCALE, case.problem["base2"])
    q, k, v, n_keys = (inputs[name] for name in operator.tensors)
    generator = torch.Generator(q.device).manual_seed(0)
    do = torch.randn(q.shape, device=q.device, generator=generator)
    lengths = [k.shape[2]] * len(q) if n_keys is None else n_keys.tolist()
    floors = rounding.attention(q, k, v, do, scale, lengths)
    squares = dict.fromkeys(("o", "dq", "dk", "dv"), 0.0)
    for b, h in product(range(q.shape[0]), range(q.shape[1])):  # a head at a time: memory
        rows = (q[b, h], k[b, h, : lengths[b]], v[b, h, : lengths[b]])
        head = [x.detach().double().requires_grad_() for x in rows]
        o = torch.softmax(scale * head[0] @ head[1].mT, -1) @ head[2]
        results = (o, *torch.autograd.grad(o, head, do[b, h].double()))
        for name, x in zip(squares, results, strict=True):
            squares[name] += x.detach().square().sum().item()
    return {
        name: floors[name] / square**0.5 if square else float("inf")
        for name, square in squares.items()
    }
