"""Defines decode attention's inputs, their work, the cases of its gate, and its controls."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from random import Random as Chance
from typing import TYPE_CHECKING

from tnp.dispatch.devices import Target
from tnp.dispatch.spec import FLOATS, ITEMSIZE, Case, Operator, Problem, Work
from tnp.ops._shared.declared import numbers_out_of_range
from tnp.ops.decode_attention.torch_forms import reference, whole

if TYPE_CHECKING:
    from torch import Tensor

    from tnp.ops._shared.random_values import Random

SCALE = 0.125  # gates and benchmarks pass this scale
OPTIONS = ("cache", "full", "page_table", "k_descale", "v_descale")
CACHES = {"e4m3": "float8_e4m3fn"}  # number formats of a cache other than q's
SPARE_PAGES = 3  # pages of no sequence
MANY = 128  # sequences whose pairs fill waves of A100, H100, H200 and B200 (`Config.whole`)


def rows_of(problem: Problem) -> int:
    """Returns how many queries read the same keys: heads of a group times tokens."""
    return problem["heads"] // problem["kv_heads"] * problem["n_queries"]


def cache_itemsize(problem: Problem) -> int:
    """Returns the bytes of an element of the cache."""
    return ITEMSIZE[CACHES[problem["cache"]]] if problem["cache"] else problem.itemsize


def lengths_of(case: Case) -> list[int]:
    """Returns the case's lengths: "7,40", or "log_uniform" for random ones, or else all full."""
    batch, n_keys, drawn = case.problem["batch"], case.problem["n_keys"], case["lengths"]
    if drawn == "log_uniform":
        chance = Chance(0)
        return [round(n_keys ** chance.random()) for _ in range(batch)]
    return list(map(int, drawn.split(","))) if drawn else [n_keys] * batch


def draw(case: Case, random: Random) -> dict[str, Tensor | None]:
    """Returns the inputs of a case.

    A token's heads lie together, as projections write them. With "heads_first", a head's tokens lie
    together. Pages are in random order, and some belong to no sequence. `magnitude` scales q and k.
    """
    import torch

    p = case.problem
    batch, heads, kv_heads, head_dim = p["batch"], p["heads"], p["kv_heads"], p["head_dim"]
    n_pages, n_columns = batch, p["n_keys"] // p["page"]
    tensors: dict[str, Tensor | None] = dict.fromkeys(("page_table", "k_descale", "v_descale"))
    if p["page_table"]:
        n_pages = batch * n_columns + SPARE_PAGES
        order = random(n_pages, dtype=torch.float32).argsort().to(torch.int32)
        tensors["page_table"] = order[: batch * n_columns].view(batch, n_columns)
    dtype = getattr(torch, CACHES[p["cache"]]) if p["cache"] else random.dtype

    def cache() -> Tensor:
        if case["heads_first"]:
            return random(n_pages, kv_heads, p["page"], head_dim)
        return random(n_pages, p["page"], kv_heads, head_dim).transpose(1, 2)

    q, k = random(batch, p["n_queries"], heads, head_dim).transpose(1, 2), cache()
    if case["magnitude"]:  # a product is a copy, and memory holds the largest caches only once
        q, k = q * case["magnitude"], k * case["magnitude"]
    tensors |= {"q": q, "k": k.to(dtype), "v": cache().to(dtype)}
    for name in ("k_descale", "v_descale"):
        if p[name]:
            shape = (batch, kv_heads) if case["descale_each"] else (kv_heads,)
            tensors[name] = random(*shape, dtype=torch.float32).abs() + 0.5
    lengths = torch.tensor(lengths_of(case), dtype=torch.int32)
    return tensors | {"lengths": lengths.to(random.device)}


