"""SwiGLU: what is read where it lies. Its numbers are compared by the operators' gate, its routes
in test_dispatch.py.
"""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.launched import reads, recorded
from tnp.ops._shared.walks import walk
from tnp.ops.swiglu import swiglu


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
def test_views_are_read_where_they_lie(name):
    gate, up = (x.requires_grad_() for x in VIEWS[name]())
    want = F.silu(gate) * up
    dy = torch.randn(want.shape)
    gradients = torch.autograd.grad(want, (gate, up), dy)
    with recorded() as launches:
        y = swiglu(gate, up, implementation="triton")
        found = torch.autograd.grad(y, (gate, up), dy)
    forward, backward = launches
    assert reads(forward, gate, up)
    assert reads(backward, gate, up, dy)
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


def test_walks_join_what_lies_one_step_apart():
    x = torch.empty(2, 3, 4, 16)
    assert walk(x, x).flat
    half = torch.empty(2, 3, 4, 32)[..., :16]
    assert (walk(half).n_inner, walk(half).strides) == (24, ((0, 32),))
    part = x[:, 1:]
    assert (walk(part, part).n_inner, walk(part).strides) == (8, ((192, 16),))
    assert not walk(part).flat
    assert walk(x, torch.empty(2, 4, 3, 16).transpose(1, 2)).copied == (False, True)
