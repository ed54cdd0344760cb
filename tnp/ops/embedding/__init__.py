"""Computes the first embedding layer: context points and targets become rows of one tensor.

    tokens = (x, y, −1) for context and (x, 0, +1) for targets    out = silu(tokens @ weightᵀ)

It computes in float32 and rounds once at the end, because bfloat16 cannot distinguish neighbouring
pixels of a 512-pixel row. The flag is never zero, so it also serves as the bias that the layer
lacks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tnp.dispatch.spec import Case, Operator, Work, triton_from
from tnp.ops._shared.declared import by_pytorch, by_triton
from tnp.util.checks import require_floats, require_one_device

if TYPE_CHECKING:
    import torch

__all__ = ["embed_rows"]

SHAPES = {"x_context": "[B, M, d_x]", "y_context": "[B, M, d_y]", "x_target": "[B, N, d_x]"}
MAX_WIDTH = 8  # features of a token: their gradients are accumulated in registers
GIVEN = ("x_context", "x_target", "y_context")  # inputs that may be missing


def reference(x_context, y_context, x_target, weight, like):
    """Computes the formula in PyTorch, in weight's dtype; the result has the dtype of `like`."""
    import torch
    import torch.nn.functional as F

    rows = []
    if x_context is not None:
        flag = x_context.new_full((*x_context.shape[:-1], 1), -1.0)
        rows.append(torch.cat([x_context, y_context, flag], dim=-1))
    if x_target is not None:
        d_y = weight.shape[1] - x_target.shape[-1] - 1
        y = x_target.new_zeros(*x_target.shape[:-1], d_y)
        rows.append(torch.cat([x_target, y, x_target.new_ones(*x_target.shape[:-1], 1)], dim=-1))
    tokens = torch.cat(rows, dim=1).to(weight.dtype)
    return F.silu(F.linear(tokens, weight)).to(like.dtype)


def describe(x_context, y_context, x_target, weight, like) -> dict:
    """Returns sizes and the result's dtype. Raises ValueError if tensors do not fit together."""
    given = {"x_context": x_context, "y_context": y_context, "x_target": x_target}
    require_floats(**given, weight=weight, dtype=like)
    if (x_context is None) != (y_context is None):
        raise ValueError("one of x_context and y_context is None: they must be given together")
    if x_context is None and x_target is None:
        raise ValueError("x_context and x_target are None: one of them must be given")
    if weight.dim() != 2:
        raise ValueError(
            f"weight has shape {tuple(weight.shape)}: it must be [d_model, d_x + d_y + 1]"
        )
    computed_in = str(weight.dtype).removeprefix("torch.")
    if computed_in not in ("float32", "float64"):
        raise ValueError(f"weight is {weight.dtype}: it must be float32, or float64 for 'torch'")
    for name, x in given.items():
        if x is None:
            continue
        if x.dim() != 3:
            raise ValueError(f"{name} has shape {tuple(x.shape)}: it must be {SHAPES[name]}")
        require_one_device(weight=weight, **{name: x})
    d_model, width = weight.shape
    if x_context is not None:
        _check_context(x_context, y_context, weight)
        if x_target is not None and x_context.shape[::2] != x_target.shape[::2]:
            raise ValueError(
                f"x_context is {tuple(x_context.shape)} and x_target {tuple(x_target.shape)}: "
                "they must agree in batch and d_x"
            )
    elif x_target.shape[-1] + 1 > width:
        raise ValueError(
            f"weight is {tuple(weight.shape)} and x_target {tuple(x_target.shape)}: "
            "weight must be [d_model, d_x + d_y + 1]"
        )
    rows = sum(x.shape[0] * x.shape[1] for x in (x_context, x_target) if x is not None)
    result = str(like.dtype).removeprefix("torch.")
    dtype = computed_in if computed_in == "float64" else result
    return {"dtype": dtype, "rows": rows, "width": width, "d_model": d_model}