def other_lengths(inputs: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Returns half of each sequence's length."""
    return {"lengths": inputs["lengths"] // 2}


def out_of_range(
    case: Case, inputs: Mapping[str, Tensor | None]
) -> Iterator[tuple[dict, dict, dict]]:
    """Yields invalid lengths, and an invalid page. Each makes results of its sequence NaN."""
    yield from numbers_out_of_range(inputs, "lengths", 0, case.problem["n_keys"], "o")
    table, uses = inputs["page_table"], inputs["lengths"] > 0
    if table is None or not uses[0]:
        return
    wrong, right, where = table.clone(), table.clone(), uses & False
    wrong[0, 0], right[0, 0], where[0] = -1, 0, True
    yield {"page_table": wrong}, {"page_table": right}, {"o": where}


def work(case: Case, pass_: str) -> Work:
    """Returns the work: two products with each sequence's keys, which are read once."""
    p, n_keys = case.problem, sum(lengths_of(case))
    flops = 4.0 * n_keys * p["heads"] * p["n_queries"] * p["head_dim"]
    queries = p["batch"] * p["heads"] * p["n_queries"] * p["head_dim"] * p.itemsize
    cache = 2 * n_keys * p["kv_heads"] * p["head_dim"] * cache_itemsize(p)
    return Work({p.dtype: flops}, queries + cache, queries)


def within(operator: Operator, model: Mapping, run: Mapping) -> Problem | None:
    """Returns the problem of a language model's layer, or None for other models.

    Each sequence has `n_cached` keys, with the new tokens' keys. They are in pages if the run has
    `page`. Raises ValueError if the model's window hides some.
    """
    if "vocabulary" not in model:
        return None
    n_cached, window = run["n_cached"], model.get("window", 0)
    if 0 < window < n_cached:
        raise ValueError(
            f"the model has a window of {window} tokens, and n_cached is {n_cached}: it takes no "
            "window"
        )
    page = run.get("page")
    heads = model["n_heads"]
    return operator.problem(
        run["dtype"], batch=run["batch"], heads=heads, kv_heads=model.get("n_kv_heads", heads),
        n_queries=run["n_tokens"], n_keys=-(-n_cached // page) * page if page else n_cached,
        head_dim=model["head_dim"], page=page or n_cached, page_table=bool(page),
    )  # fmt: skip


def partial_reference(case: Case, inputs: dict, gradients: dict | None) -> dict[str, tuple]:
    """Returns exact results of two heads: the first sequence's first, the last sequence's last."""
    import torch

    p, found = case.problem, []
    for b, h, of_kv in ((0, 0, 0), (-1, -1, -1)):
        one = slice(b, b + 1 or None)
        heads = slice(of_kv, of_kv + 1 or None)
        k, v = (inputs[name] if p["page_table"] else inputs[name][one] for name in "kv")
        table = inputs["page_table"][one] if p["page_table"] else None
        rows = []
        for x, name in ((k, "k_descale"), (v, "v_descale")):
            descale = inputs[name]
            if descale is not None:
                descale = (descale[one] if descale.dim() == 2 else descale)[..., heads]
            rows.append(whole(x[:, heads], table, descale, torch.float64))
        q = inputs["q"][one, h : h + 1 or None].double()
        lengths = inputs["lengths"][one]
        o = reference(q, *rows, lengths, None, None, None, SCALE, full=bool(p["full"]))
        found.append(o[0, 0])
    return {"o": (([0, -1], [0, -1]), torch.stack(found))}


# ---------------------------------------------------------------------------------------- the gate

_PAGED = {"page_table": True}
_E4M3 = {"cache": "e4m3"}
_DESCALED = _E4M3 | {"k_descale": True, "v_descale": True}
_EDGES = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257)


def cases(operator: Operator, target: Target) -> Iterable[Case]:
    """Covers lengths around edges of blocks and pages, grouped heads, one or more queries."""

    def case(batch, heads, kv_heads, n_queries, n_keys, head_dim, dtype, page=0, **named) -> Case:
        sizes = batch, heads, kv_heads, n_queries, n_keys, head_dim, page or n_keys
        return operator.case(dtype, *sizes, **(_PAGED if page else {}), **named)

    if target.kind != "cuda":
        return [
            case(3, 4, 2, 1, 70, 16, "float32", lengths="1,64,65"),
            case(4, 4, 2, 1, 256, 16, "float32", 64, lengths="0,63,64,256"),
            case(3, 6, 2, 5, 160, 32, "float32", 32, lengths="3,129,33", heads_first=True),
            case(2, 6, 2, 5, 140, 48, "bfloat16", lengths="128,140"),
            case(4, 2, 2, 1, 288, 64, "bfloat16", 16, lengths="15,17,257,288"),
            case(2, 4, 1, 2, 130, 80, "float16", lengths="127,129", heads_first=True),
            case(2, 8, 2, 1, 144, 16, "float16", 48, lengths="47,144"),
            case(2, 4, 2, 1, 140, 32, "bfloat16", lengths="7,140", **_E4M3),
            case(3, 4, 2, 2, 128, 16, "bfloat16", 16, lengths="1,17,127", **_DESCALED),
            case(
                2, 4, 2, 1, 140, 16, "float16", lengths="140,65", descale_each=True, **_DESCALED
            ),
            case(3, 4, 2, 3, 140, 16, "float32", lengths="0,2,140", full=True),
        ]  # fmt: skip
    edges, many = ",".join(map(str, _EDGES)), ",".join(map(str, (*_EDGES[1:], 4095, 4096, 4097)))
    n_edges, n_many = len(_EDGES), len(_EDGES) + 2
    many_short = ",".join(str(_EDGES[i % n_edges]) for i in range(MANY))
    found = []
    for dtype in FLOATS:
        found += [
            case(n_many, 32, 8, 1, 4097, 128, dtype, lengths=many),
            case(n_many, 32, 8, 1, 4352, 128, dtype, 256, lengths=many),
            case(n_edges, 12, 12, 5, 300, 64, dtype, lengths=edges),
            case(n_edges, 16, 2, 5, 320, 64, dtype, 64, lengths=edges),
            case(3, 32, 8, 1, 777, 64, dtype, lengths="777,1,300", heads_first=True),
            case(n_edges, 8, 8, 2, 300, 64, dtype, lengths=edges, heads_first=True, full=True),
            case(n_edges, 8, 2, 5, 320, 128, dtype, 64, lengths=edges, full=True),
            *(case(2, 8, 2, 1, 512, d, dtype, 128, lengths="65,511") for d in _OTHER_DIMS),
        ]
    for dtype in FLOATS[:2]:
        found += [
            case(2, 64, 8, 16, 1000, 128, dtype, lengths="777,1000"),
            case(70, 32, 8, 1, 8192, 128, dtype, 256, lengths="log_uniform"),
            case(MANY, 32, 8, 1, 300, 64, dtype, lengths=many_short),
            case(MANY, 32, 8, 1, 320, 64, dtype, 64, lengths=many_short),
            case(3, 8, 2, 2, 528, 80, dtype, 48, lengths="47,49,527"),
            case(1, 8, 8, 1, 70_000, 128, dtype),
            case(2, 8, 2, 1, 4097, 128, dtype, magnitude=4.0, lengths="4095,4097"),
            case(n_many, 32, 8, 1, 4097, 128, dtype, lengths=many, **_E4M3),
            case(n_many, 32, 8, 1, 4352, 128, dtype, 256, lengths=many, **_DESCALED),
            case(n_edges, 8, 2, 5, 320, 64, dtype, 16, lengths=edges, **_DESCALED),
            case(3, 8, 2, 1, 777, 96, dtype, lengths="1,65,777", descale_each=True, **_DESCALED),
            case(2, 8, 2, 1, 512, 128, dtype, 256, lengths="257,511", **_E4M3),
        ]
    return found


_OTHER_DIMS = (16, 32, 48, 80, 96, 192, 256)


def _another_page(q, k, v, lengths, page_table, *rest, **options):
    if page_table is not None:
        page_table = page_table.clone()
        page_table[:, 0] = (page_table[:, 0] + 1) % k.shape[0]
    return reference(q, k, v, lengths, page_table, *rest, **options)


def _heads_interleaved(q, k, *rest, **options):
    q = q.unflatten(1, (-1, k.shape[1])).transpose(1, 2).flatten(1, 2)
    o = reference(q, k, *rest, **options)
    return o.unflatten(1, (k.shape[1], -1)).transpose(1, 2).flatten(1, 2)


def _last_key_left_out(q, k, v, lengths, *rest, **options):
    return reference(q, k, v, (lengths - 1).clamp(min=0), *rest, **options)


def _one_key_too_many(*arguments, **options):
    return reference(*arguments, **options, ahead=1)


CONTROLS = {
    "one page is another": _another_page,
    "heads of a group are interleaved": _heads_interleaved,
    "the last key is left out": _last_key_left_out,
    "queries see one key too many": _one_key_too_many,
}


def condition(case: Case, inputs: Mapping) -> float:
    """Returns the relative error that results may have from float32 scores.

    A score's error is a few roundings of its value, and becomes a relative error of its weight
    through e^. If D products of normal numbers are added one after another, the k-th sum is rounded
    by √k/√3 half units. Together that is D/√6 half units.
    """
    p = case.problem
    of_product = SCALE * float(case["magnitude"] or 1.0) ** 2
    largest = of_product * math.sqrt(p["head_dim"])
    return 2.0**-24 * max(4.0, 4 * largest, of_product * p["head_dim"] / math.sqrt(6))
