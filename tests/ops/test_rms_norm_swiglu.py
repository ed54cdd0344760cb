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
