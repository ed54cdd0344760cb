"""Gives inputs, results by name, and our implementations to tests of attention's kinds."""

import math

import pytest
import torch

from tests.ops.problems import DEVICE
from tnp.dispatch.spec import OWN
from tnp.ops.attention import OPERATOR, attention

OURS = [x.name for x in OPERATOR.implementations if x.provider == OWN and x.chosen_from]
ours = pytest.mark.parametrize("implementation", OURS)
NAMES = ("o", "dq", "dk", "dv")
N = 50  # more than a tile of any kernel in float32
HEAD_DIM = 16
SCALE = 1 / math.sqrt(HEAD_DIM)


def draw(n_q: int = N, n_k: int = N, heads=(2, 2), batch: int = 1) -> list[torch.Tensor]:
    """Returns q, k, v and do."""
    generator = torch.Generator().manual_seed(n_q + n_k)
    sizes = ((heads[0], n_q), (heads[1], n_k), (heads[1], n_k), (heads[0], n_q))
    return [
        torch.randn(batch, *size, HEAD_DIM, generator=generator).to(DEVICE) for size in sizes
    ]  # fmt: skip


def run(inputs, function=attention, **asked) -> dict[str, torch.Tensor]:
    """Returns o, dq, dk, dv of (q, k, v, do), by name."""
    *leaves, do = (x.detach() for x in inputs)
    leaves = [x.requires_grad_() for x in leaves]
    o = function(*leaves, **asked)
    return dict(zip(NAMES, (o.detach(), *torch.autograd.grad(o, leaves, do)), strict=True))


def assert_close(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        torch.testing.assert_close(
            found[name], x, rtol=1e-4, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
        )


def cu_seqlens(lengths) -> torch.Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return ends.to(DEVICE, torch.int32)
