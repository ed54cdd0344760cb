"""Computes projections without bias: a linear layer, and attention's queries, keys and values.

    y = x wᵀ        q = x[:, first:] w_qᵀ    k = x[:, :n_k] w_kᵀ    v = x[:, :n_k] w_vᵀ

Keys can be centred: a vector of the sample is subtracted from k before its one rounding. Queries
can include the factor of attention's scores, log2(e)/√D, for exponentials to base 2.

`torch` calls PyTorch's linear layer, with one matmul for all three projections if all rows need all
of them. `fused` projects only the needed rows, and returns q, k and v in the layout that attention
reads. It takes their gradients in the layout that attention writes, accumulates gradients of
weights in float32, and never rounds them. Keys that are not centred are one product with values. If
their gradients are halves of the same rows, as our attention writes them, these are one product
too. cuBLAS computes the matmuls, except for centred keys of few rows and linear layers of up to 16
rows, for which `fused` has its own kernels.
"""

from __future__ import annotations

from math import prod
from operator import index
from typing import TYPE_CHECKING

from tnp.dispatch.spec import (
    FLOATS,
    Case,
    Implementation,
    Operation,
    Operator,
    Problem,
    Work,
)
from tnp.ops._shared.declared import by_pytorch, cases_by_dtype
from tnp.ops.projection import qkv
from tnp.ops.projection.qkv import require_product
from tnp.util.checks import require_between

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["linear", "project_qkv"]


# ------------------------------------------------------------------------------- linear


def reference(x, weight):
    """Computes PyTorch's linear layer, in x's dtype."""
    from torch.nn.functional import linear as product

    return product(x, weight.to(x.dtype))


def describe(x, weight) -> dict:
    require_product(x, weight)
    return {"rows": prod(x.shape[:-1]), "n_in": weight.shape[1], "n_out": weight.shape[0]}


