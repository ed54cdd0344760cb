"""What operators' declarations share. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tnp.dispatch import nvrtc
from tnp.dispatch.spec import (
    ALL_FLOATS,
    Call,
    Case,
    Implementation,
    Operation,
    Operator,
    Reason,
    Support,
    anywhere,
    on_cuda,
    triton_from,
)

if TYPE_CHECKING:
    from torch import Tensor


def by_pytorch(
    run: Callable[..., Any], options: tuple[str, ...] = ()
) -> tuple[Implementation, Implementation]:
    """PyTorch's plain form, in any of its floats, and the same compiled."""
    return (
        Implementation("torch", run=run, provider="torch", dtypes=ALL_FLOATS, options=options),
        Implementation("compiled", run=run, provider="torch", compile="default", options=options),
    )


def by_triton(
    name: str,
    op: str,
    *modules: str,
    forward: tuple[str, ...] = ("FORWARD",),
    backward: tuple[str, ...] = ("BACKWARD",),
    supported: Support | None = None,
    **limits: Any,
) -> Implementation:
    """Ours, made of Triton kernels: of these modules, in each pass, those of these names."""

    def operation(pass_: str, kernels: tuple[str, ...]) -> Operation:
        named = tuple(f"{module}:{kernel}" for module in modules for kernel in kernels)
        return Operation(f"{op}.{pass_}", named)

    return Implementation(
        name,
        forward=operation("forward", forward),
        backward=operation("backward", backward),
        supported=supported or triton_from(80),
        **limits,
    )


def by_cuda(
    name: str,
    op: str,
    kernel: str,
    also: Support = anywhere,
    missing: Callable[[], Reason] = nvrtc.missing,
    **limits: Any,
) -> Implementation:
    """Ours in CUDA C++, to learn from: never chosen unless it is named. Its own operation forward,
    `backward` where `limits` name one.

    Args:
        name: its own, and that of the operation.
        op: the operator's.
        kernel: "module:NAME".
        also: what it refuses besides what no CUDA C++ can serve.
        missing: what it needs that is not installed.
        limits: of the implementation.
    """

    on_gpu = on_cuda(min(nvrtc.ARCHITECTURES))
    return Implementation(
        name,
        forward=Operation(f"{op}.{name}", (kernel,)),
        supported=lambda call: on_gpu(call) or also(call),
        missing=missing,
        selectable=False,
        **limits,
    )


def triton_to_width(most: int) -> Support:
    """Support of Triton kernels from 8.0 on that take rows up to a width."""
    anywhere_else = triton_from(80)

    def supported(call: Call) -> Reason:
        width = call.problem["width"]
        if (reason := anywhere_else(call)) is not None or width <= most:
            return reason
        return f"it takes widths up to {most}, not {width}"

    return supported


def cases_by_dtype(operator: Operator, described: Mapping[str, Iterable[tuple]]) -> list[Case]:
    """Of each dtype those described: sizes in the operator's order, and by name all the rest."""
    return [
        operator.case(dtype, *sizes, **named)
        for dtype, of_dtype in described.items()
        for *sizes, named in of_dtype
    ]


def left_out_by_tf32(case: Case, inputs: Mapping[str, Tensor]) -> float:
    """Condition of products of float32 as three of TF32: that of both low parts is left out."""
    return 2.0**-22 if case.problem.dtype == "float32" else 0.0


def draw_rows(case: Case, random: Any) -> Tensor:
    """[rows, width], or [batch, rows / batch, width] where the case names a batch.

    Of the case: `start`, the row that this is a view from, and `magnitude`.
    """
    rows, width, start = case.problem["rows"], case.problem["width"], int(case["start"])
    batch = int(case["batch"])
    shape = (batch, start + rows // batch) if batch else (start + rows,)
    return (random(*shape, width) * (case["magnitude"] or 1.0))[..., start:, :]


def rows_within(run: Mapping) -> int:
    """Rows of a step: tokens, or context and target points."""
    n_points = run["n_context"] + run["n_target"] if "n_context" in run else run["n_tokens"]
    return run["batch"] * n_points


def numbers_out_of_range(
    inputs: Mapping[str, Tensor | None], name: str, least: int, most: int, *results: str
) -> Iterator[tuple[dict, dict, dict]]:
    """Yields what `Operator.out_of_range` asks for: too large a number, and one that is too small.

    Args:
        inputs: as they were drawn.
        name: the input that holds a number of each sample, int32 [B], or None.
        least, most: the range.
        results: names of those that are NaN in the sample.
    """
    import torch

    numbers = inputs[name]
    if numbers is None:
        return
    for sample, number, nearest in ((0, most + 1, most), (-1, -(2**31), least)):
        wrong, right = numbers.clone(), numbers.clone()
        where = torch.zeros_like(numbers, dtype=torch.bool)
        wrong[sample], right[sample], where[sample] = number, nearest, True
        yield {name: wrong}, {name: right}, dict.fromkeys(results, where)
