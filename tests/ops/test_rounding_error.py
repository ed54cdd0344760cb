"""Compares the expected loss of float32 with float32 sums that lose it."""

import pytest
import torch

from tnp.dispatch.spec import Case
from tnp.ops._shared import rounding_error
from tnp.ops._shared.random_values import Random
from tnp.ops.attention import OPERATOR
from tnp.ops.attention.torch_forms import reference, visible

SCALE = 0.125


def normal(*shape: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=dtype)


def one_after_the_other(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Returns a @ b in float32, product by product: each is rounded, and each sum."""
    total = torch.zeros(a.shape[0], b.shape[1])
    for column, row in zip(a.unbind(1), b.unbind(0), strict=True):
        total = total + column[:, None] * row[None, :]
    return total


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("n", [1, 2, 16, 64, 500])
def test_a_product_loses_as_much_as_expected(n, mean):
    """Sums that wander about zero, and sums of products of like sign.

    Less than 1: a rounding is off by at most u times the power of 2 below what it rounds.
    """
    a, b = normal(60, n) + mean, normal(n, 70) + mean
    error = (one_after_the_other(a, b).double() - a.double() @ b.double()).norm()
    expected = rounding_error.of_product(a.double(), b.double()).sum().sqrt()
    assert 0.5 <= error / expected <= 1.0


def attention_inputs(n_k: int, batch: int = 1, magnitude: float = 1.0) -> list[torch.Tensor]:
    """Returns q, k, v, of 70 queries of two heads, and do."""
    sizes = {"batch": batch, "n_heads": 2, "n_q": 70, "n_k": n_k, "head_dim": 64}
    case = Case(OPERATOR.problem("float32", **sizes), (("magnitude", magnitude),))
    random = Random(case, torch.device("cpu"))
    drawn = OPERATOR.draw(case, random)
    return [*(drawn[name] for name in "qkv"), random(batch, 2, 70, 64)]


def attention_floors(n_k: int, magnitude: float = 1.0) -> tuple[rounding_error.Floors, dict, float]:
    """Returns floors and norms of the results, and the largest score."""
    *inputs, do = attention_inputs(n_k, magnitude=magnitude)
    exact = [x.double().requires_grad_() for x in inputs]
    o = reference(*exact, None, None, None, SCALE)
    results = (o, *torch.autograd.grad(o, exact, do.double()))
    norms = {
        name: x.norm().item() for name, x in zip(("o", "dq", "dk", "dv"), results, strict=True)
    }
    largest = (SCALE * exact[0] @ exact[1].mT).abs().max().item()
    return rounding_error.attention(*inputs, do, SCALE), norms, largest


def test_scores_of_size_one_cost_a_few_roundings():
    floors, norms, _ = attention_floors(40)
    for name, norm in norms.items():
        assert 2 <= floors[name] / norm * 2**24 <= 16, name


@pytest.mark.parametrize("magnitude", [8.0, 12.0, 30.0])
def test_a_weight_is_known_to_the_scores_size_over_2_to_the_24(magnitude):
    floors, norms, largest = attention_floors(40, magnitude)
    # A score has 64 terms: about three roundings of its size forward, and as many backward.
    assert 1 <= floors["dv"] / norms["dv"] * 2**24 / largest <= 4
    # o does not depend on what all weights of a row are off by.
    assert floors["o"] / norms["o"] < 0.2 * floors["dv"] / norms["dv"]


def test_one_key_leaves_the_rounding_of_equal_terms():
    """dq and dk are exactly 0; their floor is the floor of dp − delta."""
    floors, norms, _ = attention_floors(1)
    assert norms["dq"] < 1e-12 and 1e-7 < floors["dq"] < 1e-4
    assert norms["dk"] < 1e-12 and 1e-7 < floors["dk"] < 1e-4


def test_keys_that_a_sample_does_not_count_cost_nothing():
    q, k, v, do = attention_inputs(40, batch=2)
    seen = visible(q, k, torch.tensor([7, 40]), None, None)
    floors = rounding_error.attention(q, k, v, do, SCALE, seen)
    for x in (k, v):
        x[0, :, 7:] = 1e30
    assert rounding_error.attention(q, k, v, do, SCALE, seen) == floors


def test_queries_that_see_no_key_and_keys_that_nobody_sees_cost_nothing():
    """Causal, 70 queries of 40 keys: the first 30 see none."""
    q, k, v, do = attention_inputs(40)
    seen = visible(q, k, None, None, None, causal=True)
    floors = rounding_error.attention(q, k, v, do, SCALE, seen)
    seeing = rounding_error.attention(q[:, :, 30:], k, v, do[:, :, 30:], SCALE, seen[30:])
    padded = [torch.nn.functional.pad(x, (0, 0, 0, 9)) for x in (k, v)]
    wider = rounding_error.attention(q, *padded, do, SCALE, torch.nn.functional.pad(seen, (0, 9)))
    assert floors == pytest.approx(seeing) and floors == pytest.approx(wider)


def test_grouped_heads_cost_as_much_as_repeated_keys():
    q, k, v, do = attention_inputs(40)
    k, v = k[:, :1], v[:, :1]
    repeated = rounding_error.attention(
        q, k.expand(-1, 2, -1, -1), v.expand(-1, 2, -1, -1), do, SCALE
    )
    assert rounding_error.attention(q, k, v, do, SCALE) == repeated
