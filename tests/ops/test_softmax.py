"""Softmax: what its gate's cases do not see."""

import pytest
import torch

from tests.ops.on_rows import (
    DEVICE,
    HERE,
    assert_within_budget,
    differentiated,
    drawn,
)
from tnp.dispatch import selection
from tnp.dispatch.spec import Call
from tnp.ops.softmax import OPERATOR
from tnp.ops.softmax.triton_softmax import BlockConfig

INF = float("inf")
BLOCKS = {f"softmax.{name}": ("blocks", BlockConfig(64, 1)) for name in ("forward", "backward")}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [64, 65, 300])
def test_several_blocks_of_a_row(width, dtype):
    inputs = drawn(OPERATOR, 5, width, dtype, magnitude=8.0)
    results = differentiated(OPERATOR, "triton", inputs, forced=BLOCKS)
    assert_within_budget(OPERATOR, results, inputs)


@pytest.mark.parametrize("width, name", [(16_384, "rows"), (16_385, "blocks"), (128_256, "blocks")])
def test_rows_wider_than_a_program_holds(width, name):
    own = OPERATOR.implementations[-1]
    call = Call(OPERATOR.problem("float32", rows=9, width=width), HERE, ("x",))
    for operation in (own.forward, own.backward):
        assert selection.choose_kernel(operation, OPERATOR, call)[0].name == name


def extremes() -> torch.Tensor:
    """Rows of 130: masked first, middle and last; −∞ alone; one ∞; a NaN; far apart; all equal."""
    x = torch.randn(9, 130, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    x[0, :70] = x[1, 30:100] = x[2, 60:] = x[3] = -INF
    x[4, 77], x[5, 66] = INF, float("nan")
    x[6, 5], x[6, 100], x[7] = 3e38, -3e38, -7.0
    return x


@pytest.mark.parametrize("forced", [None, BLOCKS], ids=["rows", "blocks"])
def test_what_is_not_finite_goes_the_way_of_pytorch(forced):
    inputs = {"x": extremes()}
    ours, own = (
        differentiated(OPERATOR, name, inputs, forced=forced) for name in ("triton", "torch")
    )
    torch.testing.assert_close(ours, own, equal_nan=True)
    assert ours["y"][3:6].isnan().all() and ours["y"][:3].isfinite().all()
