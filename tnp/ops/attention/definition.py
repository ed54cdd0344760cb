"""What attention is measured by: its inputs, their work, and what is compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from tnp.dispatch.devices import Target
from tnp.dispatch.spec import Case, Operator, Problem, Work
from tnp.ops._shared.declared import numbers_out_of_range
from tnp.ops.attention.torch_forms import LN_2, attend, softmax_scale, visible
from tnp.util.checks import require_floats, require_one_device

if TYPE_CHECKING:
    import random

    from torch import Tensor

    from tnp.ops._shared.random_values import Random


SCALE = 0.125  # that gates and benchmarks pass
OPTIONS = ("base2", "n_keys")  # that all kernels of ours take
PACKED = ("cu_seqlens_q", "cu_seqlens_k")
IN_CUDA = ("base2", "causal", "lse", "n_kv_heads")  # what kernels in CUDA C++ take
# And those that take attention of any kind.
OF_ANY_KIND = (*OPTIONS, *PACKED, "causal", "n_kv_heads", "n_sequences", "window")
WITH_LSE = (*OF_ANY_KIND, "lse")


def require_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError where q, k and v are not what any attention takes."""
    of_keys = "[B, H_kv, n_k, D]"
    for name, x, shape in (("q", q, "[B, H, n_q, D]"), ("k", k, of_keys), ("v", v, of_keys)):
        if x.dim() != 4:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be {shape}")
        if x.dtype != q.dtype:
            raise ValueError(f"{name} is {x.dtype} and q is {q.dtype}: they must be equal")
        if x.stride(-1) != 1 and x.shape[-1] > 1:
            raise ValueError(
                f"{name} has strides {x.stride()}: its last dimension must be contiguous"
            )
    require_one_device(q=q, k=k, v=v)
    require_floats(q=q)
    if k.shape != v.shape:
        raise ValueError(f"k is {tuple(k.shape)} and v {tuple(v.shape)}: they must be equal")


def n_kv_heads(problem: Problem) -> int:
    """Heads of keys and values."""
    return int(problem["n_kv_heads"] or problem["n_heads"])


