"""Tests the slope of SiLU in 8 bits.

The arithmetic is repeated here with the kernels' constants. The kernels themselves run on a GPU,
where gate `op--mlp--fused` compares their gradients with float64.
"""

import torch

from tnp.ops._shared import hopper_slope

ZERO, ONE = hopper_slope.ZERO.value, hopper_slope.ONE.value
STEP = 1.0 / (ONE - ZERO)


def code_of(slope: torch.Tensor) -> torch.Tensor:
    """Rounds by a float32 addition, as `store_slope` does."""
    return (slope.float() / STEP + (hopper_slope.WHOLE.value + ZERO)).view(torch.int32) & 0xFF


def read(code: torch.Tensor) -> torch.Tensor:
    """Reads 1 + code / 2¹⁵, as `slope_of` does."""
    x = (0x3F800000 + (code << 8)).view(torch.float32)
    return (x * (32768.0 * STEP) - (32768.0 + ZERO) * STEP).double()


def slopes(z: torch.Tensor) -> torch.Tensor:
    s = torch.sigmoid(z)
    return s * (1.0 + z * (1.0 - s))


def test_every_slope_has_a_code_and_is_off_by_half_a_step_at_most():
    slope = slopes(torch.linspace(-40.0, 40.0, 200_001, dtype=torch.float64))
    whole = slope / STEP + ZERO
    assert whole.min() > -0.5 and whole.max() < 255.5, "a code would wrap around"
    error = read(code_of(slope)) - slope
    assert error.abs().max() < 0.51 * STEP  # the product is rounded too
    assert error.square().mean().sqrt() < 0.0015


def test_slopes_are_not_biased():
    """A gain of gradients would not average out over steps, as noise does."""
    slope = slopes(torch.randn(400_000, generator=torch.Generator().manual_seed(0)).double())
    error = read(code_of(slope)) - slope
    assert abs(error.mean()) < 0.02 * STEP
    assert abs((error * slope).sum() / slope.square().sum()) < 1e-4
    # The control: codes that are cut off in place of rounded are a quarter of a step off and more.
    cut = read((slope / STEP + ZERO).to(torch.int32)) - slope
    assert abs(cut.mean()) > 0.25 * STEP


def test_zero_and_one_are_exact():
    exact = torch.tensor([0.0, 1.0], dtype=torch.float64)
    assert (read(code_of(exact)) - exact).abs().max() < 2e-5


def test_slopes_beside_float16_stay_as_they_are():
    for dtype, expected in ((torch.bfloat16, torch.uint8), (torch.float16, torch.float16)):
        x = torch.empty(1, dtype=dtype)
        assert hopper_slope.new_saved(x, (130, 256), dtype).dtype == expected
        assert hopper_slope.new_saved(x, (130, 256), dtype).shape == (256, 256)
