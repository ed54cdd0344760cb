"""Cases and sizes of operators on rows, and how their values are drawn. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tnp.contract import Call, Case, Operator, Reason, triton_from

if TYPE_CHECKING:
    from torch import Tensor

# By dtype: rows, their width, and `Case.draw`.
Sizes = Mapping[str, Sequence[tuple[int, int, Mapping[str, Any]]]]


def sized_cases(operator: Operator, sizes: Sizes) -> list[Case]:
    """Of an operator that has rows and a width."""
    return [
        Case(operator.problem(dtype, rows=rows, width=width), tuple(drawn.items()))
        for dtype, of_dtype in sizes.items()
        for rows, width, drawn in of_dtype
    ]


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
    n_tokens = run.get("n_tokens") or run["n_context"] + run["n_target"]
    return run["batch"] * n_tokens


def triton_to_width(most: int) -> Any:
    """Support of Triton kernels from 8.0 on that take rows up to a width."""
    anywhere_else = triton_from(80)

    def supported(call: Call) -> Reason:
        width = call.problem["width"]
        if width > most:
            return f"it takes widths up to {most}, not {width}"
        return anywhere_else(call)

    return supported
