"""Defines attention's inputs, their work, exact values of single heads, problems to compile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from tnp.dispatch.devices import Target
from tnp.dispatch.spec import EVERY_DTYPE_ON, Case, Operator, Problem, Work
from tnp.ops._shared.declared import numbers_out_of_range
from tnp.ops.attention.torch_forms import LN_2, attend, softmax_scale, visible
from tnp.util.checks import require_floats, require_one_device

if TYPE_CHECKING:
    import random

    from torch import Tensor

    from tnp.ops._shared.random_values import Random


SCALE = 0.125  # gates and benchmarks pass this scale
OPTIONS = ("base2", "n_keys")  # all kernels of ours take these
PACKED = ("cu_seqlens_q", "cu_seqlens_k")
# Kernels for attention of any kind take these.
OF_ANY_KIND = (*OPTIONS, *PACKED, "causal", "n_kv_heads", "n_sequences", "window")
WITH_LSE = (*OF_ANY_KIND, "lse")


def require_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError if q, k and v have wrong dimensions, dtypes, strides or devices."""
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
    """Returns the number of heads of keys and values."""
    return int(problem["n_kv_heads"] or problem["n_heads"])


def packed_lengths(case: Case, side: str) -> list[int]:
    """Returns the length of each packed sequence. `side` is "n_q" or "n_k".

    The case names lengths, as "7,0,40": `lengths` of queries and keys, `key_lengths` of only the
    keys. Without them, lengths are as equal as possible.
    """
    drawn, p = dict(case.draw), case.problem
    named = drawn.get("key_lengths" if side == "n_k" else "lengths", drawn.get("lengths"))
    if named:
        return [int(length) for length in str(named).split(",")]
    ends = [p[side] * (i + 1) // p["n_sequences"] for i in range(p["n_sequences"])]
    return [end - begin for begin, end in zip([0, *ends], ends, strict=False)]


def draw(case: Case, random: Random) -> dict[str, Tensor | None]:
    """Returns q, k, v, views of one projection [B, L, H + 2 H_kv, D] as in a model, and lengths.

    The case may name these:

    - `magnitude` scales q and k.
    - `lengths`, "7,40", are n_keys, else random, or the lengths of packed sequences.
    - `values` are "offset", with mean 1, or "one_hot", so that o shows each key's weight.

    With base2, q carries the scale. Scores to base 2 then equal scores to base e without it.
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
    """Returns half of each sample's n_keys, and packed sequences in the reverse order."""
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
    """Yields invalid lengths, valid ones, and where results become NaN.

    An n_keys out of range spoils its sample. An invalid cu_seqlens spoils the whole pack.
    """
    import torch

    n_k, results = case.problem["n_k"], ("o", "lse", "dq", "dk", "dv")
    # No sample's results depend on the number of another, so the given ones serve as valid ones.
    for wrong, _, spoiled in numbers_out_of_range(inputs, "n_keys", 1, n_k, *results):
        yield wrong, {}, spoiled
    for name in PACKED:
        if inputs[name] is not None:
            wrong = inputs[name].clone()
            wrong[-1 if name == PACKED[0] else 0] += 1
            yield {name: wrong}, {}, dict.fromkeys(results, torch.tensor(True, device=wrong.device))


def scores(case: Case) -> int:
    """Returns how many scores a head has: pairs of a query and a key that it sees, in all samples.

    Keys past a sample's n_keys count too, because n_keys are values and not sizes.
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
    """Returns the work: two products forward, and five backward, which computes scores again."""
    p = case.problem
    products = {"forward": 2.0, "backward": 5.0}[pass_]
    flops = products * 2 * p["n_heads"] * scores(case) * p["head_dim"]
    row = p["batch"] * p["head_dim"] * p.itemsize
    n_q, n_k = row * p["n_heads"] * p["n_q"], row * n_kv_heads(p) * p["n_k"]
    if pass_ == "forward":
        return Work({p.dtype: flops}, n_q + 2 * n_k, n_q)
    return Work({p.dtype: flops}, 3 * n_q + 2 * n_k, n_q + 2 * n_k)


ENDS = [0, -1], [0, -1]  # the first head of the first sample, the last of the last
SCORES_AT_ONCE = 1 << 27  # 1 GiB in float64


def partial_reference(case: Case, inputs: dict, gradients: dict | None) -> dict[str, tuple]:
    """Returns exact results of two heads of keys and of the heads of queries that share them.

    It takes some queries at a time: all scores of 200,000 keys would take terabytes.
    """
    import torch

    p = case.problem
    group = p["n_heads"] // n_kv_heads(p)
    # [2, H / H_kv] each: the sample of each end, and the heads of queries that share its keys.
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


def random_problem(operator: Operator, chance: random.Random, dtype: str) -> Problem:
    """Returns a random problem with sizes as in neural processes.

    Its forward pass takes up to half a millisecond on an H200. Most problems have at most 256 keys,
    which a kernel of its own takes.
    """
    while True:
        batch = chance.choice((1, 2, 4, 8, 16, 24, 32, 48, 64))
        n_q = round(100 * 200 ** chance.random())
        n_k = chance.choice((chance.randint(1, 256), round(20_000 ** chance.random())))
        if batch * n_q * n_k < 1.2e8 and batch * max(n_q, n_k) < 300_000:
            return operator.problem(dtype, batch=batch, n_heads=8, n_q=n_q, n_k=n_k, head_dim=64)


def within(operator: Operator, model: Mapping, run: Mapping) -> Problem | None:
    """Returns the problem of a model's layer, or None if `model` has no heads.

    In a language model, a token sees the tokens before it, of its own sequence if the run has
    `lengths`, "7,0,40". In a neural process, every row sees the context rows.

    Raises ValueError if lengths do not fit the run, or if tokens are cached.
    """
    if "n_tokens" in run:
        if "n_heads" not in model:
            return None
        if "n_cached" in run:
            raise ValueError("its tokens see cached keys: use operator decode_attention")
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

# dtype, head_dim, and options. Types other than the model's own are compiled only with n_keys,
# which need more registers. float16 needs as many as bfloat16.
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
# Other kinds of attention: masks of language models, which need most registers, and head_dims that
# only the portable kernels take, whose columns are masked too.
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
# Batch, queries and keys: many keys and few; enough programs to fill a GPU, and too few. With the
# last sizes the forward pass splits tiles along the keys.
_SIZES = ((1, 1100, 1000), (64, 1100, 1000), (1, 564, 128), (64, 564, 64), (1, 3300, 3000))


def suite(operator: Operator, dtype: str) -> dict[str, Problem]:
    """Returns problems of a widespread suite of attention kernels, by name.

    The suite has float16 and float32.
    """
    sizes = ((1, 8, 512, 64), (4, 32, 1024, 64), (8, 32, 2048, 128))
    return {
        f"b{batch}_h{heads}_l{n}_d{head_dim}{'_causal' * causal}": operator.problem(
            dtype, batch=batch, n_heads=heads, n_q=n, n_k=n, head_dim=head_dim, causal=causal
        )
        for causal in (False, True)
        for batch, heads, n, head_dim in sizes
        if dtype in ("float16", "float32")
    }


def compiled(operator: Operator, target: Target) -> Iterable[Problem]:
    """Yields problems to compile kernels for, with 8 heads. Other sizes need no other kernels.

    `EVERY_DTYPE_ON` gets every type, other capabilities the model's own type.
    Head_dims other than 64 come with many keys and with few keys, and every kind with many keys.
    """
    if target.capability < 80:  # only CUDA C++
        sizes = {"batch": 1, "n_heads": 8, "n_q": 2048, "n_k": 2048}
        yield from (operator.problem("float16", **sizes, head_dim=n) for n in (64, 128))
        return
    types = _TYPES if target.capability in EVERY_DTYPE_ON else _TYPES[:2]
    for dtype, head_dim, options in types:
        for batch, n_q, n_k in _SIZES if head_dim == 64 else _SIZES[1:3]:
            sizes = {"batch": batch, "n_heads": 8, "n_q": n_q, "n_k": n_k, "head_dim": head_dim}
            yield operator.problem(dtype, **sizes, **dict.fromkeys(options, True))
    sizes = {"batch": 1, "n_heads": 8, "n_q": 2048, "n_k": 2048}
    for dtype, head_dim, kind in _KINDS:
        yield operator.problem(dtype, **sizes, head_dim=head_dim, **kind)
