"""Shares host code between operators that launch their products in 8 bits one after another."""

from types import ModuleType
from typing import NamedTuple

from torch import Tensor

from tnp.dispatch.spec import Call, Reason
from tnp.ops._shared import (
    blocks_8bit,
    gradient_8bit,
    hopper_blocks_8bit,
    hopper_gradient_8bit,
)
from tnp.ops._shared.operands import Rows, rows_of


class Kernels(NamedTuple):
    """Names the modules of one kind of kernels."""

    products: ModuleType  # the operator's own
    blocks: ModuleType  # quantize activations
    gradients: ModuleType  # of weights

    def rows(self, x: Tensor, contiguous: bool = False) -> Rows:
        """Returns how the kernels read x as rows."""
        return rows_of(x, tma=self.blocks is hopper_blocks_8bit, contiguous=contiguous)


def for_hopper(products: ModuleType) -> Kernels:
    return Kernels(products, hopper_blocks_8bit, hopper_gradient_8bit)


def portable(products: ModuleType) -> Kernels:
    return Kernels(products, blocks_8bit, gradient_8bit)


def added(total: Tensor | None, part: Tensor) -> Tensor:
    """Adds a chunk's part to the total in place. Returns the part if it is the first."""
    return part if total is None else total.add_(part)


def saves_up_to(call: Call, most: int) -> Reason:
    """Returns why a kernel that saves up to `most` rows cannot serve a call, or None.

    Unlike `operands.saves_rows` it also serves calls without gradients.
    """
    return f"it saves nothing above {most:,} rows" if call.problem["rows"] > most else None
