"""The norm with its linear layer: configurations, views, and what it is made of.

The gate compares it with float64 (`tests.gates.test_operators`).
"""

import torch

from tests.ops.problems import DEVICE
from tnp.dispatch.spec import Case
from tnp.ops._shared.random_values import Random
from tnp.ops.rms_norm import add_rms_norm
from tnp.ops.rms_norm_linear import OPERATOR, rms_norm_linear


def drawn(dtype: str, rows: int, width: int, n_out: int, **draw) -> tuple[torch.Tensor, ...]:
    case = Case(OPERATOR.problem(dtype, rows=rows, width=width, n_out=n_out), tuple(draw.items()))
    return tuple(OPERATOR.draw(case, Random(case, DEVICE)).values())


def test_the_sum_is_that_of_the_norm_alone():
    """Rounded before it is normalized, to the same bits."""
    x, update, norm_weight, weight = drawn("bfloat16", 6, 48, 24, batch=2)
    total, _ = rms_norm_linear(x, update, norm_weight, weight, implementation="triton")
    expected, _ = add_rms_norm(x, update, norm_weight, implementation="fused")
    assert torch.equal(total, expected)