def _check_context(x_context, y_context, weight) -> None:
    if x_context.shape[:2] != y_context.shape[:2]:
        raise ValueError(
            f"x_context is {tuple(x_context.shape)} and y_context {tuple(y_context.shape)}: "
            "they must agree in batch and points"
        )
    width = x_context.shape[-1] + y_context.shape[-1] + 1
    if width != weight.shape[1]:
        raise ValueError(
            f"weight is {tuple(weight.shape)} and tokens have {width} features: "
            "they must be [d_model, d_x + d_y + 1]"
        )


def draw(case, random) -> dict:
    """Draws x and y in float32, views of one tensor [B, M + N, d_x + d_y] as tasks may be.

    A case may say its `batch` (1), `n_context` (half of the points if both are given), `d_x` (1)
    and the `scale` of weight (1).
    """
    import torch

    problem, batch = case.problem, case["batch"] or 1
    n_points, d_x = problem["rows"] // batch, case["d_x"] or 1
    m = dict(case.draw).get("n_context", n_points // 2) if problem["x_target"] else n_points
    m = m if problem["x_context"] else 0
    points = random(batch, n_points, problem["width"] - 1, dtype=torch.float32)
    return {
        "x_context": points[:, :m, :d_x] if problem["x_context"] else None,
        "y_context": points[:, :m, d_x:] if problem["x_context"] else None,
        "x_target": points[:, m:, :d_x] if problem["x_target"] else None,
        "weight": random.weight(problem["d_model"], problem["width"]) * (case["scale"] or 1.0),
        "like": random(0),
    }


def work(case, pass_) -> Work:
    """Counts points and weight, 4 bytes a number, and the rows of the result or of its gradient."""
    problem = case.problem
    points = 4 * problem["rows"] * (problem["width"] - 1)
    weight = 4 * problem["d_model"] * problem["width"]
    out = problem["rows"] * problem["d_model"] * problem.itemsize
    if pass_ == "forward":
        return Work({}, points + weight, out)
    return Work({}, points + weight + out, weight)


def _case(batch, n_context, n_target, d_model, dtype, d_x=1, d_y=1, scale=1.0) -> Case:
    context, target = n_context is not None, n_target is not None
    rows = batch * ((n_context or 0) + (n_target or 0))
    given = {"x_context": context, "y_context": context, "x_target": target}
    draw = {"batch": batch, "n_context": n_context or 0, "d_x": d_x, "scale": scale}
    return OPERATOR.case(dtype, rows, d_x + d_y + 1, d_model, **given, **draw)


def cases(target) -> list[Case]:
    """Covers context, targets or both, several dimensions, and overflowing e^−a (scale 50)."""
    if target.kind != "cuda":
        return [
            _case(2, 5, 9, 48, "bfloat16"),
            _case(3, 2, 3, 40, "float32", d_x=2, d_y=3),
            _case(1, None, 7, 33, "float32"),
            _case(1, 7, None, 33, "float16"),
            _case(2, 0, 3, 16, "bfloat16"),
            _case(2, 3, 0, 16, "bfloat16"),
            _case(1, 9, 2, 64, "float32", scale=50.0),
        ]
    return [
        _case(64, 64, 500, 512, "bfloat16"),
        _case(4, 10_000, 1000, 512, "bfloat16"),
        _case(4, 10_000, None, 512, "bfloat16"),
        _case(3, None, 777, 512, "bfloat16"),
        _case(2, 0, 33, 512, "bfloat16"),
        _case(2, 33, 0, 512, "bfloat16"),
        _case(3, 100, 77, 384, "bfloat16", d_x=2, d_y=3),
        _case(3, 100, 77, 1000, "bfloat16", d_x=3, d_y=4),
        _case(2, 100, 77, 512, "float16"),
        _case(2, 100, 77, 512, "float32"),
        _case(2, 100, 77, 512, "float32", scale=50.0),
    ]


def within(model, run):
    """Returns the problem of a neural process: all of a task's points at once."""
    if "n_components" not in model:
        return None
    return OPERATOR.problem(
        run["dtype"],
        rows=run["batch"] * (run["n_context"] + run["n_target"]),
        width=model.get("d_x", 1) + model.get("d_y", 1) + 1,
        d_model=model["d_model"],
        **dict.fromkeys(GIVEN, True),
    )


def _flag_missing(x_context, y_context, x_target, weight, like):
    import torch

    flagless = torch.cat([weight[:, :-1], torch.zeros_like(weight[:, -1:])], dim=1)
    return reference(x_context, y_context, x_target, flagless, like)


def _targets_shifted(x_context, y_context, x_target, weight, like):
    shifted = None if x_target is None else x_target.roll(1, 1)
    return reference(x_context, y_context, shifted, weight, like)


def _values_missing(x_context, y_context, x_target, weight, like):
    return reference(
        x_context, None if y_context is None else 0.0 * y_context, x_target, weight, like
    )


def _last_row_without_gradient(*inputs):
    import torch

    out = reference(*inputs)
    return torch.cat([out[:, :-1], out[:, -1:].detach()], dim=1)


def _fused(call):
    if (reason := triton_from(80)(call)) is not None:
        return reason
    width = call.problem["width"]
    if width > MAX_WIDTH:
        return f"d_x + d_y + 1 is {width}, and it takes tokens of at most {MAX_WIDTH} features"
    return None


OPERATOR = Operator(
    "embedding",
    # `like` gives the result's dtype; nothing else of it is read.
    inputs=("x_context?", "y_context?", "x_target?", "weight", "like"),
    outputs=("out",),
    sizes=("rows", "width", "d_model"),
    differentiated=("x_context", "y_context", "x_target", "weight"),
    keeps=("x_context", "y_context", "x_target", "weight"),
    implementations=(
        *by_pytorch(reference, GIVEN),
        by_triton(
            "fused",
            "embedding",
            "tnp.ops.embedding.triton_embedding",
            supported=_fused,
            options=GIVEN,
            gradients=("weight",),
        ),
    ),
    describe=describe,
    draw=draw,
    reference=reference,
    work=work,
    cases=cases,
    within=within,
    controls={
        "the flag is missing": _flag_missing,
        "targets are shifted by a point": _targets_shifted,
        "values are missing": _values_missing,
        "the last row has no gradient": _last_row_without_gradient,
    },
)


def embed_rows(
    x_context: torch.Tensor | None,
    y_context: torch.Tensor | None,
    x_target: torch.Tensor | None,
    weight: torch.Tensor,
    dtype: torch.dtype,
    *,
    implementation: str = "torch",
) -> torch.Tensor:
    """Returns silu(tokens @ weightᵀ), first the rows of the context and then of the targets.

    Args:
        x_context, y_context: [B, M, d_x] and [B, M, d_y], any strides. Both None: only targets.
        x_target: [B, N, d_x], any strides. None: only context.
        weight: [d_model, d_x + d_y + 1], float32. `torch` also takes float64 and then computes in
            it.
        dtype: the result's dtype: bfloat16, float16 or float32 (`torch`: float64 too).
        implementation: a name of `tnp.dispatch.registry`, or "auto".

    Returns:
        [B, M + N, d_model] in `dtype`, contiguous.

    Raises:
        ValueError: shapes, dtypes or devices do not fit together.
        RuntimeError: the implementation cannot run here, with the reason. `fused` gives no gradient
            of x and y, and takes d_x + d_y + 1 up to 8.
    """
    import tnp.dispatch.call as dispatch

    like = weight.new_empty(0, dtype=dtype)
    inputs = x_context, y_context, x_target, weight, like
    return dispatch.call(OPERATOR, implementation, inputs)
