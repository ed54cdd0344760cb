"""RMSNorm with SwiGLU: errors, views, gradients alone. The operators' gate compares its numbers."""

import pytest
import torch

from tests.ops.launched import reads, recorded
from tnp.dispatch import devices, plans, selection
from tnp.ops.rms_norm_swiglu import OPERATOR, reference, rms_norm_swiglu
from tnp.ops.rms_norm_swiglu import triton_rms_norm_swiglu as code

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


@pytest.mark.parametrize("kernel", [code.HELD, code.CHUNKS], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("wanted", [("x", "gate", "weight"), ("x",), ("gate",), ("weight",)])
def test_programs_walk_rows_and_columns(kernel, wanted, monkeypatch):
    """Three programs, each with several groups of rows, the last one short; three chunks."""
    monkeypatch.setattr(code, "CHUNK", 8)
    target = devices.Target("interpreter", multiprocessors=3)
    config = code.BackwardConfig(rows=2, num_warps=1, per_multiprocessor=1, num_stages=1)
    tensors = draw(15, width=21)
    forced = {"rms_norm_swiglu.backward": (kernel.name, config)}
    plan = plans.build(OPERATOR, "triton", tensors, (), wanted, target, forced)
    with torch.no_grad():
        outputs, saved = plan.forward(tensors, (EPS,))
    dy = torch.randn(15, 21)
    kept = plan.kept(tensors, outputs)
    with recorded() as launches:
        found = plan.backward((dy,), kept, saved, (EPS,))
        again = plan.backward((dy,), kept, saved, (EPS,))
    if "weight" in wanted:
        assert len(launches[1][0]) == 3  # partials
    want = torch.autograd.grad(reference(*tensors, EPS), tensors, dy)
    for name, one, other, right in zip(OPERATOR.tensors, found, again, want, strict=True):
        if name in wanted:
            torch.testing.assert_close(one, right)
            assert torch.equal(one, other)
        else:
            assert one is None


def test_wide_rows_are_read_by_columns():
    call = selection.describe(OPERATOR, draw(1, width=8193), wanted=("x",))
    assert "at most 8192, not 8193" in code.HELD.refuses(call)
    assert code.CHUNKS.refuses(call) is None


def test_eps_is_part_of_every_call():
    x, gate, weight = draw(2)
    for eps in (1e-5, 10.0):
        torch.testing.assert_close(ours(x, gate, weight, eps=eps), reference(x, gate, weight, eps))
