"""Defines projections of attention: the formula, inputs, work and cases."""

from __future__ import annotations

from math import e, log2

from tnp.dispatch.spec import Case, Work
from tnp.ops._shared.declared import numbers_out_of_range


def require_product(x, weight) -> None:
    """Raises ValueError if x [..., n_in] and weight [n_out, n_in] do not fit together."""
    from tnp.util.checks import require_floats, require_one_device

    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}: they must be [..., n_in] and "
            "[n_out, n_in]"
        )
    require_floats(x=x, weight=weight)
    require_one_device(x=x, weight=weight)


CENTRE_ROWS = 64  # keys of a sample; their mean is subtracted


def query_factor(d_model: int, n_heads: int, base2: bool) -> float:
    """Returns the factor of queries: 1, or scale · log2(e)."""
    return log2(e) * (d_model // n_heads) ** -0.5 if base2 else 1.0


def reference(x, weight, n_keys, n_heads, n_q=None, n_k=None, centred=False, base2=False):
    """Computes PyTorch's linear layers: one for all three if every row is a query and a key."""
    from torch.nn.functional import linear as product

    n_rows, d_model = x.shape[1:]
    n_q, n_k = n_rows if n_q is None else n_q, n_rows if n_k is None else n_k
    w = weight.to(x.dtype)
    # With n_q == n_k a compiler would make a program for each outcome.
    if n_q == n_rows and n_k == n_rows and not (centred or base2):
        q, k, v = product(x, w).chunk(3, -1)
    else:
        queries, keys = x[:, n_rows - n_q :], x[:, :n_k]
        w_q, w_k, w_v = w.chunk(3)
        if base2:
            q = _scaled(queries, w_q, query_factor(d_model, n_heads, base2))
        else:
            q = product(queries, w_q)
        if centred:
            k, v = _centred(keys, w_k, n_keys), product(keys, w_v)
        else:
            k, v = product(keys, w[d_model:]).chunk(2, -1)
    return tuple(y.unflatten(-1, (n_heads, -1)).transpose(1, 2) for y in (q, k, v))


def _scaled(rows, weight, factor):
    """Returns factor · rows wᵀ, rounded once."""
    import torch

    matrix = rows.flatten(0, 1)
    product = torch.addmm(matrix.new_empty(()), matrix, weight.t(), beta=0, alpha=factor)
    return product.unflatten(0, rows.shape[:2])


def _centred(rows, weight, n_keys):
    """Returns keys [B, n_k, d_model] minus the mean of some keys, which has no gradient."""
    import torch

    spread = torch.arange(CENTRE_ROWS, device=rows.device)[None] * (
        rows.shape[1] if n_keys is None else n_keys[:, None]
    )
    index = (spread // CENTRE_ROWS).long()[..., None].expand(len(rows), -1, rows.shape[-1])
    with torch.no_grad():
        centre = rows.gather(1, index).mean(1, keepdim=True) @ weight.mT
    # One call multiplies and subtracts: if the mean were subtracted later, the part that keys and
    # mean have in common would already be rounded.
    return torch.baddbmm(-centre, rows, weight.mT.expand(len(rows), -1, -1))


def describe(x, weight, n_keys, n_heads, n_q=None, n_k=None, centred=False, base2=False) -> dict:
    from tnp.util.checks import require_lengths

    require_product(x, weight)
    d_model = x.shape[-1]
    if x.dim() != 3 or len(weight) != 3 * d_model or n_heads < 1 or d_model % n_heads:
        raise ValueError(
            f"x is {tuple(x.shape)}, weight {tuple(weight.shape)} and n_heads {n_heads}: they must "
            "be [B, L, d_model], [3·d_model, d_model] and a divisor of d_model"
        )
    batch, n_rows = x.shape[:2]
    n_q, n_k = n_rows if n_q is None else n_q, n_rows if n_k is None else n_k
    if not 1 <= n_k <= n_rows or not 1 <= n_q <= n_rows:
        raise ValueError(
            f"n_k is {n_k} and first {n_rows - n_q}: they must lie in [1, {n_rows}] and "
            f"[0, {n_rows - 1}]"
        )
    if n_keys is not None:
        require_lengths(x, n_keys=n_keys)
        if not centred:
            raise ValueError("n_keys says of which rows keys are centred: give it with centred")
    return {
        "batch": batch, "rows": n_rows, "d_model": d_model, "n_heads": n_heads, "n_q": n_q,
        "n_k": n_k,
    }  # fmt: skip


def out_of_range(case, inputs):
    """Yields n_keys out of range, which spoil their sample's keys."""
    yield from numbers_out_of_range(inputs, "n_keys", 1, case.problem["n_k"], "k")


def draw(case, random) -> dict:
    """Draws normal x, weights scaled by their fan-in, and gradients in the layout of our attention.

    If keys are centred, rows share a vector.

    As in a trained model, the vector is a few times as long as the differences between rows.
    """
    problem = case.problem
    x = random(*(problem[name] for name in ("batch", "rows", "d_model")))
    n_keys = None
    if problem["centred"]:
        x += 3 * random(problem["batch"], 1, problem["d_model"])
    if problem["n_keys"]:
        n_keys = random.integers(1, problem["n_k"], problem["batch"])
    weight = random.weight(3 * problem["d_model"], problem["d_model"])
    batch, _rows, d_model, n_heads, n_q, n_k = (size for _, size in problem.sizes)
    dq = random(batch, n_q, n_heads, d_model // n_heads).transpose(1, 2)
    dk, dv = random(batch, n_k, 2, n_heads, d_model // n_heads).permute(2, 0, 3, 1, 4)
    return {"x": x, "weight": weight, "n_keys": n_keys, "dq": dq, "dk": dk, "dv": dv}


def condition(operator, case, inputs) -> dict[str, float]:
    """Estimates float32's error: additions round, centred keys subtract longer vectors."""
    import torch

    problem = case.problem
    rounding = torch.finfo(torch.float32).eps / 2 * (problem["d_model"] + CENTRE_ROWS) ** 0.5
    floors = dict.fromkeys(("q", "k", "v"), rounding)
    if problem["centred"]:
        options = dict(operator.call_options(problem))
        x, weight = inputs["x"].double(), inputs["weight"].double()
        centred = reference(x, weight, inputs["n_keys"], **options)[1]
        whole = reference(x, weight, None, **options | {"centred": False})[1]
        floors["k"] *= (whole.norm() / centred.norm()).item()
    return floors


def work(case, pass_) -> Work:
    """Counts the work of `linear` for the requested rows."""
    problem = case.problem
    batch, rows, d, _n_heads, n_q, n_k = (size for _, size in problem.sizes)
    x, qkv = batch * rows * d * problem.itemsize, batch * (n_q + 2 * n_k) * d * problem.itemsize
    flops, weight = 2.0 * batch * (n_q + 2 * n_k) * d * d, 3 * d * d * 4
    if pass_ == "forward":
        return Work({problem.dtype: flops}, x + weight, qkv)
    return Work({problem.dtype: 2 * flops}, x + qkv + weight, x + weight)


def cases(operator, target) -> list[Case]:
    """Covers all rows, one row, and queries and keys that overlap, meet or leave a gap."""

    def case(
        dtype: str, batch: int, rows: int, d_model: int, n_k: int, first: int = 0, **options: bool
    ) -> Case:
        n_heads = 8 if d_model == 512 else 2
        return Case(
            operator.problem(
                dtype, batch=batch, rows=rows, d_model=d_model, n_heads=n_heads, n_q=rows - first,
                n_k=n_k, **options,
            )
        )  # fmt: skip

    if target.kind != "cuda":
        return [
            case("bfloat16", 2, 9, 32, 4),
            case("bfloat16", 2, 9, 32, 4, 4),
            case("bfloat16", 1, 9, 32, 9),
            case("float16", 2, 9, 32, 5, 2),
            case("float32", 3, 9, 32, 1, 8),
            case("bfloat16", 2, 75, 32, 70, centred=True),
            case("float16", 3, 75, 40, 70, 5, centred=True, n_keys=True),
            case("float32", 2, 9, 32, 9, centred=True),
            case("bfloat16", 2, 4100, 16, 4099, 4090, centred=True, n_keys=True),
            case("bfloat16", 2, 9, 32, 9, base2=True),
            case("bfloat16", 2, 9, 32, 4, 4, base2=True),
            case("float32", 2, 75, 32, 70, base2=True, centred=True),
        ]
    return [
        case("bfloat16", 64, 564, 512, 64),
        case("bfloat16", 4, 11_000, 512, 10_000),
        case("bfloat16", 4, 11_000, 512, 10_000, 10_000),
        case("bfloat16", 1, 777, 512, 777),
        case("bfloat16", 3, 65, 512, 1, 64),
        case("float16", 2, 333, 512, 100, 33),
        case("float32", 2, 333, 512, 100, 33),
        case("bfloat16", 64, 564, 512, 64, centred=True),
        case("bfloat16", 4, 11_000, 512, 10_000, 10_000, centred=True),
        case("bfloat16", 3, 1500, 512, 1000, 7, centred=True, n_keys=True),
        case("float16", 2, 333, 328, 100, centred=True, n_keys=True),
        case("float32", 2, 333, 512, 100, 33, centred=True),
        case("bfloat16", 2, 6000, 512, 5001, 7, centred=True, n_keys=True),
        case("float32", 1, 5000, 128, 5000, 4990, centred=True),
        case("bfloat16", 64, 564, 512, 64, base2=True),
        case("bfloat16", 4, 11_000, 512, 10_000, 10_000, base2=True),
        case("bfloat16", 1, 777, 512, 777, base2=True),
        case("bfloat16", 3, 1500, 512, 1000, 7, base2=True, centred=True, n_keys=True),
        case("float16", 2, 333, 512, 100, 33, base2=True),
        case("float32", 2, 333, 512, 100, 33, base2=True),
    ]


def within(operator, model, run):
    """Returns the problem of a block that projects every row."""
    rows = run["n_context"] + run["n_target"]
    return operator.problem(
        run["dtype"], batch=run["batch"], rows=rows, d_model=model["d_model"],
        n_heads=model["n_heads"], n_q=rows, n_k=rows,
    )  # fmt: skip


def coordinates(problem) -> tuple[float, ...]:
    """Returns the sizes that projections' costs depend on: all but the number of heads."""
    batch, _rows, d_model, _n_heads, n_q, n_k = (size for _, size in problem.sizes)
    return batch * n_q, batch * n_k, d_model
