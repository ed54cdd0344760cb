"""The first embedding layer: what a token is, contracts, what it refuses.

The gate compares it with float64 (`tests.gates.test_operators`).
"""

import pytest
import torch
import torch.nn.functional as F

from tests.ops.opaque import told
from tests.ops.problems import DEVICE, results, setting
from tnp.dispatch import custom_op
from tnp.gates.checks import max_abs_error
from tnp.ops.embedding import GIVEN, OPERATOR, embed_rows

POINTS = ("x_context", "y_context", "x_target")
# Two tasks of five context points and eight targets.
DRAWN = {"batch": 2, "n_context": 5}
SIZES = {"rows": 26, "width": 3, "d_model": 48} | dict.fromkeys(GIVEN, True)


def small():
    return setting(OPERATOR, "fused", draw=DRAWN, **SIZES)


def test_tokens_are_what_the_model_says():
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


def test_no_rows():
    x = torch.zeros(2, 0, 1, device=DEVICE)
    weight = torch.ones(48, 3, device=DEVICE, requires_grad=True)
    out = embed_rows(x, x, x, weight, torch.bfloat16, implementation="fused")
    assert out.shape == (2, 0, 48) and out.dtype == torch.bfloat16
    out.sum().backward()
    assert (weight.grad == 0).all()


@pytest.mark.parametrize("given", ["both", "context", "targets"])
def test_operators_keep_their_contracts(given):
    inputs = small().inputs
    points = [inputs[name] for name in POINTS]
    if given == "context":
        points = [*points[:2], None]
    elif given == "targets":
        points = [None, None, points[2]]
    like = torch.empty(0, dtype=torch.bfloat16, device=DEVICE)
    there = [name for name, x in zip(POINTS, points, strict=True) if x is not None]
    text = told("fused", ["weight"], given=there)
    arguments = (*points, inputs["weight"].requires_grad_(), like, text)
    torch.library.opcheck(custom_op.custom_operator(OPERATOR).differentiable, arguments)


def test_weight_of_any_strides():
    inputs = small().inputs
    points, weight = [inputs[name] for name in POINTS], inputs["weight"]
    results = []
    for same in (weight.clone(), weight.T.contiguous().T):
        out = embed_rows(*points, same.requires_grad_(), torch.float32, implementation="fused")
        results.append((out, *torch.autograd.grad(out.sum(), same)))
    assert all(map(torch.equal, *results))


def test_auto_takes_what_gives_the_gradients_that_are_wanted():
    inputs = small().inputs
    x_context, y_context, x_target = (inputs[name] for name in POINTS)
    x_target.requires_grad_()
    arguments = x_context, y_context, x_target, inputs["weight"], torch.float32
    embed_rows(*arguments, implementation="auto").sum().backward()
    assert x_target.grad is not None
    with pytest.raises(RuntimeError, match="'fused' cannot run here: .* no gradient of x_target"):
        embed_rows(*arguments, implementation="fused")


def test_compiles_in_one_graph():
    problem = small()

    def call(*inputs):
        return embed_rows(*inputs[:4], torch.float32, implementation="fused")

    eager = results(problem, call)
    compiled = results(problem, torch.compile(call, fullgraph=True, backend="aot_eager"))
    for name, x in eager.items():
        assert max_abs_error(compiled[name], x) <= 1e-6, name


def arguments(**change) -> dict:
    return {
        "x_context": torch.zeros(2, 3, 1),
        "y_context": torch.zeros(2, 3, 1),
        "x_target": torch.zeros(2, 4, 1),
        "weight": torch.zeros(8, 3),
        "dtype": torch.float32,
        "implementation": "fused",
    } | change


@pytest.mark.parametrize(
    "change, message",
    [
        ({"y_context": None}, "one of x_context and y_context is None: they must be given"),
        ({"x_context": None, "y_context": None, "x_target": None}, "one of them must be given"),
        ({"weight": torch.zeros(8)}, r"weight has shape \(8,\): it must be"),
        ({"x_target": torch.zeros(2, 4)}, r"x_target has shape \(2, 4\): it must be \[B, N, d_x\]"),
        ({"y_context": torch.zeros(2, 4, 1)}, "they must agree in batch and points"),
        ({"y_context": torch.zeros(2, 3, 2)}, "tokens have 4 features"),
        ({"x_target": torch.zeros(1, 4, 1)}, "they must agree in batch and d_x"),
        (
            {"x_context": None, "y_context": None, "x_target": torch.zeros(2, 4, 3)},
            r"x_target \(2, 4, 3\): weight must be",
        ),
        ({"weight": torch.zeros(8, 3).half()}, "weight is torch.float16: it must be"),
        ({"implementation": "quick"}, "unknown implementation 'quick' of embedding"),
    ],
)
def test_refusals(change, message):
    with pytest.raises(ValueError, match=message):
        embed_rows(**arguments(**change))


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": torch.float64}, "it takes bfloat16, float16, float32, not float64"),
        ({"weight": torch.zeros(8, 3).double()}, "it takes .*, not float64"),
        (
            {"y_context": torch.zeros(2, 3, 7), "weight": torch.zeros(8, 9)},
            r"d_x \+ d_y \+ 1 is 9, and it takes tokens of at most 8 features: choose torch",
        ),
    ],
)
def test_what_fused_refuses(change, reason):
    with pytest.raises(RuntimeError, match=reason):
        embed_rows(**arguments(**change))
    embed_rows(**arguments(**change, implementation="torch"))
