"""Projections without bias, and those of attention: queries, keys and values of the rows that need
them.

    y = x wᵀ        q = x[:, first:] w_qᵀ    k = x[:, :n_k] w_kᵀ    v = x[:, :n_k] w_vᵀ

Keys can be centred: k is then less a vector of its sample, before its one rounding. Queries can
carry what attention multiplies scores by, 1/√D and log2(e), for exponentials to base 2.

`torch` multiplies through PyTorch's own linear layer, all three projections as one matmul where all
rows need all of them. `fused` projects only what is asked for, hands q, k and v over in the layout
attention reads, takes their gradients in the layout attention writes, and accumulates the gradients
of weights in float32 and never rounds them. Keys that are not centred are one product with values,
and where their gradients are halves of the same rows, as our attention writes them, so are these.
The matmuls are cuBLAS's in both, but for centred keys of few rows and linear layers of up to 16
rows, which `fused` computes by kernels of its own.
"""

from __future__ import annotations

from math import prod
from operator import index
from typing import TYPE_CHECKING

from tnp.dispatch.spec import (
    ALL_FLOATS,
    FLOATS,
    Case,
    Implementation,
    Operation,
    Operator,
    Problem,
    Work,
)
from tnp.ops._shared.declared import cases_by_dtype
from tnp.ops.projection import qkv
from tnp.ops.projection.qkv import require_product
from tnp.util.checks import require_between

if TYPE_CHECKING:
    from torch import Tensor


# ------------------------------------------------------------------------------- linear


def reference(x, weight):
    """PyTorch's linear layer, in x's dtype."""
    from torch.nn.functional import linear as product

    return product(x, weight.to(x.dtype))


def describe(x, weight) -> dict:
    """Sizes; ValueError where the tensors do not go together."""
    require_product(x, weight)
    return {"rows": prod(x.shape[:-1]), "n_in": weight.shape[1], "n_out": weight.shape[0]}