def packed_lengths(case: Case, side: str) -> list[int]:
    """Of each packed sequence, n_q or n_k: those that the case names, or as equal as can be.

    `lengths` names both sides', `key_lengths` those of the keys: "7,0,40".
    """
    drawn, p = dict(case.draw), case.problem
    named = drawn.get("key_lengths" if side == "n_k" else "lengths", drawn.get("lengths"))
    if named:
        return [int(length) for length in str(named).split(",")]
    ends = [p[side] * (i + 1) // p["n_sequences"] for i in range(p["n_sequences"])]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def draw(case: Case, random: Random) -> dict[str, Tensor | None]:
    """q, k, v, views of one projection [B, L, H + 2 H_kv, D] as in a model.

    `magnitude` scales q and k; `lengths` names n_keys, "7,40", which else are drawn, or where
    sequences are packed their lengths; `values` are "offset", of mean 1, or "one_hot", where o says
    how much weight which keys have. With base2 q carries the scale, and scores are to base 2 what
    they are to base e without.
    """
    import torch

    p, drawn = case.problem, dict(case.draw)
    heads = p["n_heads"], n_kv_heads(p), n_kv_heads(p)
    projection = random(p["batch"], max(p["n_q"], p["n_k"]), sum(heads), p["head_dim"])
    q, k, v = (x.transpose(1, 2) for x in projection.split(heads, dim=2))
    for x in (q, k):
        x *= drawn.get("magnitude", 1.0)
    if p["base2"]:
        q *= SCALE / LN_2
    if drawn.get("values") == "offset":
        v += 1.0
    elif drawn.get("values") == "one_hot":
        key = torch.arange(v.shape[2], device=v.device)[:, None]
        v.copy_(key % p["head_dim"] == torch.arange(p["head_dim"], device=v.device))

    def numbers(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=projection.device)

    tensors = {"q": q[:, :, : p["n_q"]], "k": k[:, :, : p["n_k"]], "v": v[:, :, : p["n_k"]]}
    if p["n_sequences"]:
        for name, side in (("cu_seqlens_q", "n_q"), ("cu_seqlens_k", "n_k")):
            tensors[name] = numbers([0, *accumulate(packed_lengths(case, side))])
    elif "lengths" in drawn:
        tensors["n_keys"] = numbers([int(length) for length in drawn["lengths"].split(",")])
    elif p["n_keys"]:
        tensors["n_keys"] = random.integers(1, p["n_k"], p["batch"])
    return tensors


def other_lengths(inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Half of each sample's keys, and packed sequences in the reverse order."""
    found = {name: inputs[name] for name in (*PACKED, "n_keys") if inputs[name] is not None}
    for name, x in found.items():
        if name == "n_keys":
            found[name] = (x + 1) // 2
        else:
            found[name] = x.diff(prepend=x[:1]).roll(-1).flip(0).cumsum(0, dtype=x.dtype)
    return found


def out_of_range(
    case: Case, inputs: Mapping[str, Tensor | None]
) -> Iterator[tuple[dict, dict, dict]]:
    """Numbers of keys, which spoil their sample, and a cu_seqlens that spoils the whole pack."""
    import torch

    n_k, results = case.problem["n_k"], ("o", "lse", "dq", "dk", "dv")
    # No sample's results depend on the number of another: those drawn serve.
    for wrong, _, spoiled in numbers_out_of_range(inputs, "n_keys", 1, n_k, *results):
        yield wrong, {}, spoiled
    for name in PACKED:
        if inputs[name] is not None:
            wrong = inputs[name].clone()
            wrong[-1 if name == PACKED[0] else 0] += 1
            yield {name: wrong}, {}, dict.fromkeys(results, torch.tensor(True, device=wrong.device))


def scores(case: Case) -> int:
    """How many a head computes: pairs of a query and a key that it sees, of all samples.

    Keys past a sample's n_keys are not left out: what is left depends on values.
    """
    p = case.problem
    sides = [[p["n_q"]], [p["n_k"]]]
    if p["n_sequences"]:
        sides = [packed_lengths(case, side) for side in ("n_q", "n_k")]
    causal, window = p["causal"], int(p["window"])
    total = 0
    for n_q, n_k in zip(*sides, strict=True):
        if not causal and not window:
            total += n_q * n_k
            continue
        left, right = window or n_k + n_q, 1 if causal else window
        for beside in range(n_k - n_q, n_k):
            total += max(0, min(n_k, beside + right) - max(0, beside - left + 1))
    return p["batch"] * total


def work(case: Case, pass_: str) -> Work:
    """Two products forward; five backward, since the scores are computed again."""
    p = case.problem
    products = {"forward": 2.0, "backward": 5.0}[pass_]
    flops = products * 2 * p["n_heads"] * scores(case) * p["head_dim"]
    row = p["batch"] * p["head_dim"] * p.itemsize
    n_q, n_k = row * p["n_heads"] * p["n_q"], row * n_kv_heads(p) * p["n_k"]
    if pass_ == "forward":
        return Work({p.dtype: flops}, n_q + 2 * n_k, n_q)
    return Work({p.dtype: flops}, 3 * n_q + 2 * n_k, n_q + 2 * n_k)


ENDS = [0, -1], [0, -1]  # the first head of the first sample, the last of the last
SCORES_AT_ONCE = 1 << 27  # of them in float64, 1 GiB


def spot(case: Case, inputs: dict, gradients: dict | None) -> dict[str, tuple]:
    """Two heads of keys, and the heads that ask them, some queries at a time: all scores of 200,000
    keys would take terabytes.
    """
    import torch

    p = case.problem
    group = p["n_heads"] // n_kv_heads(p)
    # [2, H / H_kv]: of each end its sample, and the heads of the queries that share its keys.
    samples = torch.tensor(ENDS[0])[:, None].expand(2, group)
    heads = torch.stack([torch.arange(group), torch.arange(-group, 0)])
    of_queries = samples, heads
    q = inputs["q"][of_queries].double()
    k, v = (inputs[name][ENDS][:, None].double().requires_grad_() for name in "kv")
    lengths = [inputs[name] for name in ("n_keys", "cu_seqlens_q", "cu_seqlens_k")]
    if lengths[0] is not None:
        lengths[0] = lengths[0][ENDS[0]]
    n_q, n_k = q.shape[2], k.shape[2]
    scale, kind = softmax_scale(SCALE, p["base2"]), (p["causal"], p["window"])
    step = max(1, SCORES_AT_ONCE // (2 * group * n_k))
    names = ("o", "lse") if p["lse"] else ("o",)
    outputs, dq, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
    for part in (slice(begin, begin + step) for begin in range(0, n_q, step)):
        some = q[:, :, part].detach().requires_grad_()
        with torch.set_grad_enabled(gradients is not None):
            seen = visible(q, k, *lengths, *kind, rows=part)
            found = attend(some, k, v, seen, scale, p["lse"])
            outputs.append(found if p["lse"] else (found,))
        if gradients is not None:
            arriving = [gradients[name][of_queries][:, :, part].double() for name in names]
            of_part = torch.autograd.grad(outputs.pop(), (some, k, v), arriving)
            dq.append(of_part[0])
            dk += of_part[1]
            dv += of_part[2]
    if gradients is None:
        parts = zip(names, zip(*outputs, strict=True), strict=True)
        return {name: (of_queries, torch.cat(some, 2)) for name, some in parts}
    of_keys = {"dk": (ENDS, dk[:, 0]), "dv": (ENDS, dv[:, 0])}
    return {"dq": (of_queries, torch.cat(dq, 2))} | of_keys


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


def within(operator: Operator, model: Mapping, run: Mapping) -> Problem | None:
    """A layer's: in a language model tokens ask those before them, of their own sequence where a
    run draws `lengths`, "7,0,40"; in a neural process every row asks, and context rows answer.
    """
    if "n_tokens" in run:
        if "n_heads" not in model:
            return None
        if "n_cached" in run:
            raise ValueError("its tokens ask what is cached: that is operator decode_attention's")
        kv_heads = model.get("n_kv_heads", model["n_heads"])
        kind = {"causal": True, "window": model.get("window", 0)}
        kind["n_kv_heads"] = kv_heads if kv_heads != model["n_heads"] else 0
        lengths = run.get("draw", {}).get("lengths")
        if lengths:
            sizes = [int(length) for length in lengths.split(",")]
            if sum(sizes) != run["n_tokens"]:
                raise ValueError(
                    f"lengths are {sum(sizes)} in all: they must be n_tokens, {run['n_tokens']}"
                )
            if run["batch"] != 1:
                raise ValueError(f"batch is {run['batch']}: packed sequences lie in a batch of 1")
            kind |= dict.fromkeys(PACKED, True) | {"n_sequences": len(sizes)}
        return operator.problem(
            run["dtype"], batch=run["batch"], n_heads=model["n_heads"], n_q=run["n_tokens"],
            n_k=run["n_tokens"], head_dim=model["head_dim"], **kind,
        )  # fmt: skip
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
    ("bfloat16", 64, ("lse", "n_keys")),
    ("float16", 64, ("n_keys",)),
    ("float32", 64, ("n_keys",)),
    *((dtype, head_dim, ("n_keys",)) for dtype in ("bfloat16", "float32") for head_dim in (16, 32)),
    ("bfloat16", 128, ("n_keys",)),  # float32 spills there in every tile: slow, and still right
)
# Of other kinds, with masks that need most registers: what language models train with, and at
# head_dims that the portable kernels alone take, whose columns are masked too, all at once.
_GROUPED = {"causal": True, "n_kv_heads": 2}
_WINDOW = {"causal": True, "window": 300, "n_sequences": 4} | dict.fromkeys(PACKED, True)
_KINDS = (
    ("bfloat16", 128, _GROUPED),
    ("bfloat16", 128, _WINDOW),
    ("bfloat16", 64, {"causal": True, "n_keys": True}),
    ("bfloat16", 64, _GROUPED | _WINDOW),
    *(("bfloat16", head_dim, _GROUPED | _WINDOW) for head_dim in (48, 80, 192)),
    ("float32", 64, _GROUPED | _WINDOW),
    ("bfloat16", 128, {"lse": True}),
)
# Batch, queries and keys: many keys and few; enough programs to fill a GPU, and too few; so many
# keys that the forward pass splits tiles along them.
_SIZES = ((1, 1100, 1000), (64, 1100, 1000), (1, 564, 128), (64, 564, 64), (1, 3300, 3000))


def compiled(operator: Operator, target: Target) -> Iterable[Problem]:
    """What kernels are compiled for, of 8 heads; at other sizes they are the same.

    Every type for the GPU that has all kernels, the model's own for the others; other head_dims
    for many keys and for few alone; every kind for many keys.
    """
    if target.capability < 80:  # CUDA C++ alone
        sizes = {"batch": 1, "n_heads": 8, "n_q": 2048, "n_k": 2048}
        yield from (operator.problem("float16", **sizes, head_dim=n) for n in (64, 128))
        return
    types = _TYPES if target.capability == 90 else _TYPES[:2]
    for dtype, head_dim, options in types:
        for batch, n_q, n_k in _SIZES if head_dim == 64 else _SIZES[1:3]:
            sizes = {"batch": batch, "n_heads": 8, "n_q": n_q, "n_k": n_k, "head_dim": head_dim}
            yield operator.problem(dtype, **sizes, **dict.fromkeys(options, True))
    sizes = {"batch": 1, "n_heads": 8, "n_q": 2048, "n_k": 2048}
    for dtype, head_dim, kind in _KINDS:
        yield operator.problem(dtype, **sizes, head_dim=head_dim, **kind)