def draw(case, random) -> dict:
    """Draws normal x, and weights scaled by their fan-in.

    If the case names a batch, each sample has a row before x that is not read.
    """
    problem = case.problem
    rows, n_in, n_out = (size for _, size in problem.sizes)
    weight, batch = random.weight(n_out, n_in), int(case["batch"])
    if batch:
        return {"x": random(batch, 1 + rows // batch, n_in)[:, 1:], "weight": weight}
    return {"x": random(rows, n_in), "weight": weight}


def work(case, pass_) -> Work:
    """Counts one product forward and two backward; the weight and its gradient are float32."""
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
# The model's sizes, both sides of the limits of kernels for a few rows, and ragged widths.
_GPU = (
    *((rows, 512, 512, {}) for rows in (1, 2, 8, 16, 17, 36_096)),
    *((rows, 1408, 512, {}) for rows in (2, 16)),
    *((3, n_in, n_out, {}) for n_in, n_out in ((1, 9), (42, 20), (777, 1365), (2048, 100))),
    *((6, 512, 777, {"batch": 2}), (777, 512, 1365, {}), (2, 2049, 40, {})),
)


def cases(target) -> list[Case]:
    """Covers one and many rows, ragged widths, rows that lie apart."""
    sizes = _GPU if target.kind == "cuda" else _INTERPRETED
    return cases_by_dtype(LINEAR, dict.fromkeys(FLOATS, sizes))


def compiled(target) -> list[Problem]:
    """Returns problems to compile: a few rows of the model's widths. Only these have a kernel."""
    sizes = {"rows": 2, "n_out": 512}
    return [LINEAR.problem("bfloat16", n_in=n_in, **sizes) for n_in in (512, 1408)]


def within(model, run):
    """Returns the problem of attention's output: every row of context and targets."""
    rows, d_model = run["batch"] * (run["n_context"] + run["n_target"]), model["d_model"]
    return LINEAR.problem(run["dtype"], rows=rows, n_in=d_model, n_out=d_model)


_CODE, _CENTRED = "tnp.ops.projection.products", "tnp.ops.projection.centred_keys"
_FEW = "tnp.ops.projection.few_rows"
LINEAR = Operator(
    "linear",
    family="projection",
    inputs=("x", "weight"),
    outputs=("y",),
    sizes=("rows", "n_in", "n_out"),
    differentiated=("x", "weight"),
    implementations=(
        *by_pytorch(reference),
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
PROJECT_QKV = Operator(
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
        *by_pytorch(qkv.reference, ("base2", "centred", "n_keys")),
        Implementation(
            "fused",
            forward=Operation(
                "project_qkv.forward", (f"{_CODE}:QKV", f"{_CENTRED}:MANY", f"{_CENTRED}:TILES")
            ),
            backward=Operation("project_qkv.backward", (f"{_CODE}:QKV_BACKWARD",)),
            options=("base2", "centred", "n_keys"),
        ),
    ),
    describe=qkv.describe,
    draw=qkv.draw,
    reference=qkv.reference,
    work=qkv.work,
    cases=lambda target: qkv.cases(PROJECT_QKV, target),
    out_of_range=qkv.out_of_range,
    within=lambda model, run: qkv.within(PROJECT_QKV, model, run),
    condition=lambda case, inputs: qkv.condition(PROJECT_QKV, case, inputs),
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
OPERATORS = LINEAR, PROJECT_QKV


def linear(x: Tensor, weight: Tensor, *, implementation: str = "torch") -> Tensor:
    """Returns x wᵀ.

    Args:
        x: [..., n_in], bfloat16, float16 or float32 (`torch`: float64 too).
        weight: [n_out, n_in], any float dtype, usually a float32 parameter. It is cast to x's
            dtype.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [..., n_out] in x's dtype.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        RuntimeError: the implementation cannot run on this device and dtype.
    """
    import tnp.dispatch.call as dispatch

    return dispatch.call(LINEAR, implementation, (x, weight))


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
    """Returns queries of the rows from `first` on, and keys and values of the first `n_k` rows.

    Softmax does not change if one vector is subtracted from all keys of a sample. Neither do the
    gradients of attention, because each row of the gradient of its scores sums to zero. But in 16
    bits it matters: keys of trained models share a vector that is longer than the differences
    between keys. With `centred`, the mean of 64 keys of the sample is subtracted before the one
    rounding. The mean has no gradient. Attention then returns the `lse` of the centred keys.

    Args:
        x: [B, L, d_model], in a dtype that `linear` takes.
        weight: [3·d_model, d_model], the weights of q, k and v in turn, usually a float32
            parameter.
        n_heads: number of heads, which divides d_model.
        n_k: how many of the first rows are keys and values, from 1 to L. None: L.
        first: the first row that is a query, from 0 to L − 1.
        base2: whether q is multiplied by log2(e)/√D, as `attention` with base2 needs it. `fused`
            does so before its one rounding.
        centred: whether keys are centred.
        n_keys: int32 [B], each from 1 to n_k: the mean of sample b is over its first n_keys[b]
            rows. None: n_k. A number out of range is a ValueError on the CPU. On CUDA `fused` makes
            the sample's keys NaN, or with TNP_CHECK=1 asserts. PyTorch's form asserts that no
            number is too large.
        implementation: as for `linear`.

    Returns:
        q [B, n_heads, L − first, D], and k and v [B, n_heads, n_k, D]. They are views of [B, rows,
        d_model], or k and v of one [B, rows, 2·d_model].

    Raises:
        ValueError, RuntimeError: as `linear`.
    """
    import tnp.dispatch.call as dispatch

    if n_keys is not None and getattr(x, "ndim", 0) == 3:  # else `describe` refuses
        require_between("n_keys", n_keys, 1, x.shape[1] if n_k is None else n_k)
    if implementation == "torch":
        from torch.compiler import is_compiling

        if is_compiling():  # PyTorch's own form needs no constant: one graph serves all sizes
            n_q = x.shape[1] - first if first else None
            return qkv.reference(
                x, weight, n_keys, n_heads, n_q=n_q, n_k=n_k, centred=centred, base2=base2
            )
    # `index` makes torch.compile take a symbolic number as a constant of the graph.
    options: tuple = (("n_heads", index(n_heads)),)
    if first:
        options += (("n_q", index(x.shape[1] - first) if x.dim() == 3 else 1),)
    if n_k is not None:
        options += (("n_k", index(n_k)),)
    if base2:
        options += (("base2", True),)
    if centred:
        options += (("centred", True),)
    return dispatch.call(PROJECT_QKV, implementation, (x, weight, n_keys), (), options)
