"""Tests LayerNorm in CUDA C++ on this CPU."""

from functools import partial

import pytest
import torch

from tests.lab import emulation
from tests.lab.judging import H200, assert_within_budget, emulates, judged, refused
from tnp.dispatch import devices, launcher, plans
from tnp.gates.checks import error_ratio
from tnp.gates.poison import Poisoned
from tnp.ops.layer_norm import EPS, MAX_WIDTH, OPERATOR, reference
from tnp_lab import launch

refusal = partial(refused, "layer_norm", "one_pass", rows=9)
ALL = ("x", "weight", "bias")


def planned(*inputs: torch.Tensor) -> plans.KernelPlan:
    return plans.build(OPERATOR, "one_pass", inputs, (), (), H200)


def assert_equals_the_formula(*inputs: torch.Tensor) -> None:
    """Compares with float64. The budget is the gate's. Memory that is not written is NaN."""
    with Poisoned():
        y = planned(*inputs).run(inputs, (EPS,))
    exact = reference(*(each.double() for each in inputs), EPS)
    assert y.shape == inputs[0].shape and y.dtype == inputs[0].dtype
    assert error_ratio(y, reference(*inputs, EPS), exact) <= OPERATOR.budget.outputs


def test_it_refuses_in_a_sentence(here):
    for dtype in ("bfloat16", "float16", "float32"):
        assert refusal(dtype, width=MAX_WIDTH) is None
        assert refusal(dtype, ALL, width=MAX_WIDTH) is None
    assert "not float64" in refusal("float64", width=8)
    assert "width 16384 at most, not 16385" in refusal("float32", width=MAX_WIDTH + 1)
    old = partial(refusal, "bfloat16", width=8, target=devices.of_capability(75))
    assert old() is None
    assert old(ALL) == (
        "its backward pass is Triton's: it needs compute capability 8.0 or newer, this GPU has 7.5"
    )
    assert "7.5 or newer" in refusal("float32", width=8, target=devices.of_capability(70))


@pytest.mark.parametrize("rows, width, blocks, threads, at_once", [
    (9, 512, 3, 128, 8),  # a row is a warp's, four of them a block's
    (9, 768, 9, 64, 8),
    (9, 16_384, 9, 1024, 8),
    (9, 513, 9, 64, 1),
])  # fmt: skip
def test_one_launch_reads_16_bytes_at_once_where_it_can(
    rows, width, blocks, threads, at_once, here
):  # fmt: skip
    x, weight, bias = (torch.empty(*s, device="meta") for s in [(rows, width), (width,), (width,)])
    noted = []
    with launcher.watched_others(noted.append):
        planned(x.half(), weight, bias).run((x.half(), weight, bias), (EPS,))
    (bound,) = noted
    assert (bound.grid, bound.threads) == ((blocks,), threads)
    assert dict(bound.source.constants)["VECTOR"] == at_once


@emulates
@pytest.mark.parametrize("dtype, rows, width, drawn", [
    ("float16", 9, 64, {}),  # rows that share blocks, the last of which is not full
    ("bfloat16", 9, 100, {"batch": 3, "start": 1}),  # strided, and not at multiples of 16 bytes
    ("bfloat16", 2, 1288, {}),  # packs of 16 bytes, some threads without their last one
    ("bfloat16", 2, 16_384, {}),
    ("float32", 3, 1, {}),
    ("float32", 5, 1100, {"batch": 5, "start": 2}),
    ("float32", 2, 1000, {"offset": 100.0}),
    ("float32", 2, 4100, {"offset": 1e4}),
    ("float32", 2, 768, {"magnitude": 1e-3}),
])  # fmt: skip
def test_it_is_within_its_budget(dtype, rows, width, drawn, here):
    assert_within_budget("layer_norm", "one_pass", OPERATOR.case(dtype, rows, width, **drawn))


@emulates
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradients_are_right_with_the_statistics_that_the_kernel_saves(dtype, here):
    case = OPERATOR.case(dtype, 9, 100, batch=3, start=1)
    assert_within_budget("layer_norm", "one_pass", case, wanted=ALL)


@emulates
@pytest.mark.parametrize("start, width", [(8, 40), (1, 40), (0, 39)])
def test_numbers_beside_a_view_are_not_read(start, width, here):
    """Rows lie among NaN. Some start, or end, between multiples of 16 bytes."""
    whole = torch.full((2, 10, 56), float("nan")).half()
    x = whole[..., start : start + width]
    x.copy_(torch.randn(x.shape))
    assert_equals_the_formula(x, torch.randn(width), torch.randn(width))


@emulates
def test_x_and_parameters_have_any_strides_and_dtypes(here):
    x = torch.randn(64, 9).bfloat16().t()
    strided, shifted = torch.randn(128)[::2], torch.randn(65)[1:]
    assert_equals_the_formula(x, strided.bfloat16(), shifted)
    assert_equals_the_formula(x.contiguous(), strided, shifted)
    assert_equals_the_formula(x.contiguous(), strided.double(), strided.half())


@emulates
def test_infinities_and_nan_stay_in_their_row(here):
    x, weight, bias = torch.randn(6, 130), torch.randn(130), torch.randn(130)
    x[1, 77], x[2, 0], x[4, 129] = float("inf"), -float("inf"), float("nan")
    y = planned(x, weight, bias).run((x, weight, bias), (EPS,))
    torch.testing.assert_close(y, reference(x, weight, bias, EPS), equal_nan=True)
    assert y.isnan().all(1).tolist() == [False, True, True, False, True, False]


@emulates
@pytest.mark.parametrize("right, wrong", [
    ("held[u][j] - center : 0.0f", "held[u][j] - center : -center"),
    ("block_reduce<THREADS>(squares, Sum(), shared) / width",
     "(block_reduce<THREADS>(squares, Sum(), shared) / width + 1e-3f)"),
    ("+ b.at[k]", "+ b.at[0]"),
    ("squares += held[u][j] * held[u][j];",
     "squares += (held[u][j] + center) * (held[u][j] + center) - center * center;"),
    ("rstd[row] = scale", "rstd[row] = scale * scale"),
])  # fmt: skip
def test_a_fault_in_the_source_exceeds_the_tolerance(right, wrong, here, monkeypatch):
    def faulty(source, architecture):
        text = source.path.read_text()
        assert right in text
        return emulation.compiled(source, text.replace(right, wrong, 1))

    monkeypatch.setattr(launch, "loaded", faulty)
    case = OPERATOR.case("float32", 3, 1000, offset=1e3)
    found = judged("layer_norm", "one_pass", case, wanted=ALL)
    assert any(not ratio <= allowed for _, ratio, allowed in found)
