"""Tests sums of rows in cases that their gate does not have, and in CUDA C++ on this CPU."""

import pytest
import torch

from tests.lab.judging import H200, assert_within_budget, emulates
from tests.ops.problems import DEVICE
from tnp.dispatch import launcher, plans, selection
from tnp.dispatch.spec import Call
from tnp.gates.checks import error_ratio
from tnp_lab.row_sum import LANES, OPERATOR, reference, row_sum
from tnp_lab.row_sum.triton_row_sum import Config

IN_CUDA = ("tree", "shuffles")


def summed(x: torch.Tensor, name: str = "triton", config: Config | None = None) -> torch.Tensor:
    """Returns the sums by a kernel with this configuration, or with its default."""
    forced = {"row_sum.forward": ("triton", config)} if config else None
    target = None if name == "triton" else H200
    return plans.build(OPERATOR, name, (x,), (), (), target, forced).run((x,), ())


def ratio(y: torch.Tensor, x: torch.Tensor) -> float:
    exact = reference(x.double())
    floor = OPERATOR.condition(None, {"x": x}) * exact.norm().item()
    return error_ratio(y, reference(x), exact, floor)


def test_a_program_walks_down_a_row():
    """The shared test has the other configurations. The budget is that of LANES sums."""
    x = torch.randn(33, 2050, device=DEVICE)
    assert ratio(summed(x, config=Config(LANES, 2, 1)), x) <= OPERATOR.budget.outputs


def test_infinities_and_nan_are_summed_as_pytorch_does():
    x = torch.randn(3, 130, device=DEVICE)
    x[0, 77], x[1, 66] = -float("inf"), float("nan")
    torch.testing.assert_close(summed(x), x.sum(-1), equal_nan=True)


def test_the_result_is_in_float32_or_as_wide_as_x():
    for name in ("torch", "triton"):
        y = row_sum(torch.full((2, 300), 300.0, device=DEVICE).half(), implementation=name)
        assert y.dtype == torch.float32 and y.tolist() == [9e4, 9e4]
    assert row_sum(torch.ones(2, 3).double()).dtype == torch.float64


@pytest.mark.parametrize(
    "x, error, message",
    [
        (torch.tensor(1.0), ValueError, "x has no dimensions"),
        (torch.zeros(2, 3).int(), ValueError, "x is torch.int32: it must be a float dtype"),
        (torch.zeros(2, 3).requires_grad_(), ValueError, "x asks for a gradient and row_sum gives"),
        (torch.zeros(2, 3).double(), RuntimeError, "takes .*, not float64"),
    ],
)
def test_refusals(x, error, message):
    with pytest.raises(error, match=message):
        row_sum(x, implementation="triton")
    with torch.no_grad():
        assert row_sum(torch.ones(2, 3, requires_grad=True)).tolist() == [3, 3]


# --------------------------------------------------------------------------------------- CUDA C++


@emulates
@pytest.mark.parametrize("name, dtype, rows, width, kind", [
    ("tree", "bfloat16", 3, 1000, {"apart": 100.0}),
    ("tree", "bfloat16", 2, 32_768, {}),
    ("shuffles", "float16", 9, 100, {"batch": 3, "start": 1}),  # strided, and not aligned
    ("shuffles", "float16", 3, 1, {}),
])  # fmt: skip
def test_cuda_is_within_its_budget(name, dtype, rows, width, kind, here):
    assert_within_budget("row_sum", name, OPERATOR.case(dtype, rows, width, **kind))


@pytest.mark.parametrize("name", IN_CUDA)
def test_a_block_a_row_and_never_chosen_but_by_its_name(name, here):
    noted = []
    with launcher.watched_others(noted.append):
        summed(torch.empty(7, 800, dtype=torch.float16, device="meta"), name)
    (bound,) = noted
    assert (bound.grid, bound.threads) == ((7,), LANES)
    assert dict(bound.source.constants)["VECTOR"] == 8
    for case in OPERATOR.cases(H200):
        chosen, _ = selection.choose_implementation(OPERATOR, "auto", Call(case.problem, H200))
        assert chosen.name not in IN_CUDA
