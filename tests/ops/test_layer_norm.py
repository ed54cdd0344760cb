"""LayerNorm: what its gate's cases do not see."""

import pytest
import torch

from tests.ops.on_rows import (
    DEVICE,
    assert_within_budget,
    differentiated,
    drawn,
    kernels_forced,
)
from tnp.ops._shared.norms import COLUMNS
from tnp.ops.layer_norm import OPERATOR, layer_norm, triton_layer_norm


# On both sides of a tile's rows at this width, and one column, which is its own mean.
@pytest.mark.parametrize("rows, width", [(1, 60), (33, 60), (13, 3)])
def test_every_kernel_at_ragged_sizes(rows, width):
    inputs = drawn(OPERATOR, rows, width, start=1)
    for forced in kernels_forced(OPERATOR, inputs):
        results = differentiated(OPERATOR, "triton", inputs, forced=forced)
        assert_within_budget(OPERATOR, results, inputs)


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


def test_what_is_not_wanted_changes_nothing():
    inputs = drawn(OPERATOR, 9, 48)
    whole = differentiated(OPERATOR, "triton", inputs)
    for wanted in (("x",), ("weight",), ("bias",), ("weight", "bias")):
        part = differentiated(OPERATOR, "triton", inputs, wanted)
        assert all(torch.equal(part[name], whole[name]) for name in part), wanted
    with torch.no_grad():  # nothing is saved
        assert torch.equal(layer_norm(*inputs.values(), implementation="triton"), whole["y"])


def test_memory_that_nobody_wrote_is_not_read():
    """PyTorch fills what is allocated with NaN where it is asked for deterministic algorithms."""
    inputs = drawn(OPERATOR, 7, 40)
    expected = differentiated(OPERATOR, "triton", inputs)
    torch.use_deterministic_algorithms(True)
    try:
        for forced in kernels_forced(OPERATOR, inputs):
            results = differentiated(OPERATOR, "triton", inputs, forced=forced)
            for name, x in results.items():
                torch.testing.assert_close(x, expected[name])
    finally:
        torch.use_deterministic_algorithms(False)


def test_any_strides_and_expanded_gradients():
    weight, bias = (torch.randn(96, device=DEVICE)[::2].requires_grad_() for _ in range(2))
    for x in (
        torch.randn(5, 3, 48, device=DEVICE).transpose(0, 1),
        torch.randn(1, 1, 48, device=DEVICE).expand(3, 5, 48),
        torch.randn(3, 48, 5, device=DEVICE).mT,
        torch.randn(2, 5, 3, 48, device=DEVICE).transpose(1, 2),
        torch.randn(48, device=DEVICE),
    ):
        x.requires_grad_()
        results = []
        for name in ("triton", "torch"):
            y = layer_norm(x, weight, bias, implementation=name)
            results.append((y, *torch.autograd.grad(y.exp().sum(), (x, weight, bias))))
            results[-1] += torch.autograd.grad(
                layer_norm(x, weight, bias, implementation=name).sum(), (weight, bias)
            )
        for ours, own in zip(*results, strict=True):
            torch.testing.assert_close(ours, own, atol=1e-4, rtol=1e-4)


def test_parameters_of_16_bits_get_gradients_of_16_bits():
    x, weight, bias = drawn(OPERATOR, 9, 48, "bfloat16").values()
    small = [parameter.bfloat16().requires_grad_() for parameter in (weight, bias)]
    y = layer_norm(x, *small, implementation="triton")
    gradients = torch.autograd.grad(y.sum(), small)
    exact = [parameter.double() for parameter in small]
    own = torch.autograd.grad(layer_norm(x.double(), *exact).sum(), small)
    torch.testing.assert_close(gradients, own)


def test_no_rows():
    x = torch.zeros(2, 0, 48, device=DEVICE, requires_grad=True)
    weight, bias = (torch.ones(48, device=DEVICE, requires_grad=True) for _ in range(2))
    layer_norm(x, weight, bias, implementation="triton").sum().backward()
    assert x.grad.shape == x.shape and not weight.grad.any() and not bias.grad.any()


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": torch.zeros(2, 7)}, ValueError, r"x is \(2, 7\), weight \(8,\) and bias \(8,\)"),
        ({"bias": torch.zeros(7)}, ValueError, r"bias \(7,\): they must be \[..., D\]"),
        ({"weight": torch.zeros(8).int()}, ValueError, "weight is torch.int32: it must be a float"),
        ({"bias": torch.zeros(8, device="meta")}, ValueError, "bias is on meta and x on cpu"),
        ({"eps": -1.0}, ValueError, "eps is -1.0: it must be positive and finite"),
        ({"eps": torch.tensor(1.0)}, ValueError, "eps is a tensor: it must be a Python number"),
        ({"x": torch.zeros(2, 8).double()}, RuntimeError, "takes .*, not float64"),
        (
            {name: torch.zeros(16_385) for name in ("x", "weight", "bias")},
            RuntimeError,
            "it takes widths up to 16384, not 16385",
        ),
    ],
)
def test_refusals(change, error, message):
    arguments = {"x": torch.zeros(2, 8), "weight": torch.zeros(8), "bias": torch.zeros(8)}
    arguments |= change
    with pytest.raises(error, match=message):
        layer_norm(**arguments, implementation="triton")


def test_it_is_of_models_with_this_norm():
    run = {"batch": 8, "n_tokens": 1024, "dtype": "bfloat16"}
    problem = OPERATOR.within({"norm": "layer", "d_model": 768}, run)
    assert (problem["rows"], problem["width"]) == (8192, 768)
    assert OPERATOR.within({"norm": "rms", "d_model": 768}, run) is None
    assert OPERATOR.within({"d_model": 512}, run) is None