def draw(case, random) -> dict:
    """Normal x, weights scaled by their fan-in; where the case names a batch, rows of each sample
    behind one that is not read.
    """
    problem = case.problem
    rows, n_in, n_out = (size for _, size in problem.sizes)
    weight, batch = random.weight(n_out, n_in), int(case["batch"])
    if batch:
        return {"x": random(batch, 1 + rows // batch, n_in)[:, 1:], "weight": weight}
    return {"x": random(rows, n_in), "weight": weight}


def work(case, pass_) -> Work:
    """A product forward, two backward; the weight and its gradient are float32."""
    problem = case.problem
    n, n_in, n_out = (size for _, size in problem.sizes)
    x, y, weight = n * n_in * problem.itemsize, n * n_out * problem.itemsize, n_in * n_out * 4
    if pass_ == "forward":
        return Work({problem.dtype: 2.0 * n * n_in * n_out}, x + weight, y)
    return Work({problem.dtype: 4.0 * n * n_in * n_out}, x + y + weight, x + weight)


_INTERPRETED = (
    *((1, 32, 32, {}), (16, 42, 20, {}), (17, 32, 8, {}), (33, 42, 20, {})),
    (4, 200, 33, {"batch": 2}),
)
# The model's, both sides of what kernels of a few rows take, and ragged widths.
_GPU = (
    *((rows, 512, 512, {}) for rows in (1, 2, 8, 16, 17, 36_096)),
    *((rows, 1408, 512, {}) for rows in (2, 16)),
    *((3, n_in, n_out, {}) for n_in, n_out in ((1, 9), (42, 20), (777, 1365), (2048, 100))),
    *((6, 512, 777, {"batch": 2}), (777, 512, 1365, {}), (2, 2049, 40, {})),
)


def cases(target) -> list[Case]:
    """One row and many, ragged widths, rows that lie apart."""
    sizes = _GPU if target.kind == "cuda" else _INTERPRETED
    return cases_by_dtype(OPERATOR_LINEAR, dict.fromkeys(FLOATS, sizes))


def compiled(target) -> list[Problem]:
    """Of a few rows, for which alone there is a kernel of ours: the model's widths."""
    sizes = {"rows": 2, "n_out": 512}
    return [OPERATOR_LINEAR.problem("bfloat16", n_in=n_in, **sizes) for n_in in (512, 1408)]


def within(model, run):
    """Attention's output: every row of context and targets."""
    rows, d_model = run["batch"] * (run["n_context"] + run["n_target"]), model["d_model"]
    return OPERATOR_LINEAR.problem(run["dtype"], rows=rows, n_in=d_model, n_out=d_model)


_CODE, _CENTRED = "tnp.ops.projection.products", "tnp.ops.projection.centred_keys"
_FEW = "tnp.ops.projection.few_rows"
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
            forward=Operation("linear.forward", (f"{_FEW}:LINEAR", f"{_CODE}:LINEAR")),
            backward=Operation("linear.backward", (f"{_CODE}:LINEAR_BACKWARD",)),
        ),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=cases,
    compiled=compiled,
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
            run=qkv.reference,
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
    describe=qkv.describe,
    draw=qkv.draw,
    reference=qkv.reference,
    work=qkv.work,
    cases=lambda target: qkv.cases(OPERATOR_QKV, target),
    out_of_range=qkv.out_of_range,
    within=lambda model, run: qkv.within(OPERATOR_QKV, model, run),
    coordinates=qkv.coordinates,
    condition=lambda case, inputs: qkv.condition(OPERATOR_QKV, case, inputs),
    controls={
        "rows shifted": lambda x, weight, n_keys, **sizes: qkv.reference(
            x.roll(1, 1), weight, n_keys, **sizes
        ),
        "queries are keys": lambda x, weight, n_keys, **sizes: qkv.reference(
            x, weight.roll(x.shape[-1], 0), n_keys, **sizes
        ),
        "keys not centred": lambda x, weight, n_keys, centred=False, **sizes: qkv.reference(
            x, weight, n_keys, **sizes
        ),
        "queries without their factor": lambda x, weight, n_keys, base2=False, **sizes: (
            qkv.reference(x, weight, n_keys, **sizes)
        ),
    },
)
OPERATORS = OPERATOR_LINEAR, OPERATOR_QKV


def linear(x: Tensor, weight: Tensor, *, implementation: str = "torch") -> Tensor:
    """x wᵀ.

    Args:
        x: [..., n_in]; bfloat16, float16 or float32 (`torch`: float64 too).
        weight: [n_out, n_in], any float dtype, as a rule a float32 parameter; cast to x's.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [..., n_out] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices that do not go together.
        RuntimeError: the implementation cannot run on this device and dtype.
    """
    from tnp.dispatch.call import call

    return call(OPERATOR_LINEAR, implementation, (x, weight))


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
            being padding. None: n_k. A number out of range is a ValueError on the CPU. On CUDA
            `fused` makes the sample's keys NaN, or with TNP_CHECK=1 asserts it; PyTorch's form
            asserts a number that is too large.
        implementation: as for `linear`.

    Returns:
        q [B, n_heads, L − first, D], k and v [B, n_heads, n_k, D], views of [B, rows, d_model], or
        k and v of one [B, rows, 2·d_model].

    Raises:
        ValueError, RuntimeError: as `linear`.
    """
    from tnp.dispatch.call import call

    if n_keys is not None and getattr(x, "ndim", 0) == 3:  # else `describe` refuses
        require_between("n_keys", n_keys, 1, x.shape[1] if n_k is None else n_k)
    if implementation == "torch":
        from torch.compiler import is_compiling

        if is_compiling():  # PyTorch's own form needs no constant: one graph serves all sizes
            n_q = x.shape[1] - first if first else None
            return qkv.reference(
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
    return call(OPERATOR_QKV, implementation, (x, weight, n_keys), (), options)
