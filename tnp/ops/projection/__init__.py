"""Projections without bias, and those of attention: queries, keys and values of the rows that need
them.

    y = x wᵀ        q = x[:, first:] w_qᵀ    k = x[:, :n_k] w_kᵀ    v = x[:, :n_k] w_vᵀ

Keys can be centred: k is then less a vector of its sample, before its one rounding. Queries can
carry what attention multiplies scores by, 1/√D and log2(e), for exponentials to base 2.

`torch` multiplies through PyTorch's own linear layer, all three projections as one matmul where all
rows need all of them. `fused` projects only what is asked for, hands q, k and v over in the layout
attention reads, takes their gradients in the layout attention writes, and accumulates the gradients
of weights in float32 and never rounds them. The matmuls are cuBLAS's in both, but for centred keys,
which `fused` computes by a kernel of its own.
"""

from __future__ import annotations

from math import e, log2, prod
from operator import index
from typing import TYPE_CHECKING

from tnp.contract import ALL_FLOATS, FLOATS, Case, Implementation, Operation, Operator, Work

if TYPE_CHECKING:
    from torch import Tensor


def _require_product(x, weight) -> None:
    """Raises ValueError where x [..., n_in] and weight [n_out, n_in] do not go together."""
    from tnp.inputs import require_floats, require_one_device

    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:]:
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}: they must be [..., n_in] and "
            "[n_out, n_in]"
        )
    require_floats(x=x, weight=weight)
    require_one_device(x=x, weight=weight)


# ------------------------------------------------------------------------------- linear


def reference(x, weight):
    """PyTorch's linear layer, in x's dtype."""
    from torch.nn.functional import linear as product

    return product(x, weight.to(x.dtype))


def describe(x, weight) -> dict:
    """Sizes; ValueError where the tensors do not go together."""
    _require_product(x, weight)
    return {"rows": prod(x.shape[:-1]), "n_in": weight.shape[1], "n_out": weight.shape[0]}


def draw(case, random) -> dict:
    """Normal x, weights scaled by their fan-in."""
    problem = case.problem
    weight = random.weight(problem["n_out"], problem["n_in"])
    return {"x": random(problem["rows"], problem["n_in"]), "weight": weight}


def work(case, pass_) -> Work:
    """A product forward, two backward; the weight and its gradient are float32."""
    problem = case.problem
    n, n_in, n_out = (size for _, size in problem.sizes)
    x, y, weight = n * n_in * problem.itemsize, n * n_out * problem.itemsize, n_in * n_out * 4
    if pass_ == "forward":
        return Work({problem.dtype: 2.0 * n * n_in * n_out}, x + weight, y)
    return Work({problem.dtype: 4.0 * n * n_in * n_out}, x + y + weight, x + weight)


def cases(target) -> list[Case]:
    """One row and many, ragged widths."""
    sizes = ((1, 32, 32), (18, 32, 8), (33, 42, 20))
    if target.kind == "cuda":
        sizes = ((1, 512, 512), (777, 512, 1365), (36_096, 512, 512))
    problems = (
        OPERATOR_LINEAR.problem(dtype, rows=rows, n_in=n_in, n_out=n_out)
        for dtype in FLOATS
        for rows, n_in, n_out in sizes
    )
    return [Case(problem) for problem in problems]


def within(model, run):
    """Attention's output: every row of context and targets."""
    rows, d_model = run["batch"] * (run["n_context"] + run["n_target"]), model["d_model"]
    return OPERATOR_LINEAR.problem(run["dtype"], rows=rows, n_in=d_model, n_out=d_model)


# -------------------------------------------------------------------------- project_qkv


CENTRE_ROWS = 64  # of a sample, whose mean is taken off its keys


