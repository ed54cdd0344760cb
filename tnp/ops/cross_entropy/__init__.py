"""Computes cross-entropy of logits and target classes.

    loss = mean over targets t that count of log Σ_j e^(x_j) − x_t

A target of −100 does not count. The loss is float32 for logits of any dtype, or float64 for float64
logits. The gradient goes to new memory, so logits are not changed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tnp.dispatch.spec import Case, Operator, Work
from tnp.ops._shared.declared import by_pytorch, by_triton, rows_within
from tnp.util.checks import require_floats, require_one_device

if TYPE_CHECKING:
    import torch

__all__ = ["cross_entropy"]

IGNORE_INDEX = -100  # PyTorch's default


def reference(logits, target):
    """Computes PyTorch's cross-entropy, in float64 for float64 logits and else in float32."""
    import torch
    import torch.nn.functional as F

    exact = logits.dtype if logits.dtype == torch.float64 else torch.float32
    return F.cross_entropy(logits.to(exact), target, ignore_index=IGNORE_INDEX)


def check_target(target, rows, name: str) -> None:
    """Raises ValueError unless `target` holds a class for each row of `rows`, called `name`."""
    if str(target.dtype) != "torch.int64":
        raise ValueError(f"target is {target.dtype}: it must be torch.int64")
    if target.shape != rows.shape[:1]:
        raise ValueError(
            f"{name} is {tuple(rows.shape)} and target {tuple(target.shape)}: target must be "
            f"[{rows.shape[0]}]"
        )
    require_one_device(**{name: rows, "target": target})


def require_classes(target, n_classes: int) -> None:
    """Raises ValueError if the host knows of a target that is no class and not IGNORE_INDEX."""
    import torch

    plain = target.__class__ is torch.Tensor and target.is_cpu and not torch.compiler.is_compiling()
    if not plain or target.dtype != torch.int64 or not n_classes:
        return
    wrong = ((target < 0) | (target >= n_classes)) & (target != IGNORE_INDEX)
    if wrong.any():
        row = int(wrong.flatten().nonzero()[0])
        raise ValueError(
            f"target is {target.flatten()[row]} in row {row}: it must lie between 0 and "
            f"{n_classes - 1}, or be {IGNORE_INDEX}, which does not count"
        )


def describe(logits, target) -> dict:
    require_floats(logits=logits)
    if logits.dim() != 2:
        raise ValueError(f"logits have shape {tuple(logits.shape)}: they must be [N, V]")
    check_target(target, logits, "logits")
    return {"rows": logits.shape[0], "classes": logits.shape[1]}


def draw_target(case, random, n, n_classes):
    """Draws classes. If the case says `ignored`, one target in that many does not count."""
    import torch

    target = random.integers(0, n_classes - 1, n, dtype=torch.int64)
    if case["ignored"]:
        target[:: case["ignored"]] = IGNORE_INDEX
    return target


def out_of_range(case, inputs):
    """Yields targets that are no class: they spoil the loss, and gradients of row and weight."""
    import torch

    target = inputs["target"]
    right, where = target.clone(), torch.zeros_like(target, dtype=torch.bool)
    right[-1], where[-1] = 0, True
    spoiled = dict.fromkeys(("dlogits", "dx"), where)
    spoiled |= dict.fromkeys(("loss", "dweight"), where.any())
    for number in (case.problem["classes"], -1):
        wrong = target.clone()
        wrong[-1] = number
        yield {"target": wrong}, {"target": right}, spoiled


def draw(case, random) -> dict:
    """Draws normal logits.

    A case may say their `magnitude` (1), how many columns rows are `padded` by, how many `masked`
    columns at the end are −inf, and that one target in `ignored` does not count.
    """
    n, n_classes = case.problem["rows"], case.problem["classes"]
    n_possible = n_classes - int(case["masked"])
    padded = random(n, n_classes + int(case["padded"])) * (case["magnitude"] or 1.0)
    padded[:, n_possible:] = float("-inf")
    target = draw_target(case, random, n, n_possible)
    return {"logits": padded[:, :n_classes], "target": target}


