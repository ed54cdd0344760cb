"""Tests SwiGLU, alone and behind RMSNorm: views that are read where they lie, walks, extremes.

The gate compares numbers with float64.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.launched import reads, recorded
from tnp.dispatch import devices, plans, selection
from tnp.dispatch.spec import Call
from tnp.ops._shared.walks import walk
from tnp.ops.rms_norm_swiglu import OPERATOR, reference, rms_norm_swiglu
from tnp.ops.rms_norm_swiglu import triton_rms_norm_swiglu as code
from tnp.ops.swiglu import OPERATOR as SWIGLU
from tnp.ops.swiglu import swiglu

EPS = 1e-5
plain = SWIGLU.reference


def halves(*leading, width=24):
    return torch.randn(*leading, 2 * width).chunk(2, dim=-1)


VIEWS = {
    "halves": lambda: halves(5),
    "halves of a batch": lambda: halves(2, 3),
    "tokens of a batch": lambda: tuple(torch.randn(2, 6, 24)[:, 2:] for _ in range(2)),
    "one row for all": lambda: tuple(torch.randn(1, 24).expand(4, 24) for _ in range(2)),
    "one of each": lambda: (torch.randn(4, 24), torch.randn(4, 48)[:, 24:]),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("normed", [False, True])
def test_views_are_read_where_they_lie(name, normed):
    inputs = *VIEWS[name](), *([torch.randn(24)] if normed else [])
    inputs = [x.detach().requires_grad_() for x in inputs]
    function, formula = (rms_norm_swiglu, reference) if normed else (swiglu, plain)
    want = formula(*inputs, *([EPS] if normed else []))
    dy = torch.randn(want.shape)
    gradients = torch.autograd.grad(want, inputs, dy)
    with recorded() as launches:
        y = function(*inputs, **{"eps": EPS} if normed else {}, implementation="triton")
        found = torch.autograd.grad(y, inputs, dy)
    forward, backward, *sums = launches
    assert reads(forward, *inputs) and reads(backward, *inputs, dy) and len(sums) == normed
    assert all(x.is_contiguous() for x in (y, *found))
    torch.testing.assert_close((y, *found), (want, *gradients))


@pytest.mark.parametrize(
    "tensors",
    [
        tuple(torch.randn(24, 5).T for _ in range(2)),
        tuple(torch.randn(4, 4, 4, 8)[:3, :3, :3] for _ in range(2)),
    ],
    ids=["columns", "three steps"],
)
def test_other_views_are_copied(tensors):
    with recorded() as launches:
        y = swiglu(*tensors, implementation="triton")
    assert not reads(launches[0], tensors[0]) and not reads(launches[0], tensors[1])
    torch.testing.assert_close(y, F.silu(tensors[0]) * tensors[1])


def test_saturated_gates_give_no_nan():
    gate = torch.tensor([[-1e4, -200.0, -90.0, 0.0, 90.0, 1e4]], requires_grad=True)
    up = torch.ones_like(gate, requires_grad=True)
    y = swiglu(gate, up, implementation="triton")
    found = torch.autograd.grad(y.sum(), (gate, up))
    want = F.silu(gate) * up
    torch.testing.assert_close((y, *found), (want, *torch.autograd.grad(want.sum(), (gate, up))))


def test_walks_join_dimensions_one_step_apart():
    x = torch.empty(2, 3, 4, 16)
    assert walk(x, x).flat
    half = torch.empty(2, 3, 4, 32)[..., :16]
    assert (walk(half).n_inner, walk(half).strides) == (24, ((0, 32),))
    part = x[:, 1:]
    assert (walk(part, part).n_inner, walk(part).strides) == (8, ((192, 16),))
    assert not walk(part).flat
    assert walk(x, torch.empty(2, 4, 3, 16).transpose(1, 2)).copied == (False, True)


@pytest.mark.parametrize("kernel", [code.HELD, code.CHUNKS], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("wanted", [("x", "gate", "weight"), ("gate",), ("weight",)])
def test_programs_walk_rows_and_columns(kernel, wanted, monkeypatch):
    """Three programs, each with several groups of rows, the last one short; three chunks."""
    monkeypatch.setattr(code, "CHUNK", 8)
    target = devices.Target("interpreter", multiprocessors=3)
    config = code.BackwardConfig(rows=2, num_warps=1, per_multiprocessor=1, num_stages=1)
    tensors = [torch.randn(n, 21, requires_grad=True) for n in (15, 15)]
    tensors.append(torch.randn(21, requires_grad=True))
    tensors = tuple(tensors)
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
    x, weight = torch.empty(1, 8193), torch.empty(8193)
    call = selection.describe(OPERATOR, (x, x, weight), wanted=("x",))
    assert "at most 8192, not 8193" in code.HELD.refuses(call)
    assert code.CHUNKS.refuses(call) is None


@pytest.mark.parametrize("rows, width, first", [
    (128, 512, (1, 2)), (128, 8192, (1, 32)),  # a program for every row
    (4096, 512, (2, 2)), (4096, 8192, (1, 16)),
])  # fmt: skip
def test_few_rows_of_the_gated_norm_have_a_program_each(rows, width, first):
    problem = OPERATOR.problem("float16", rows=rows, width=width)
    config = code.configs(Call(problem, devices.named("H200")))[0]
    assert (config.rows, config.num_warps) == first
