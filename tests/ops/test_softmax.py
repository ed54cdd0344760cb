"""Softmax: what its gate's cases do not see."""

import pytest
import torch

from tests.ops.on_rows import (
    DEVICE,
    HERE,
    assert_within_budget,
    differentiated,
    drawn,
    kernels_forced,
)
from tnp.dispatch import selection
from tnp.dispatch.spec import Call
from tnp.ops.softmax import OPERATOR, softmax
from tnp.ops.softmax.triton_softmax import BlockConfig

INF = float("inf")
BLOCKS = {f"softmax.{name}": ("blocks", BlockConfig(64, 1)) for name in ("forward", "backward")}


# On both sides of a tile's rows at this width, and one column.
@pytest.mark.parametrize("rows, width", [(1, 60), (33, 60), (13, 1)])
def test_every_kernel_at_ragged_sizes(rows, width):
    inputs = drawn(OPERATOR, rows, width, start=1, magnitude=4.0)
    for forced in kernels_forced(OPERATOR, inputs):
        results = differentiated(OPERATOR, "triton", inputs, forced=forced)
        assert_within_budget(OPERATOR, results, inputs)


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


def test_memory_that_nobody_wrote_is_not_read():
    """PyTorch fills what is allocated with NaN where it is asked for deterministic algorithms."""
    inputs = drawn(OPERATOR, 7, 40)
    expected = differentiated(OPERATOR, "triton", inputs)
    torch.use_deterministic_algorithms(True)
    try:
        for forced in (*kernels_forced(OPERATOR, inputs), BLOCKS):
            results = differentiated(OPERATOR, "triton", inputs, forced=forced)
            torch.testing.assert_close(results, expected)
    finally:
        torch.use_deterministic_algorithms(False)


def test_any_strides_and_expanded_gradients():
    for x in (
        torch.randn(5, 3, 48, device=DEVICE).transpose(0, 1),
        torch.randn(1, 1, 48, device=DEVICE).expand(3, 5, 48),
        torch.randn(3, 48, 5, device=DEVICE).mT,
        torch.randn(2, 5, 3, 48, device=DEVICE).transpose(1, 2),
        torch.randn(48, device=DEVICE),
    ):
        x.requires_grad_()
        results = []
        for name in ("triton", "torch"):
            y = softmax(x, implementation=name)
            results.append((y, *torch.autograd.grad(y.square().sum(), x)))
            into = torch.ones((), device=DEVICE).expand(y.shape)
            results[-1] += torch.autograd.grad(softmax(x, implementation=name), x, into)
        torch.testing.assert_close(*results)


def test_nothing_to_compute():
    for shape in ((0, 5), (5, 0)):
        x = torch.zeros(shape, device=DEVICE, requires_grad=True)
        y = softmax(x, implementation="triton")
        y.sum().backward()
        assert y.shape == x.grad.shape == shape


@pytest.mark.parametrize(
    "x, error, message",
    [
        (torch.tensor(1.0), ValueError, "x has no dimensions"),
        (torch.zeros(2, 3).int(), ValueError, "x is torch.int32: it must be a float dtype"),
        (torch.zeros(2, 3).double(), RuntimeError, "takes .*, not float64"),
    ],
)
def test_refusals(x, error, message):
    with pytest.raises(error, match=message):
        softmax(x, implementation="triton")
