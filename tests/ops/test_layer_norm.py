"""LayerNorm: what its gate's cases do not see."""

import torch

from tests.ops.on_rows import (
    assert_within_budget,
    differentiated,
    drawn,
)
from tnp.ops._shared.norms import COLUMNS
from tnp.ops.layer_norm import OPERATOR, layer_norm, triton_layer_norm


def test_one_column_is_its_own_mean():
    x, weight, bias = drawn(OPERATOR, 13, 1).values()
    y = layer_norm(x.requires_grad_(), weight, bias, implementation="triton")
    assert torch.equal(y, bias.expand(13, 1))
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    torch.testing.assert_close(dx, torch.zeros_like(dx), atol=1e-4, rtol=0)


def test_several_stripes_and_blocks_of_a_wide_row(monkeypatch):
    monkeypatch.setattr(triton_layer_norm, "BLOCK", 256)
    inputs = drawn(OPERATOR, 5, 600, "bfloat16", offset=3.0)
    wide = {"layer_norm.backward": ("columns", COLUMNS[0])}
    assert_within_budget(OPERATOR, differentiated(OPERATOR, "triton", inputs, forced=wide), inputs)


def test_it_is_of_models_with_this_norm():
    run = {"batch": 8, "n_tokens": 1024, "dtype": "bfloat16"}
    problem = OPERATOR.within({"norm": "layer", "d_model": 768}, run)
    assert (problem["rows"], problem["width"]) == (8192, 768)
    assert OPERATOR.within({"norm": "rms", "d_model": 768}, run) is None
    assert OPERATOR.within({"d_model": 512}, run) is None
