"""Computes cross-entropy of a linear layer's logits, which are never all in memory.

    loss = mean over targets t that count of log Σ_j e^(l_j) − l_t        l = x weightᵀ

Logits are rounded to x's dtype, like the layer's results. The loss is float32. A target of −100
does not count. At 16,384 rows of 128,256 classes, logits take 4.2 GB in 16 bits, and so does their
gradient. Both are made for a chunk of rows at a time, as in Liger Kernel (arXiv 2410.10989). Cut
Cross-Entropy (arXiv 2411.09009) multiplies twice instead.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tnp.dispatch.spec import Case, Operator, Work
from tnp.ops._shared.declared import by_pytorch, by_triton, rows_within
from tnp.ops.cross_entropy import (
    check_target,
    draw_target,
    out_of_range,
    require_classes,
    without_last_class,
)
from tnp.ops.cross_entropy import reference as loss_of_logits
from tnp.util.checks import require_alike, require_floats

if TYPE_CHECKING:
    import torch

__all__ = ["linear_cross_entropy"]


def reference(x, weight, target):
    return loss_of_logits(x @ weight.T, target)


def describe(x, weight, target) -> dict:
    require_floats(x=x, weight=weight)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}: "
            "they must be [N, D] and [V, D]"
        )
    require_alike(x=x, weight=weight)
    check_target(target, x, "x")
    return {"rows": x.shape[0], "width": x.shape[1], "classes": weight.shape[0]}


def draw(case, random) -> dict:
    """Draws x of the case's `magnitude` (1), weight, and targets, one in `ignored` ignored."""
    n, d, v = (case.problem[name] for name in ("rows", "width", "classes"))
    return {
        "x": random(n, d) * (case["magnitude"] or 1.0),
        "weight": random.weight(v, d).to(random.dtype),
        "target": draw_target(case, random, n, v),
    }


def work(case, pass_) -> Work:
    """Counts one product, or three with gradients, which the forward pass may compute."""
    problem = case.problem
    n, d, v = (problem[name] for name in ("rows", "width", "classes"))
    operands = (n + v) * d * problem.itemsize
    products, written = (1, 4) if pass_ == "forward" else (3, operands)
    return Work({problem.dtype: 2.0 * n * d * v * products}, operands + 8 * n, written)


def cases(target) -> list[Case]:
    """Covers one and several chunks, a ragged one, ignored targets, and sharp softmaxes."""
    if target.kind != "cuda":
        return [
            OPERATOR.case("bfloat16", 23, 16, 200, ignored=3),
            OPERATOR.case("float16", 19, 16, 300),
            OPERATOR.case("float32", 21, 24, 257, ignored=5),
            OPERATOR.case("float32", 1, 8, 1),
            OPERATOR.case("float32", 9, 16, 33, magnitude=50.0),
        ]
    return [
        OPERATOR.case("bfloat16", 5000, 256, 128_256, ignored=3),
        OPERATOR.case("bfloat16", 777, 512, 50_257),
        OPERATOR.case("float16", 1000, 768, 32_000, ignored=2),
        OPERATOR.case("float32", 333, 264, 10_007, ignored=5),
        OPERATOR.case("float32", 1, 8, 1),
        OPERATOR.case("float32", 99, 64, 1000, magnitude=50.0),
        OPERATOR.case("bfloat16", 99, 64, 1000, magnitude=10.0),
    ]


def condition(case, inputs) -> float:
    """Estimates the loss's error from rounded logits; PyTorch's own may be 0 by chance."""
    import torch

    x, weight, target = (inputs[name] for name in ("x", "weight", "target"))
    counted = target >= 0
    of_targets = (x[counted].float() * weight[target[counted]].float()).sum(1)
    rounding = torch.finfo(x.dtype).eps * of_targets.norm().item() / max(int(counted.sum()), 1)
    return max(5e-7, rounding / math.log(max(weight.shape[0], 2)))


def within(model, run):
    if "vocabulary" not in model:
        return None
    return OPERATOR.problem(
        run["dtype"], rows=rows_within(run), width=model["d_model"], classes=model["vocabulary"]
    )


_CODE = "tnp.ops.linear_cross_entropy.triton_linear_cross_entropy"
OPERATOR = Operator(
    "linear_cross_entropy",
    inputs=("x", "weight", "target"),
    outputs=("loss",),
    sizes=("rows", "width", "classes"),
    differentiated=("x", "weight"),
    keeps=(),
    backward_with_forward=True,
    implementations=(*by_pytorch(reference), by_triton("triton", "linear_cross_entropy", _CODE)),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=cases,
    out_of_range=out_of_range,
    condition=condition,
    within=within,
    controls={
        "targets are shifted by a row": lambda x, weight, target: reference(
            x, weight, target.roll(1)
        ),
        "the last row is missing": lambda x, weight, target: reference(x[:-1], weight, target[:-1]),
        "the last class is missing": lambda x, weight, target: loss_of_logits(
            without_last_class(x @ weight.T), target
        ),
    },
)


def linear_cross_entropy(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, *, implementation: str = "torch"
) -> torch.Tensor:
    """Returns the mean negative log-likelihood, in nats, over targets that count, with logits x
    weightᵀ.

    Args:
        x: [N, D], bfloat16, float16 or float32 (float64 for `torch` only), any strides.
        weight: [V, D] in x's dtype.
        target: [N], int64, each a class, or −100, which does not count. Other numbers have the same
            effect as in `cross_entropy`.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        A scalar, float32 (float64 for float64 x). It is NaN with gradient 0 if no target counts.
        `triton` computes the wanted gradients together with the loss. Beside them, at most 1 GiB of
        logits is in memory at once, and in the backward pass also the gradients before they are
        scaled. If a row of V logits is no multiple of 128 bytes, it makes a padded copy of the
        weight.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or on the CPU a target is no
            class.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch.call as dispatch

    if getattr(weight, "ndim", 0) == 2:  # `describe` and `call` refuse other objects and dimensions
        require_classes(target, weight.shape[0])
    return dispatch.call(OPERATOR, implementation, (x, weight, target))
