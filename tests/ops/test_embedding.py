"""Tests the first embedding layer: tokens, resolution, gradients of points.

The gate compares it with float64 (`tests.gates.test_operators`).
"""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.problems import DEVICE, setting
from tnp.gates.checks import max_abs_error
from tnp.ops.embedding import GIVEN, OPERATOR, embed_rows

POINTS = ("x_context", "y_context", "x_target")
# Two tasks of five context points and eight targets.
DRAWN = {"batch": 2, "n_context": 5}
SIZES = {"rows": 26, "width": 3, "d_model": 48} | dict.fromkeys(GIVEN, True)


def small():
    return setting(OPERATOR, "fused", draw=DRAWN, **SIZES)


def test_tokens_are_those_of_the_model():
    """Context rows are (x, y, −1), target rows (x, 0, +1), whichever of them is given."""
    inputs = small().inputs
    x_context, y_context, x_target = (inputs[name] for name in POINTS)
    weight = inputs["weight"]
    context = torch.cat([x_context, y_context, -torch.ones_like(x_context)], -1)
    target = torch.cat([x_target, torch.zeros_like(x_target), torch.ones_like(x_target)], -1)
    expected = F.silu(torch.cat([context, target], 1) @ weight.T)
    for name in ("torch", "fused"):
        both = embed_rows(
            x_context, y_context, x_target, weight, torch.float32, implementation=name
        )
        torch.testing.assert_close(both, expected)
        alone = (
            embed_rows(x_context, y_context, None, weight, torch.float32, implementation=name),
            embed_rows(None, None, x_target, weight, torch.float32, implementation=name),
        )
        assert max_abs_error(torch.cat(alone, 1), both) <= 1e-6


def test_neighbouring_pixels_stay_apart():
    """The layer runs in float32: x 1/1024 apart near 1, which bfloat16 merges."""
    x = torch.tensor([0.99, 0.99 + 1 / 1024], device=DEVICE).reshape(1, 2, 1)
    weight = torch.tensor([[1000.0, 0.0, -990.0]], device=DEVICE)
    out = embed_rows(None, None, x, weight, torch.bfloat16, implementation="fused")
    exact = F.silu(torch.tensor([0.0, 1000 / 1024]))
    torch.testing.assert_close(out.flatten().cpu().float(), exact, atol=4e-3, rtol=0.0)


def test_auto_gives_every_requested_gradient():
    inputs = small().inputs
    x_context, y_context, x_target = (inputs[name] for name in POINTS)
    x_target.requires_grad_()
    arguments = x_context, y_context, x_target, inputs["weight"], torch.float32
    embed_rows(*arguments, implementation="auto").sum().backward()
    assert x_target.grad is not None
    with pytest.raises(RuntimeError, match="'fused' cannot run here: .* no gradient of x_target"):
        embed_rows(*arguments, implementation="fused")
