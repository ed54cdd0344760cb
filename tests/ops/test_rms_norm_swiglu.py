"""RMSNorm with SwiGLU: errors, views, gradients alone. The operators' gate compares its numbers."""

import pytest
import torch

from tests.ops.launched import reads, recorded
from tnp import plans, targets
from tnp.ops.rms_norm_swiglu import OPERATOR, reference, rms_norm_swiglu

EPS = 1e-5


def draw(*leading, width=24, weight=torch.float32):
    x, gate = torch.randn(*leading, 2 * width).chunk(2, dim=-1)
    weight = torch.randn(width).to(weight)
    return x.requires_grad_(), gate.requires_grad_(), weight.requires_grad_()


def ours(*tensors, eps=EPS):
    return rms_norm_swiglu(*tensors, eps=eps, implementation="triton")


@pytest.mark.parametrize("leading", [(5,), (2, 3), ()])
def test_halves_are_read_where_they_lie(leading):
    x, gate, weight = draw(*leading)
    want = reference(x, gate, weight, EPS)
    dy = torch.randn(want.shape)
    with recorded() as launches:
        y = ours(x, gate, weight)
        found = torch.autograd.grad(y, (x, gate, weight), dy)
    forward, backward, _sum = launches
    assert reads(forward, x, gate, weight) and reads(backward, dy, x, gate, weight)
    assert all(one.is_contiguous() for one in (y, *found))
    wanted = torch.autograd.grad(want, (x, gate, weight), dy)
    torch.testing.assert_close((y, *found), (want, *wanted))


@pytest.mark.parametrize("name", ["x", "gate", "weight"])
def test_one_gradient_alone(name):
    tensors = dict(zip(("x", "gate", "weight"), (t.detach() for t in draw(7)), strict=True))
    tensors[name].requires_grad_()
    with recorded() as launches:
        (found,) = torch.autograd.grad(ours(*tensors.values()).sum(), tensors[name])
    (want,) = torch.autograd.grad(reference(*tensors.values(), EPS).sum(), tensors[name])
    torch.testing.assert_close(found, want)
    assert len(launches) == (3 if name == "weight" else 2)  # partials of the weight alone


def test_partials_of_several_programs_add_up_in_one_order(monkeypatch):
    target = targets.Target("interpreter", multiprocessors=3)
    monkeypatch.setattr(targets, "INTERPRETER", target)
    monkeypatch.setattr(targets, "_seen", {})
    monkeypatch.setattr(plans.plans(OPERATOR), "by_key", {})
    x, gate, weight = draw(700, width=16)
    with recorded() as launches:
        first, again = (torch.autograd.grad(ours(x, gate, weight).sum(), weight) for _ in range(2))
    partials = launches[2][0]
    assert len(partials) > 1
    want = torch.autograd.grad(reference(x, gate, weight, EPS).sum(), weight)
    torch.testing.assert_close(first, want, atol=1e-4, rtol=1e-5)
    assert torch.equal(first[0], again[0])


def test_a_weight_of_any_dtype_and_stride_gets_a_gradient_like_itself():
    x, gate, _ = draw(4)
    weight = torch.randn(48).to(torch.bfloat16)[::2].requires_grad_()
    (found,) = torch.autograd.grad(ours(x, gate, weight).sum(), weight)
    (want,) = torch.autograd.grad(reference(x, gate, weight, EPS).sum(), weight)
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found, want, atol=2e-2, rtol=1e-2)


def test_eps_is_part_of_every_call():
    x, gate, weight = draw(2)
    for eps in (1e-5, 10.0):
        torch.testing.assert_close(ours(x, gate, weight, eps=eps), reference(x, gate, weight, eps))


def test_compiled_with_dynamic_sizes():
    function = torch.compile(ours, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 6):
        tensors = draw(rows)
        found = torch.autograd.grad(function(*tensors).sum(), tensors)
        want = torch.autograd.grad(reference(*tensors, EPS).sum(), tensors)
        torch.testing.assert_close(found, want)


def test_errors_say_what_would_be_right():
    x, gate, weight = draw(3)
    with pytest.raises(ValueError, match=r"gate torch.float32 \(2, 24\) .*: they must be equal"):
        ours(x, gate[:2], weight)
    with pytest.raises(ValueError, match=r"weight \(12,\): they must be \[..., width\] and"):
        ours(x, gate, weight[:12])
    with pytest.raises(ValueError, match="weight is torch.int64: it must be a float dtype"):
        ours(x, gate, torch.ones(24, dtype=torch.int64))
    for eps in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="it must be positive and finite"):
            ours(x, gate, weight, eps=eps)
    wide = torch.zeros(1, 16385)
    with pytest.raises(RuntimeError, match="rows of at most 16384, not 16385"):
        ours(wide, wide, wide[0])
