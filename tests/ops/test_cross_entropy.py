"""Tests cross-entropy of logits and of a linear layer: extremes, ignored targets, memory."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tnp.dispatch import devices, plans
from tnp.dispatch.launcher import Bound
from tnp.gates.checks import error_ratio
from tnp.ops.cross_entropy import cross_entropy
from tnp.ops.linear_cross_entropy import OPERATOR, linear_cross_entropy
from tnp.ops.linear_cross_entropy.triton_linear_cross_entropy import CONFIGS, ChunkConfig

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IGNORED = -100


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE)


def classes(n: int, v: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(v, (n,), generator=generator).to(DEVICE)


def differentiated(compute, leaves, target, implementation, factor=0.7):
    """Returns the loss, and the gradients of a multiple of it."""
    leaves = [x.detach().requires_grad_() for x in leaves]
    loss = compute(*leaves, target, implementation=implementation)
    return loss.detach(), *torch.autograd.grad(factor * loss, leaves)


def check(compute, leaves, target, floor=5e-7) -> None:
    """Asserts an error of at most twice PyTorch's for the loss, three times for gradients."""
    ours, own = (differentiated(compute, leaves, target, name) for name in ("triton", "torch"))
    exact = differentiated(compute, [x.double() for x in leaves], target, "torch")
    for at, (mine, theirs, right) in enumerate(zip(ours, own, exact, strict=True)):
        assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
        allowed = floor * right.norm().item()
        assert error_ratio(mine, theirs, right, allowed) <= (3.0 if at else 2.0), at


@pytest.mark.parametrize("shift", [0.0, 1e4, -1e4])
@pytest.mark.parametrize("magnitude", [1.0, 1e3, 1e6])
def test_extreme_logits(shift, magnitude):
    check(cross_entropy, [normal(9, 130) * magnitude + shift], classes(9, 130))


def test_classes_that_cannot_be():
    """−inf, and the least number that masks are made of, where all of a block is masked."""
    for least in (float("-inf"), torch.finfo(torch.float32).min):
        logits, target = normal(3, 5000), classes(3, 700) + 4200
        logits[:, :4200] = least
        ours, own = (
            differentiated(cross_entropy, [logits], target, x) for x in ("triton", "torch")
        )
        for mine, theirs in zip(ours, own, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-7)
    alike = torch.full((2, 300), torch.finfo(torch.float32).min, device=DEVICE)
    loss = cross_entropy(alike, classes(2, 300), implementation="triton")
    assert loss.item() == pytest.approx(math.log(300))


def test_infinities_and_nan_are_not_hidden():
    for bad in (float("nan"), float("inf")):
        logits = normal(3, 50)
        logits[1, 7] = bad
        assert not cross_entropy(logits, classes(3, 50), implementation="triton").isfinite()


@pytest.mark.parametrize("some", [True, False])
def test_ignored_targets_have_no_gradient(some):
    """NaN and gradients of 0 where none counts."""
    target = classes(9, 50)
    target[: 4 if some else 9] = IGNORED
    logits, x, weight = normal(9, 50), normal(9, 8), normal(50, 8)
    for compute, leaves in ((cross_entropy, [logits]), (linear_cross_entropy, [x, weight])):
        ours, own = (differentiated(compute, leaves, target, y) for y in ("triton", "torch"))
        assert ours[0].isnan() == (not some)
        assert (ours[1][:4] == 0).all()
        for mine, theirs in zip(ours, own, strict=True):
            torch.testing.assert_close(mine, theirs, equal_nan=True)


def test_a_scaled_loss_keeps_float16s_gradients():
    """Gradients of 1e-7 a logit: float16 rounds them to 0 unless the scale comes first."""
    logits, target = normal(64, 600).half(), classes(64, 600)
    x, weight = normal(64, 16).half(), (normal(600, 16) / 4).half()
    for compute, leaves in ((cross_entropy, [logits]), (linear_cross_entropy, [x, weight])):
        exact = differentiated(compute, [y.double() for y in leaves], target, "torch", 2.0**14)
        ours = differentiated(compute, leaves, target, "triton", 2.0**14)
        for mine, right in zip(ours[1:], exact[1:], strict=True):
            assert (mine.double() - right).norm() <= 2e-3 * right.norm()


def test_the_backward_pass_can_run_twice():
    x, weight = (y.requires_grad_() for y in (normal(9, 8), normal(50, 8)))
    loss = linear_cross_entropy(x, weight, classes(9, 50), implementation="triton")
    once = torch.autograd.grad(loss, (x, weight), retain_graph=True)
    again = torch.autograd.grad(2.0 * loss, (x, weight))
    for one, two in zip(once, again, strict=True):
        torch.testing.assert_close(2.0 * one, two)


def test_rows_of_a_chunk():
    config = ChunkConfig(4096, 16, 3, 2**30, 128)
    assert config.rows(16_384, 128_256 * 2) == 4096
    assert config.rows(100, 128_256 * 2) == 128
    assert config.rows(4224, 128_256 * 2) == 2176  # two that are nearly equal
    for config in CONFIGS:
        assert config.multiple % 4 == 0


class Allocations(TorchDispatchMode):
    """Records the bytes of each tensor that is made, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: list[int] = []
        self.known: dict[int, object] = {}  # kept, so that no address comes twice

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for x in args:
            if isinstance(x, torch.Tensor):
                self.known[x.untyped_storage()._cdata] = x
        result = function(*args, **(kwargs or {}))
        if result.untyped_storage()._cdata not in self.known:
            self.known[result.untyped_storage()._cdata] = result
            self.bytes.append(result.untyped_storage().nbytes())
        return result


def test_no_more_memory_than_a_chunk(monkeypatch):
    """16,384 rows of 128,256 classes in bfloat16: beside the gradients less than 1.2 GB."""
    n, d, v = 16_384, 4096, 128_256
    monkeypatch.setattr(Bound, "__call__", lambda *_: None)
    problem = OPERATOR.problem("bfloat16", rows=n, width=d, classes=v)
    new = {"dtype": torch.bfloat16, "device": "meta"}
    x, weight = torch.empty(n, d, **new), torch.empty(v, d, **new)
    inputs = x, weight, torch.empty(n, dtype=torch.int64, device="meta")
    plan = plans.build(
        OPERATOR, "triton", inputs, (), ("x", "weight"), devices.named("NVIDIA H200")
    )
    assert plan.what.problem == problem
    with Allocations() as forward:
        (loss,), saved = plan.forward(inputs, ())
    gradients = 2 * (n + v) * d
    assert 1.0e9 < sum(forward.bytes) - gradients < 1.2e9
    assert max(forward.bytes) < n * v  # half of the logits
    with Allocations() as backward:
        plan.backward((loss,), (), saved, ())
    assert sum(backward.bytes) == gradients < 1.2e9  # what was saved is extra meanwhile


def test_pytorchs_form_is_pytorchs():
    logits, target = normal(9, 50), classes(9, 50)
    assert torch.equal(cross_entropy(logits, target), F.cross_entropy(logits, target))
