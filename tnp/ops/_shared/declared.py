"""Shares code between declarations of operators. It imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from tnp.dispatch.spec import (
    ALL_FLOATS,
    Call,
    Case,
    Implementation,
    Operation,
    Operator,
    Reason,
    Support,
    Work,
    triton_from,
)

if TYPE_CHECKING:
    from torch import Tensor

E4M3_MULTIPLE = 16  # PyTorch's products of 8-bit rows take widths that are multiples of this


def by_pytorch(
    run: Callable[..., Any],
    options: tuple[str, ...] = (),
    eager: Callable[..., Any] | None = None,
) -> tuple[Implementation, ...]:
    """Returns PyTorch's forms: plain, and compiled without and with a search for the fastest code.

    The plain form takes any of PyTorch's float dtypes.

    Args:
        run: the plain form, with the reference's arguments.
        options: the options that it takes.
        eager: the formula written out, a kernel for each operation, where `run` calls a fused
            function of PyTorch. It becomes implementation `eager`, for benchmarks alone.
    """
    forms = (
        Implementation("torch", run=run, provider="torch", dtypes=ALL_FLOATS, options=options),
        *compiled(run, options),
    )
    if eager is None:
        return forms
    return *forms, Implementation("eager", run=eager, provider="torch", selectable=False)


def compiled(
    run: Callable[..., Any], options: tuple[str, ...] = (), **limits: Any
) -> tuple[Implementation, Implementation]:
    """Returns a form of PyTorch compiled without and with a search for the fastest code."""
    modes = {"compiled": "default", "compiled_autotuned": "max-autotune"}
    return tuple(
        Implementation(name, run=run, provider="torch", compile=mode, options=options, **limits)
        for name, mode in modes.items()
    )


def compiled_sdpa(run: Callable[..., Any], options: tuple[str, ...]) -> Implementation:
    """Returns a compiled form with PyTorch's SDPA: the plain form has all scores in memory."""
    return Implementation(
        "compiled_sdpa", run=run, provider="torch", compile="default", options=options,
        title="compiled PyTorch with SDPA",
    )  # fmt: skip


def by_triton(
    name: str,
    op: str,
    *modules: str,
    forward: tuple[str, ...] = ("FORWARD",),
    backward: tuple[str, ...] = ("BACKWARD",),
    supported: Support | None = None,
    **limits: Any,
) -> Implementation:
    """Returns our implementation by Triton kernels of these modules and names, for each pass."""

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


def width_in_8_bits(d_model: int) -> Reason:
    """Returns why a library cannot multiply 8-bit rows of this width, or None."""
    if d_model % E4M3_MULTIPLE:
        return f"D is {d_model}: it takes multiples of {E4M3_MULTIPLE}"
    return None


def in_8_bits(least: Work) -> Work:
    """Returns the same work with all products in e4m3."""
    return Work({"e4m3": sum(least.flops.values())}, least.read, least.written)


def triton_to_width(most: int) -> Support:
    """Returns the `Support` of Triton kernels from 8.0 on that take rows up to a width."""
    anywhere_else = triton_from(80)

    def supported(call: Call) -> Reason:
        width = call.problem["width"]
        if (reason := anywhere_else(call)) is not None or width <= most:
            return reason
        return f"it takes widths up to {most}, not {width}"

    return supported


def cases_by_dtype(operator: Operator, described: Mapping[str, Iterable[tuple]]) -> list[Case]:
    """Returns the described cases in each dtype: sizes in the operator's order, others by name."""
    return [
        operator.case(dtype, *sizes, **named)
        for dtype, of_dtype in described.items()
        for *sizes, named in of_dtype
    ]


def left_out_by_tf32(case: Case, inputs: Mapping[str, Tensor]) -> float:
    """Returns the error of leaving out the product of both low parts, of four TF32 products."""
    return 2.0**-22 if case.problem.dtype == "float32" else 0.0


def draw_rows(case: Case, random: Any) -> Tensor:
    """Draws x [rows, width], or [batch, rows / batch, width] if the case names a batch.

    The case may name `start`, so that x is a view from that row on, and `magnitude`.
    """
    rows, width, start = case.problem["rows"], case.problem["width"], int(case["start"])
    batch = int(case["batch"])
    shape = (batch, start + rows // batch) if batch else (start + rows,)
    return (random(*shape, width) * (case["magnitude"] or 1.0))[..., start:, :]


def rows_within(run: Mapping) -> int:
    """Returns the rows of a step: tokens, or context and target points."""
    n_points = run["n_context"] + run["n_target"] if "n_context" in run else run["n_tokens"]
    return run["batch"] * n_points


def numbers_out_of_range(
    inputs: Mapping[str, Tensor | None], name: str, least: int, most: int, *results: str
) -> Iterator[tuple[dict, dict, dict]]:
    """Yields the cases of `Operator.out_of_range`: a number that is too large, and one that is too
    small.

    Args:
        inputs: the drawn inputs.
        name: the input that holds a number for each sample, int32 [B], or None.
        least, most: the range.
        results: names of the results that must be NaN in the sample.
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
