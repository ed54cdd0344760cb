"""Multiplies matrices: plain, and with bias and GELU, the first half of GPT-2's feed-forward.

    matmul         c = a b
    gelu_linear    y = gelu(x Wᵀ + b)    gelu(z) = ½ z (1 + tanh(√(2/π) (z + 0.044715 z³)))

(Hendrycks and Gimpel, Gaussian Error Linear Units, arXiv 1606.08415, in the form with tanh.)
"""

from __future__ import annotations

from math import pi, prod
from typing import TYPE_CHECKING

from tnp.dispatch.spec import (
    EVERY_DTYPE_ON,
    FLOATS,
    Case,
    Implementation,
    Operator,
    Problem,
    Work,
    on_cuda,
)
from tnp.ops._shared.declared import by_pytorch, by_triton, cases_by_dtype, left_out_by_tf32
from tnp.util.checks import require_alike, require_floats, require_one_device

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tnp.dispatch.devices import Target

__all__ = ["gelu_linear", "matmul"]


# ----------------------------------------------------------------------------------------- matmul


def matmul_reference(a, b):
    return a @ b


def describe_matmul(a, b) -> dict:
    if a.dim() != 2 or b.dim() != 2:
        raise ValueError(
            f"a has shape {tuple(a.shape)} and b {tuple(b.shape)}: they must be [M, K] and [K, N]"
        )
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"a has {a.shape[1]} columns and b {b.shape[0]} rows: they must be equally many"
        )
    require_alike(a=a, b=b)
    return {"m": a.shape[0], "n": b.shape[1], "k": a.shape[1]}


def draw_matmul(case, random) -> dict:
    """Draws normal numbers; "transposed" names the operands whose columns are contiguous."""
    m, n, k = (case.problem[name] for name in "mnk")
    columns = case["transposed"] or ""
    a = random(k, m).t() if "a" in columns else random(m, k)
    b = random(n, k).t() if "b" in columns else random(k, n)
    return {"a": a, "b": b}


def work_matmul(case, pass_) -> Work:
    """Counts one product forward and two backward, and every matrix once."""
    m, n, k = (case.problem[name] for name in "mnk")
    flops, size = 2.0 * m * n * k, case.problem.itemsize
    operands, result = (m * k + k * n) * size, m * n * size
    if pass_ == "forward":
        return Work({case.problem.dtype: flops}, operands, result)
    return Work({case.problem.dtype: 2 * flops}, operands + result, operands)


def cases_matmul(target) -> list[Case]:
    """Covers ragged and whole sizes in every dtype, either operand transposed."""
    a, b, both = {"transposed": "a"}, {"transposed": "b"}, {"transposed": "ab"}
    drawn = [(1, 1, 1, {}), (33, 40, 24, b), (17, 16, 64, a), (20, 70, 7, {}), (64, 16, 32, {})]
    if target.kind == "cuda":
        drawn = [(1, 1, 1, {}), (1, 4096, 4096, b), (777, 1000, 513, {}), (777, 1000, 513, both)]
        drawn += [(2048, 2000, 1000, a), (4096, 4096, 4096, {}), (4096, 4096, 4096, both)]
        drawn += [(100, 1000, 2056, {}), (100, 513, 1001, {}), (128, 2048, 1000, a)]
        drawn += [(128, 11008, 1000, both), (128, 8192, 4096, b)]
    return cases_by_dtype(MATMUL, dict.fromkeys(FLOATS, drawn))


def compiled_matmul(target: Target) -> Iterator[Problem]:
    """Yields problems to compile: many rows, and few rows with each of the tiles made for them."""
    for dtype in ("bfloat16", "float32") if target.capability in EVERY_DTYPE_ON else ("bfloat16",):
        yield MATMUL.problem(dtype, m=4096, n=4096, k=4096)
        for n in (1024, 4096, 8192, 11008):
            yield MATMUL.problem(dtype, m=128, n=n, k=4096)


MATMUL = Operator(
    "matmul",
    condition=left_out_by_tf32,
    inputs=("a", "b"),
    outputs=("c",),
    sizes=("m", "n", "k"),
    differentiated=("a", "b"),
    implementations=(
        *by_pytorch(matmul_reference),
        by_triton(
            "triton",
            "matmul",
            "tnp.ops.products.triton_product",
            selectable=False,  # shown beside cuBLAS, and never chosen
        ),
    ),
    describe=describe_matmul,
    draw=draw_matmul,
    reference=matmul_reference,
    work=work_matmul,
    cases=cases_matmul,
    compiled=compiled_matmul,
    controls={"the last of K left out": lambda a, b: matmul_reference(a[:, :-1], b[:-1])},
)


