"""Weights cast once a step are those cast where they are used, whatever happens to them between."""

import torch
from torch import nn

from tnp.ops.casting import WeightCasts, cast_weight


def _weight() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 15).view(3, 5))


def test_outside_a_step_a_weight_is_cast_each_time():
    weight = _weight()
    first = cast_weight(weight, torch.bfloat16)
    assert torch.equal(first, weight.to(torch.bfloat16))
    assert cast_weight(weight, torch.bfloat16) is not first
    assert cast_weight(weight, torch.float32) is weight


def test_inside_a_step_it_is_cast_once_for_each_dtype():
    casts, weight, other = WeightCasts(), _weight(), _weight()
    with casts.step():
        first = cast_weight(weight, torch.bfloat16)
        half = cast_weight(weight, torch.float16)
        assert cast_weight(weight, torch.bfloat16) is first and first.dtype == torch.bfloat16
        assert half.dtype == torch.float16 and cast_weight(weight, torch.float32) is weight
        assert cast_weight(other, torch.bfloat16) is not first
    assert cast_weight(weight, torch.bfloat16) is not first


def test_a_step_begins_with_the_weights_of_now():
    casts, weight = WeightCasts(), _weight()
    with casts.step():
        first = cast_weight(weight, torch.bfloat16)
    # Past PyTorch's count of changes, as a CUDA graph's replay is.
    weight.data.add_(1.0)
    with casts.step():
        assert cast_weight(weight, torch.bfloat16) is first
        assert torch.equal(first, weight.to(torch.bfloat16))


def test_a_weight_changed_within_a_step_is_cast_again():
    casts, weight = WeightCasts(), _weight()
    with casts.step():
        cast_weight(weight, torch.bfloat16)
        with torch.no_grad():
            weight.add_(1.0)
        assert torch.equal(cast_weight(weight, torch.bfloat16), weight.to(torch.bfloat16))


def test_what_is_no_parameter_is_not_kept():
    casts, weight = WeightCasts(), _weight().detach()
    with casts.step():
        assert cast_weight(weight, torch.bfloat16) is not cast_weight(weight, torch.bfloat16)


def test_steps_nest_and_end_with_an_error_too():
    inner, outer, weight = WeightCasts(), WeightCasts(), _weight()
    with outer.step():
        kept = cast_weight(weight, torch.bfloat16)
        try:
            with inner.step():
                assert cast_weight(weight, torch.bfloat16) is not kept
                raise KeyError
        except KeyError:
            pass
        assert cast_weight(weight, torch.bfloat16) is kept
    assert cast_weight(weight, torch.bfloat16) is not kept