def query_factor(d_model: int, n_heads: int, base2: bool) -> float:
    """What queries are multiplied by: 1, or scale · log2(e)."""
    return log2(e) * (d_model // n_heads) ** -0.5 if base2 else 1.0


def reference_qkv(x, weight, n_keys, n_heads, n_q=None, n_k=None, centred=False, base2=False):
    """PyTorch's linear layers: one where every row is a query and a key, else two."""
    from torch.nn.functional import linear as product

    n_rows, d_model = x.shape[1:]
    n_q, n_k = n_rows if n_q is None else n_q, n_rows if n_k is None else n_k
    w = weight.to(x.dtype)
    if centred:
        q, rows = product(x[:, n_rows - n_q :], w[:d_model]), x[:, :n_k]
        k, v = _centred(rows, w[d_model : 2 * d_model], n_keys), product(rows, w[2 * d_model :])
    elif n_q == n_k == n_rows:
        q, k, v = product(x, w).chunk(3, -1)
    else:
        q = product(x[:, n_rows - n_q :], w[:d_model])
        k, v = product(x[:, :n_k], w[d_model:]).chunk(2, -1)
    if base2:
        q = q * query_factor(d_model, n_heads, base2)
    return tuple(y.unflatten(-1, (n_heads, -1)).transpose(1, 2) for y in (q, k, v))


def _centred(rows, weight, n_keys):
    """Keys [B, n_k, d_model] less the mean of some, of which no gradient is taken."""
    import torch

    spread = torch.arange(CENTRE_ROWS, device=rows.device)[None] * (
        rows.shape[1] if n_keys is None else n_keys[:, None]
    )
    index = (spread // CENTRE_ROWS).long()[..., None].expand(len(rows), -1, rows.shape[-1])
    with torch.no_grad():
        centre = rows.gather(1, index).mean(1, keepdim=True) @ weight.mT
    # In one product: subtracted afterwards, what both have in common would have been rounded.
    return torch.baddbmm(-centre, rows, weight.mT.expand(len(rows), -1, -1))


def describe_qkv(
    x, weight, n_keys, n_heads, n_q=None, n_k=None, centred=False, base2=False
) -> dict:
    """Sizes; ValueError where they do not go together."""
    from tnp.inputs import require_lengths

    _require_product(x, weight)
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


def draw_qkv(case, random) -> dict:
    """Normal x, weights scaled by their fan-in; where keys are centred, rows that share a vector.

    As in a trained model it is a few times as long as what tells rows apart.
    """
    problem = case.problem
    x = random(*(problem[name] for name in ("batch", "rows", "d_model")))
    n_keys = None
    if problem["centred"]:
        x += 3 * random(problem["batch"], 1, problem["d_model"])
    if problem["n_keys"]:
        n_keys = random.integers(1, problem["n_k"], problem["batch"])
    weight = random.weight(3 * problem["d_model"], problem["d_model"])
    return {"x": x, "weight": weight, "n_keys": n_keys}


def condition_qkv(case, inputs) -> dict[str, float]:
    """What float32 loses, which rounds a sum as often as it adds, and of centred keys a difference
    of longer vectors.
    """
    import torch

    problem = case.problem
    rounding = torch.finfo(torch.float32).eps / 2 * (problem["d_model"] + CENTRE_ROWS) ** 0.5
    floors = dict.fromkeys(("q", "k", "v"), rounding)
    if problem["centred"]:
        options = dict(OPERATOR_QKV.call_options(problem))
        x, weight = inputs["x"].double(), inputs["weight"].double()
        centred = reference_qkv(x, weight, inputs["n_keys"], **options)[1]
        whole = reference_qkv(x, weight, None, **options | {"centred": False})[1]
        floors["k"] *= (whole.norm() / centred.norm()).item()
    return floors


def work_qkv(case, pass_) -> Work:
    """As of `linear`, of the rows that are asked for."""
    problem = case.problem
    batch, rows, d, _n_heads, n_q, n_k = (size for _, size in problem.sizes)
    x, qkv = batch * rows * d * problem.itemsize, batch * (n_q + 2 * n_k) * d * problem.itemsize
    flops, weight = 2.0 * batch * (n_q + 2 * n_k) * d * d, 3 * d * d * 4
    if pass_ == "forward":
        return Work({problem.dtype: flops}, x + weight, qkv)
    return Work({problem.dtype: 2 * flops}, x + qkv + weight, x + weight)


def cases_qkv(target) -> list[Case]:
    """Queries and keys of all rows, of one, of rows that overlap, meet and leave a gap, centred
    and not.
    """

    def case(
        dtype: str, batch: int, rows: int, d_model: int, n_k: int, first: int = 0, **options: bool
    ) -> Case:
        n_heads = 8 if d_model == 512 else 2
        return Case(
            OPERATOR_QKV.problem(
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


def within_qkv(model, run):
    """Of a block that projects every row."""
    rows = run["n_context"] + run["n_target"]
    return OPERATOR_QKV.problem(
        run["dtype"], batch=run["batch"], rows=rows, d_model=model["d_model"],
        n_heads=model["n_heads"], n_q=rows, n_k=rows,
    )  # fmt: skip


def _products(problem) -> tuple[float, ...]:
    """What the cost of projections depends on; the number of heads is how they are read."""
    batch, _rows, d_model, _n_heads, n_q, n_k = (size for _, size in problem.sizes)
    return batch * n_q, batch * n_k, d_model


_CODE, _CENTRED = "tnp.ops.projection.products", "tnp.ops.projection.centred_keys"
OPERATOR_LINEAR = Operator(
    "linear",
    family="projection",
    inputs=("x", "weight"),
    outputs=("y",),
    sizes=("rows", "n_in", "n_out"),
    differentiated=("x", "weight"),
    implementations=(
        Implementation("torch", run=reference, provider="torch", dtypes=ALL_FLOATS),
        Implementation(
            "fused",
            forward=Operation("linear.forward", (f"{_CODE}:LINEAR",)),
            backward=Operation("linear.backward", (f"{_CODE}:LINEAR_BACKWARD",)),
        ),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=cases,
    within=within,
    controls={
        "weight shifted": lambda x, weight: reference(x, weight.roll(1, 0)),
        "rows shifted": lambda x, weight: reference(x.roll(1, -1), weight),
    },
)
OPERATOR_QKV = Operator(
    "project_qkv",
    family="projection",
    inputs=("x", "weight", "n_keys?"),
    outputs=("q", "k", "v"),
    sizes=("batch", "rows", "d_model", "n_heads", "n_q", "n_k"),
    numbered=("n_heads", "n_q", "n_k"),
    options={"base2": bool, "centred": bool},
    differentiated=("x", "weight"),
    keeps=("x", "weight"),
    implementations=(
        Implementation(
            "torch",
            run=reference_qkv,
            provider="torch",
            dtypes=ALL_FLOATS,
            options=("base2", "centred", "n_keys"),
        ),
        Implementation(
            "fused",
            forward=Operation(
                "project_qkv.forward",
                (f"{_CODE}:QKV", f"{_CENTRED}:MANY", f"{_CENTRED}:TILES"),
            ),
            backward=Operation("project_qkv.backward", (f"{_CODE}:QKV_BACKWARD",)),
            options=("base2", "centred", "n_keys"),
        ),
    ),
    describe=describe_qkv,
    draw=draw_qkv,
    reference=reference_qkv,
    work=work_qkv,
    cases=cases_qkv,
    within=within_qkv,
    coordinates=_products,
    condition=condition_qkv,
    controls={
        "rows shifted": lambda x, weight, n_keys, **sizes: reference_qkv(
            x.roll(1, 1), weight, n_keys, **sizes
        ),
        "queries are keys": lambda x, weight, n_keys, **sizes: reference_qkv(
            x, weight.roll(x.shape[-1], 0), n_keys, **sizes
        ),
        "keys not centred": lambda x, weight, n_keys, centred=False, **sizes: reference_qkv(
            x, weight, n_keys, **sizes
        ),
        "queries without their factor": lambda x, weight, n_keys, base2=False, **sizes: (
            reference_qkv(x, weight, n_keys, **sizes)
        ),
    },
)
OPERATORS = OPERATOR_LINEAR, OPERATOR_QKV


def linear(x: Tensor, weight: Tensor, *, implementation: str = "torch") -> Tensor:
    """x wᵀ.

    Args:
        x: [..., n_in]; bfloat16, float16 or float32 (`torch`: float64 too).
        weight: [n_out, n_in], any float dtype, as a rule a float32 parameter; cast to x's.
        implementation: a name of `tnp.catalog`, or "auto".

    Returns:
        [..., n_out] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
        RuntimeError: the implementation cannot run on this device and dtype.
    """
    import tnp.dispatch as dispatch

    return dispatch.call(OPERATOR_LINEAR, implementation, (x, weight))


def project_qkv(
    x: Tensor,
    weight: Tensor,
    n_heads: int,
    *,
    n_k: int | None = None,
    first: int = 0,
    base2: bool = False,
    centred: bool = False,
    n_keys: Tensor | None = None,
    implementation: str = "torch",
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of the rows from `first` on, keys and values of the first `n_k` rows.

    Softmax does not change where one vector is taken off all keys of a sample, and neither do the
    gradients of attention: each row of the gradient of its scores sums to zero. In 16 bits it does
    matter, where keys share a vector that is longer than what tells them apart, as in trained
    models. Centred keys are less the mean of 64 keys of their sample, before their one rounding;
    no gradient is taken of that mean. `lse` of attention is then of the centred keys.

    Args:
        x: [B, L, d_model], of the dtypes that `linear` takes.
        weight: [3·d_model, d_model], those of q, k and v in turn; as a rule a float32 parameter.
        n_heads: how many equal shares d_model is read as.
        n_k: from 1 to L; L where None.
        first: from 0 to L − 1.
        base2: whether q is times log2(e)/√D, before its one rounding by `fused`: what `attention`
            takes with base2.
        centred: whether keys are centred.
        n_keys: int32 [B], each from 1 to n_k: of how many rows sample b is centred, rows past them
            being padding. None: n_k.
        implementation: as for `linear`.

    Returns:
        q [B, n_heads, L − first, D], k and v [B, n_heads, n_k, D], views of [B, rows, d_model].

    Raises:
        ValueError, RuntimeError: as `linear`.
    """
    import tnp.dispatch as dispatch

    if implementation == "torch":
        from torch.compiler import is_compiling

        if is_compiling():  # PyTorch's own form needs no constant: one graph serves all sizes
            n_q = x.shape[1] - first if first else None
            return reference_qkv(
                x, weight, n_keys, n_heads, n_q=n_q, n_k=n_k, centred=centred, base2=base2
            )
    # `index` has torch.compile take a symbolic number for a constant of the graph.
    options: tuple = (("n_heads", index(n_heads)),)
    if first:
        options += (("n_q", index(x.shape[1] - first) if x.dim() == 3 else 1),)
    if n_k is not None:
        options += (("n_k", index(n_k)),)
    if base2:
        options += (("base2", True),)
    if centred:
        options += (("centred", True),)
    return dispatch.call(OPERATOR_QKV, implementation, (x, weight, n_keys), (), options)
