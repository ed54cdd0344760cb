"""Tests cross-entropy in CUDA C++ on this CPU."""

from functools import partial

import pytest
import torch

from tests.lab import emulation
from tests.lab.judging import H200, assert_within_budget, emulates, judged, refused
from tnp.dispatch import devices, launcher, plans
from tnp.gates.poison import Poisoned
from tnp.ops.cross_entropy import IGNORE_INDEX, OPERATOR, reference
from tnp_lab import launch
from tnp_lab.cross_entropy.cuda_cross_entropy import MEAN, ONLINE, THREADS

INF, NAN = float("inf"), float("nan")
refusal = partial(refused, "cross_entropy", "online", rows=9)


def run(*inputs: torch.Tensor) -> tuple:
    """Returns the loss, and m, s and 1 / the number of targets that count."""
    plan = plans.build(OPERATOR, "online", inputs, (), ("logits",), H200)
    with Poisoned():
        (loss,), saved = plan.forward(inputs, ())
    return loss, *saved


def gradient(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    inputs = logits, target
    plan = plans.build(OPERATOR, "online", inputs, (), ("logits",), H200)
    with Poisoned():
        (loss,), saved = plan.forward(inputs, ())
        kept = tuple(plan.kept(inputs, (loss,)))
        return plan.backward((torch.ones(()),), kept, saved, ())[0]


def test_it_refuses_in_a_sentence(here):
    for dtype in ("bfloat16", "float16", "float32"):
        assert refusal(dtype, classes=262_144) is None
        assert refusal(dtype, ("logits",), classes=128_256) is None
    assert "not float64" in refusal("float64", classes=8)
    old = partial(refusal, "bfloat16", classes=8, target=devices.of_capability(75))
    assert old() is None
    assert old(("logits",)) == (
        "its backward pass is Triton's: it needs compute capability 8.0 or newer, this GPU has 7.5"
    )
    assert "7.5 or newer" in refusal("float32", classes=8, target=devices.of_capability(70))


@pytest.mark.parametrize("classes, at_once", [(128_256, 8), (50_257, 1)])
def test_a_block_a_row_and_one_for_the_mean(classes, at_once, here):
    logits = torch.empty(7, classes, dtype=torch.float16, device="meta")
    target, noted = torch.empty(7, dtype=torch.int64, device="meta"), []
    with launcher.watched_others(noted.append):
        run(logits, target)
    assert [(b.kernel, b.grid, b.threads) for b in noted] == [
        (ONLINE, (7,), THREADS), (MEAN, (1,), THREADS)
    ]  # fmt: skip
    assert dict(noted[0].source.constants)["VECTOR"] == at_once


@emulates
@pytest.mark.parametrize("dtype, rows, classes, drawn", [
    ("bfloat16", 3, 128_256, {}),
    ("bfloat16", 5, 50_257, {"ignored": 3}),  # no row but the first starts at 16 bytes
    ("float16", 9, 104, {"ignored": 2}),  # fewer packs than threads
    ("float16", 7, 257, {"magnitude": 50.0}),
    ("bfloat16", 5, 4096, {"padded": 8}),
    ("float32", 5, 1001, {"padded": 2, "masked": 5}),
    ("float32", 5, 4100, {"magnitude": 1e4, "ignored": 4}),
    ("float32", 3, 1, {}),
    ("float32", THREADS + 9, 10, {"ignored": 3}),  # more rows than threads of the mean's block
])  # fmt: skip
def test_it_is_within_its_budget(dtype, rows, classes, drawn, here):
    case = OPERATOR.case(dtype, rows, classes, **drawn)
    assert_within_budget("cross_entropy", "online", case)


@emulates
@pytest.mark.parametrize("dtype, classes, drawn", [
    ("bfloat16", 1001, {"ignored": 3}),
    ("float16", 1024, {"padded": 3}),
    ("float32", 257, {"magnitude": 1e4, "ignored": 2}),
])  # fmt: skip
def test_gradients_are_right_with_the_numbers_that_the_kernel_saves(
    dtype, classes, drawn, here
):  # fmt: skip
    case = OPERATOR.case(dtype, 7, classes, **drawn)
    assert_within_budget("cross_entropy", "online", case, wanted=("logits",))


@emulates
@pytest.mark.parametrize("padded", [16, 3])
def test_logits_and_targets_have_any_strides(padded, here):
    """NaN lies beside the rows, a number that is no class between the targets."""
    padding = torch.full((5, 1000 + padded), NAN)
    rows, targets = padding[:, :1000], torch.full((10,), 1000)[::2]
    rows.copy_(torch.randn(rows.shape))
    targets.copy_(torch.tensor([0, 999, 5, IGNORE_INDEX, 500]))
    for logits in (rows, rows.t().contiguous().t(), rows[:1].expand(5, 1000)):
        exact = reference(logits.double(), targets)
        assert abs(run(logits, targets)[0].double() / exact - 1) < OPERATOR.condition(None, {})


@emulates
def test_a_row_has_the_logarithm_of_its_own_sum(here):
    """The tolerance is some float32 roundings: 2 ulp of expf and logf, and the sums of a row."""
    logits, target = torch.randn(4, 1000) * 30, torch.tensor([1, 2, IGNORE_INDEX, 3])
    _, m, s, per_target = run(logits, target)
    wide = logits.double()
    counted = target != IGNORE_INDEX
    assert (m[counted] == logits.amax(1)[counted]).all()
    exact = (wide - wide.amax(1, True)).exp().sum(1).log()
    torch.testing.assert_close(s.double()[counted], exact[counted], rtol=1e-6, atol=1e-6)
    assert per_target == torch.tensor(1 / 3)


@emulates
def test_infinities_and_nan_equal_pytorchs(here):
    logits = torch.randn(5, 600)
    logits[0, :599] = logits[1] = -INF
    logits[2, 77], logits[3, 599], logits[4] = INF, NAN, -3e38
    target = torch.tensor([599, 0, 5, 6, 7])
    for row in range(5):
        inputs = logits[row : row + 1], target[row : row + 1]
        torch.testing.assert_close(run(*inputs)[0], reference(*inputs), equal_nan=True)


@emulates
def test_ignored_rows_are_not_read_and_no_target_is_nan(here):
    logits, target = torch.randn(3, 40), torch.tensor([1, IGNORE_INDEX, 2])
    expected = reference(logits, target)
    logits[1] = NAN
    torch.testing.assert_close(run(logits, target)[0], expected)
    assert (gradient(logits, target)[1] == 0).all()
    target[:] = IGNORE_INDEX
    assert run(logits, target)[0].isnan() and (gradient(logits, target) == 0).all()


@emulates
@pytest.mark.parametrize("wrong", [40, -1, 2**40])
def test_a_target_that_is_no_class_makes_its_row_nan(wrong, here):
    logits, target = torch.randn(3, 40), torch.tensor([1, wrong, 2])
    assert run(logits, target)[0].isnan()
    assert gradient(logits, target).isnan().all(1).tolist() == [False, True, False]


@emulates
@pytest.mark.parametrize("rows, right, wrong", [
    (9, "total * expf(highest - above) + sum", "total + sum"),
    (9, "total * expf(highest - largest)", "total"),
    (9, "block_reduce<THREADS>(highest, Max(), shared)", "warp_reduce(highest, Max())"),
    (9, "== IGNORE_INDEX ? 0.0f", "== IGNORE_INDEX ? 1.0f"),
    (THREADS + 9, "row < n_rows;", "row < THREADS;"),
])  # fmt: skip
def test_a_fault_in_the_source_exceeds_the_tolerance(
    rows, right, wrong, here, monkeypatch
):  # fmt: skip
    def faulty(source, architecture):
        text = source.path.read_text()
        assert right in text
        return emulation.compiled(source, text.replace(right, wrong, 1))

    monkeypatch.setattr(launch, "loaded", faulty)
    case = OPERATOR.case("float32", rows, 1100, magnitude=5.0, ignored=3)
    found = judged("cross_entropy", "online", case)
    assert any(not ratio <= allowed for _, ratio, allowed in found)
