"""Tests the linear layer with GELU in CUDA C++ on this CPU."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from tests.lab import emulation
from tests.lab.judging import H200, assert_within_budget, emulates, judged, refused
from tnp.dispatch import devices, launcher, plans
from tnp.gates.checks import error_ratio
from tnp.gates.poison import Poisoned
from tnp.ops.products import GELU_LINEAR
from tnp_lab import launch, nvrtc
from tnp_lab.gelu_linear.cuda_gelu_linear import as_read

refusal = partial(refused, "gelu_linear", "wmma", rows=9, n_in=8, n_out=8)
# Two tiles of rows and of columns, neither full, and three steps along n_in.
RAGGED = ("float16", 130, 70, 140)


def planned(*inputs: torch.Tensor) -> plans.KernelPlan:
    return plans.build(GELU_LINEAR, "wmma", inputs, (), (), H200)


def test_it_refuses_in_a_sentence(here):
    assert refusal("float16") is None and refusal("bfloat16", ("weight",)) is None
    assert "not float32" in refusal("float32")
    old = partial(refusal, target=devices.of_capability(75))
    assert old("float16") is None
    assert "bfloat16 from compute capability 8.0" in old("bfloat16")
    assert "its backward pass is Triton's" in old("float16", ("x",))
    assert "7.5 or newer" in refusal("float16", target=devices.of_capability(70))


def test_one_launch_has_a_block_for_each_tile(here):
    x, weight, bias = (
        torch.empty(*shape, device="meta") for shape in [(257, 64), (129, 64), (129,)]
    )
    noted = []
    with launcher.watched_others(noted.append):
        planned(x.half(), weight, bias).run((x.half(), weight, bias), ())
    (bound,) = noted
    assert (bound.grid, bound.threads) == ((3 * 2,), 256)


def test_only_rows_that_cannot_be_read_as_they_are_become_copies():
    x = torch.randn(9, 80).half()
    for read in (x, x[:, 8:72], x[2:]):
        assert as_read(read) is read
    for copied in (x.t(), x[:, 1:65], x[:, :70], x[:1, :64].expand(9, 64)):
        assert (as_read(copied)[:, : copied.shape[1]] == copied).all()
        assert as_read(copied).is_contiguous() and as_read(copied).shape[1] % 8 == 0


@emulates
@pytest.mark.parametrize("dtype, rows, n_in, n_out, kind", [
    (*RAGGED, {}),
    ("bfloat16", 20, 64, 136, {"half": True}),  # packs of 16 bytes, some past the last column
    ("bfloat16", 1, 1, 1, {}),
])  # fmt: skip
def test_it_is_within_its_budget(dtype, rows, n_in, n_out, kind, here):
    assert_within_budget("gelu_linear", "wmma", GELU_LINEAR.case(dtype, rows, n_in, n_out, **kind))


@emulates
def test_gradients_are_right_with_the_z_that_the_kernel_saves(here):
    case = GELU_LINEAR.case("float16", 17, 24, 40)
    assert_within_budget("gelu_linear", "wmma", case, wanted=("x", "weight", "bias"))


@emulates
@pytest.mark.parametrize("start, n_in", [(8, 40), (1, 40), (0, 39)])
def test_numbers_beside_a_view_are_not_read(start, n_in, here):
    """Rows lie among NaN. Some start, or end, between multiples of 16 bytes."""
    whole = torch.full((2, 10, 56), float("nan")).half()
    x = whole[..., start : start + n_in]
    x.copy_(torch.randn(x.shape))
    weight = torch.full((n_in, 24), float("nan")).half().t()[::2]  # with contiguous columns
    weight.copy_(torch.randn(weight.shape) / n_in**0.5)
    inputs = (x, weight, torch.randn(24)[::2])
    with Poisoned():
        y = planned(*inputs).run(inputs, ())
    exact = GELU_LINEAR.reference(*(each.double() for each in inputs))
    assert y.shape == (2, 10, 12)
    assert error_ratio(y, GELU_LINEAR.reference(*inputs), exact) <= GELU_LINEAR.budget.outputs


@emulates
def test_large_numbers_infinities_and_nan_equal_pytorchs(here):
    large = [1e4, -1e4, 1e30, -1e30, float("inf"), -float("inf"), float("nan"), -0.0]
    x, weight, bias = torch.zeros(1, 8).bfloat16(), torch.zeros(8, 8), torch.tensor(large)
    y = planned(x, weight, bias).run((x, weight, bias), ())
    expected = F.gelu(bias.bfloat16(), approximate="tanh")
    torch.testing.assert_close(y[0], expected, equal_nan=True)


@emulates
@pytest.mark.parametrize("right, wrong", [
    ("__pipeline_wait_prior(0)", "__pipeline_wait_prior(1)"),
    ("__syncthreads();  // sums", "// sums"),
    ("0.044715f", "0.44715f"),
])  # fmt: skip
def test_a_fault_in_the_source_exceeds_the_tolerance(right, wrong, here, monkeypatch):
    def faulty(source: nvrtc.Source, architecture: str) -> launch.Launch:
        text = source.path.read_text()
        assert right in text
        return emulation.compiled(source, text.replace(right, wrong, 1))

    monkeypatch.setattr(launch, "loaded", faulty)
    found = judged("gelu_linear", "wmma", GELU_LINEAR.case(*RAGGED))
    # `not <=`, because NaN fails too
    assert any(not ratio <= allowed for _, ratio, allowed in found)