def work(case, pass_) -> Work:
    """Counts the logits read once, and with a gradient written once, perhaps forward."""
    size = case.problem["rows"] * case.problem["classes"] * case.problem.itemsize
    return Work({}, size + 8 * case.problem["rows"], 4 if pass_ == "forward" else size)


def cases(target) -> list[Case]:
    """Covers few and many classes, ragged and strided, ignored targets, and saturated logits."""
    if target.kind != "cuda":
        many = [("bfloat16", 3, 4097), ("float16", 7, 100), ("float32", 2, 8200)]
    else:
        many = [
            ("bfloat16", 4096, 128_256), ("bfloat16", 333, 50_257), ("float16", 77, 262_144),
            ("float32", 1000, 32_000), ("bfloat16", 100_003, 10),
        ]  # fmt: skip
    return [
        *(OPERATOR.case(*one, ignored=3) for one in many),
        OPERATOR.case("float32", 1, 1),
        OPERATOR.case("float32", 67, 10),
        OPERATOR.case("bfloat16", 67, 10, padded=3),
        OPERATOR.case("float32", 9, 130, padded=2, masked=5),
        OPERATOR.case("float32", 33, 257, magnitude=100.0),
        OPERATOR.case("float32", 33, 257, magnitude=1e4, ignored=2),
        OPERATOR.case("float16", 33, 257, magnitude=50.0),
    ]


def condition(case, inputs) -> float:
    """Returns the relative error of some float32 roundings.

    The loss is one number, in which errors of targets cancel, so PyTorch's own error can be 0 by
    chance.
    """
    return 5e-7


def within(model, run):
    if "vocabulary" not in model:
        return None
    return OPERATOR.problem(run["dtype"], rows=rows_within(run), classes=model["vocabulary"])


def without_last_class(logits):
    """Returns logits without the last class, for controls."""
    import torch

    last = torch.zeros_like(logits)
    last[:, -1] = 1e4
    return logits - last


def _ignored_count(logits, target):
    import torch

    counted = (target != IGNORE_INDEX).sum() / max(target.numel(), 1)
    return reference(logits, target) * torch.where(counted > 0, counted, 1.0)


OPERATOR = Operator(
    "cross_entropy",
    inputs=("logits", "target"),
    outputs=("loss",),
    sizes=("rows", "classes"),
    differentiated=("logits",),
    backward_with_forward=True,
    implementations=(
        *by_pytorch(reference),
        by_triton("triton", "cross_entropy", "tnp.ops.cross_entropy.triton_cross_entropy"),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=cases,
    out_of_range=out_of_range,
    condition=condition,
    within=within,
    controls={
        "targets are shifted by a row": lambda logits, target: reference(logits, target.roll(1)),
        "the last class is missing": lambda logits, target: reference(
            without_last_class(logits), target
        ),
        "ignored targets count": _ignored_count,
    },
)


def cross_entropy(
    logits: torch.Tensor, target: torch.Tensor, *, implementation: str = "torch"
) -> torch.Tensor:
    """Returns the mean negative log-likelihood, in nats, over the targets that count.

    Args:
        logits: [N, V], bfloat16, float16 or float32 (float64 for `torch` only), any strides. Rows
            that are not contiguous are copied.
        target: [N], int64, each a class, or −100, which does not count. Other numbers are a
            ValueError on the CPU. On CUDA `triton` makes the loss and their rows' gradients NaN, or
            with TNP_CHECK=1 asserts. PyTorch's forms always assert.
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        A scalar, float32 (float64 for float64 logits). It is NaN with gradient 0 if no target
        counts.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together, or on the CPU a target is no
            class.
        RuntimeError: the implementation cannot run here, with the reason.
    """
    import tnp.dispatch.call as dispatch

    if getattr(logits, "ndim", 0) == 2:  # `describe` and `call` refuse other objects and dimensions
        require_classes(target, logits.shape[1])
    return dispatch.call(OPERATOR, implementation, (logits, target))