def matmul(a: Tensor, b: Tensor, *, implementation: str = "torch") -> Tensor:
    """Returns a b.

    Args:
        a: [M, K], float16, bfloat16 or float32.
        b: [K, N], with a's dtype and device. Both may have any strides. Ours copy a matrix if
            neither dimension is contiguous.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [M, N] in a's dtype, contiguous, accumulated in float32.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch.call as dispatch

    return dispatch.call(MATMUL, implementation, (a, b))


# ------------------------------------------------------------------------------------ gelu_linear


def gelu_linear_reference(x, weight, bias):
    import torch.nn.functional as F

    z = F.linear(x, weight.to(x.dtype), bias.to(x.dtype))
    return F.gelu(z, approximate="tanh")


def gelu_linear_eager(x, weight, bias):
    """Computes the formula in single operations."""
    z = x @ weight.to(x.dtype).t() + bias.to(x.dtype)
    return 0.5 * z * (1 + ((2 / pi) ** 0.5 * (z + 0.044715 * z**3)).tanh())


def addmm_activation(x, weight, bias):
    """Calls PyTorch's private `_addmm_activation`, which has no derivative.

    On CUDA it computes GELU in the tanh form, in cuBLASLt's epilogue if that takes the operands,
    and else by a second kernel. On the CPU it computes the form with erf, which is another
    operator.
    """
    import torch

    rows, w = x.reshape(-1, x.shape[-1]), weight.to(x.dtype)
    y = torch._addmm_activation(bias.to(x.dtype), rows, w.t(), use_gelu=True)
    return y.view(*x.shape[:-1], -1)


def describe_gelu_linear(x, weight, bias) -> dict:
    require_floats(x=x)
    if x.dim() < 1 or weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)} and weight {tuple(weight.shape)}: they must be "
            "[..., n_in] and [n_out, n_in]"
        )
    if bias.shape != weight.shape[:1]:
        raise ValueError(f"bias has shape {tuple(bias.shape)}: it must be ({weight.shape[0]},)")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if str(parameter.dtype) not in (str(x.dtype), "torch.float32"):
            raise ValueError(
                f"{name} is {parameter.dtype}: it must be torch.float32 or x's {x.dtype}"
            )
        require_one_device(x=x, **{name: parameter})
    return {"rows": prod(x.shape[:-1]), "n_in": weight.shape[1], "n_out": weight.shape[0]}


def draw_gelu_linear(case, random) -> dict:
    """Draws normal numbers, and parameters in float32, or in x's dtype if named in "half"."""
    rows, n_in, n_out = (case.problem[name] for name in ("rows", "n_in", "n_out"))
    x, weight, bias = random(rows, n_in), random.weight(n_out, n_in), random(n_out)
    return {"x": x, "weight": weight.to(x.dtype) if case["half"] else weight, "bias": bias.float()}


def work_gelu_linear(case, pass_) -> Work:
    """Counts one product forward, with z if training, and two backward; float32 parameters."""
    rows, n_in, n_out = (case.problem[name] for name in ("rows", "n_in", "n_out"))
    flops, size = 2.0 * rows * n_in * n_out, case.problem.itemsize
    x, y, parameters = rows * n_in * size, rows * n_out * size, 4.0 * (n_in + 1) * n_out
    if pass_ == "forward":
        return Work({case.problem.dtype: flops}, x + parameters, y)
    return Work({case.problem.dtype: 2 * flops}, x + 2 * y + parameters, x + parameters)


def cases_gelu_linear(target) -> list[Case]:
    """Covers ragged sizes, and GPT-2's sizes on a GPU, in every dtype."""
    half = {"half": True}
    drawn = [(1, 1, 1, {}), (35, 24, 40, {}), (20, 7, 70, half), (64, 32, 16, half)]
    if target.kind == "cuda":
        drawn = [(1, 1, 1, {}), (777, 100, 513, {}), (333, 760, 3000, half)]
        drawn += [(1024, 768, 3072, {}), (8 * 1024, 768, 3072, half)]
    return cases_by_dtype(GELU_LINEAR, dict.fromkeys(FLOATS, drawn))


def gelu_linear_within(model, run) -> Problem | None:
    """Returns the problem of a language model whose feed-forward layer is GPT-2's."""
    if model.get("activation") != "gelu_tanh":
        return None
    rows = run["batch"] * run["n_tokens"]
    return GELU_LINEAR.problem(run["dtype"], rows=rows, n_in=model["d_model"], n_out=model["d_ff"])


def _with_silu(x, weight, bias):
    import torch.nn.functional as F

    return F.silu(F.linear(x, weight.to(x.dtype), bias.to(x.dtype)))


FUSED = by_triton("fused", "gelu_linear", "tnp.ops.products.triton_gelu_linear")
GELU_LINEAR = Operator(
    "gelu_linear",
    condition=left_out_by_tf32,
    inputs=("x", "weight", "bias"),
    outputs=("y",),
    sizes=("rows", "n_in", "n_out"),
    differentiated=("x", "weight", "bias"),
    implementations=(
        *by_pytorch(gelu_linear_reference, eager=gelu_linear_eager),
        Implementation(
            "addmm_activation",
            run=addmm_activation,
            provider="torch",
            gradients=(),
            supported=on_cuda(80),
        ),
        FUSED,
    ),
    describe=describe_gelu_linear,
    draw=draw_gelu_linear,
    reference=gelu_linear_reference,
    work=work_gelu_linear,
    cases=cases_gelu_linear,
    controls={
        "SiLU in place of GELU": _with_silu,
        "without bias": lambda x, weight, bias: gelu_linear_reference(x, weight, 0 * bias),
    },
    within=gelu_linear_within,
)


def gelu_linear(
    x: Tensor, weight: Tensor, bias: Tensor, *, implementation: str = "torch"
) -> Tensor:
    """Returns gelu(x weightᵀ + bias), with GELU in its tanh form.

    Args:
        x: [..., n_in], float16, bfloat16 or float32, any strides.
        weight: [n_out, n_in], a float32 parameter, or in x's dtype.
        bias: [n_out], float32 or in x's dtype.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [..., n_out] in x's dtype. The gradients of weight and bias have their dtypes.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch.call as dispatch

    return dispatch.call(GELU_LINEAR, implementation, (x, weight, bias))


OPERATORS = (MATMUL, GELU_LINEAR)
