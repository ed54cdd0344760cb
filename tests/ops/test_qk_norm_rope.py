"""QK-norm and rotary embedding in one: formula, rounding, launches, routes. The operators' gate
compares numbers with float64.
"""

import pytest
import torch

from tests.ops.launched import reads, recorded
from tests.ops.test_rope import draw, tables
from tnp.ops.rope import PAIRINGS, QK_NORM_ROPE, qk_norm_rope

NAMES = QK_NORM_ROPE.differentiated


def drawn(*sizes, dtype=torch.float32, n_positions=None):
    """All but positions, whose gradients are asked for but of the tables."""
    q, k = (x.detach().to(dtype).requires_grad_() for x in draw(*sizes))
    head_dim = q.shape[-1]
    weights = [(1 + 0.3 * torch.randn(head_dim)).requires_grad_() for _ in range(2)]
    return q, k, *weights, *tables(n_positions or q.shape[2], head_dim)


def gradients(outputs, inputs):
    """Returns gradients of the first four inputs, of a weighted sum of the outputs."""
    weights = [torch.linspace(-1, 1, x.numel()).view(x.shape) for x in outputs]
    loss = sum((x.float() * weight).sum() for x, weight in zip(outputs, weights, strict=True))
    return torch.autograd.grad(loss, inputs[:4])


def results(inputs, **named):
    outputs = qk_norm_rope(*inputs, **named)
    return *(x.detach() for x in outputs), *gradients(outputs, inputs)


def close(inputs, **named):
    found = results(inputs, **named, implementation="triton")
    torch.testing.assert_close(found, results(inputs, **named), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize("implementation", ["torch", "triton"])
def test_every_head_is_normalized_and_then_turned(pairing, implementation):
    """Not the reference's formula, but the paper's."""
    q, k, q_weight, k_weight, cos, sin = inputs = drawn(1, 2, 1, 3, 6)
    found = qk_norm_rope(*inputs, eps=0.1, pairing=pairing, implementation=implementation)
    turn = torch.complex(cos, sin)
    pairs = [(i, i + 3) if pairing == "half" else (2 * i, 2 * i + 1) for i in range(3)]
    a, b = ([pair[at] for pair in pairs] for at in (0, 1))
    for x, weight, y in zip((q, k), (q_weight, k_weight), found, strict=True):
        x = x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight
        torch.testing.assert_close(
            torch.complex(y[..., a], y[..., b]), torch.complex(x[..., a], x[..., b]) * turn
        )


def test_in_16_bits_it_rounds_once():
    inputs = drawn(2, 4, 2, 50, 64, dtype=torch.bfloat16)
    exact = qk_norm_rope(*(x.detach().double() for x in inputs))
    found = qk_norm_rope(*inputs, implementation="triton")
    for x, y in zip(found, exact, strict=True):
        assert (x == y.bfloat16()).float().mean() > 0.999


def test_one_launch_forward_and_one_more_backward_that_adds_up_the_weights():
    inputs = drawn(2, 4, 2, 5, 16)
    q, k, q_weight, k_weight, cos, sin = inputs
    with recorded() as launches:
        results(inputs, implementation="triton")
    forward, backward, *sums = launches
    assert reads(forward, *inputs) and reads(backward, *inputs) and len(sums) == 1
    with recorded() as launches:
        outputs = qk_norm_rope(q, k, q_weight.detach(), k_weight, cos, sin, implementation="triton")
        torch.autograd.grad(sum(x.sum() for x in outputs), (q, k_weight))
    assert len(launches) == 3
    with recorded() as launches:
        outputs = qk_norm_rope(q, k, *(x.detach() for x in (q_weight, k_weight)), cos, sin,
                               implementation="triton")  # fmt: skip
        torch.autograd.grad(sum(x.sum() for x in outputs), (q, k))
    assert len(launches) == 2
