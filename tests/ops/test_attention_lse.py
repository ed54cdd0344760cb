"""Tests attention's lse, the logarithm of the softmax's denominator, and its gradients."""

import pytest
import torch

from tests.ops.attention_kinds import SCALE, N, draw
from tests.ops.opaque import require_contracts
from tests.ops.problems import DEVICE
from tnp.ops.attention import OPERATOR, attention
from tnp.ops.attention.torch_forms import visible


@pytest.mark.parametrize("kind", [{}, {"causal": True}, {"window": 3}], ids=str)
def test_lse_is_the_logarithm_of_the_softmaxs_denominator(kind):
    """Gradients pass through lse, alone and beside o's. A query without keys has −inf."""
    q, k, v, do = (x.requires_grad_() for x in draw(N, 20))
    dlse = torch.randn(1, 2, N, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    seen = visible(q, k, None, None, None, **kind)
    sees = torch.ones(N, dtype=torch.bool, device=DEVICE) if seen is None else seen.any(1)
    asked = {"implementation": "reference", "lse": True} | kind
    o, lse = attention(q, k, v, **asked)
    scores = SCALE * q @ k.mT
    scores = scores if seen is None else scores.masked_fill(~seen, float("-inf"))
    expected = scores[:, :, sees].logsumexp(-1)
    torch.testing.assert_close(lse[:, :, sees], expected, rtol=1e-5, atol=1e-5)
    assert lse.dtype == torch.float32 and (lse[:, :, ~sees] == float("-inf")).all()
    plain = attention(q, k, v, **asked | {"lse": False})
    assert torch.equal(o, plain)

    alone = torch.autograd.grad(lse, (q, k), dlse, retain_graph=True)
    of_formula = torch.autograd.grad(expected, (q, k), dlse[:, :, sees])
    both = torch.autograd.grad((o, lse), (q, k, v), (do, dlse))
    of_o = torch.autograd.grad(plain, (q, k, v), do)
    for one, right in zip(alone, of_formula, strict=True):
        torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-5)
    for found, first, second in zip(both, of_o, (*alone, 0 * v), strict=True):
        torch.testing.assert_close(found, first + second, rtol=1e-4, atol=1e-5)


def test_lse_as_pytorch_sees_it():
    """Compiled in one graph, and as an output of the custom operator."""
    torch._dynamo.reset()
    q, k, v, do = (x.requires_grad_() for x in draw(20, 20))
    asked = {"lse": True, "implementation": "fused"}
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for used in (0, 1):  # each output's gradient alone
        found, expected = (
            torch.autograd.grad(function(q, k, v, **asked)[used].square().sum(), (q, k))
            for function in (compiled, attention)
        )
        for one, right in zip(found, expected, strict=True):
            torch.testing.assert_close(one, right, rtol=1e-4, atol=1e-5)
    inputs = [q, k, v, None, None, None]
    require_contracts(OPERATOR, "fused", inputs, (("lse", True),))
