"""Tests that weights cast once a step equal those cast at each use."""

import copy
from threading import Thread

import pytest
import torch
from torch import nn

from tnp.ops._shared import casting
from tnp.ops._shared.casting import WeightCasts, cast_weight


def _weight(scale: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 15).view(3, 5) * scale)


def _is_right(weight: torch.Tensor) -> bool:
    return torch.equal(cast_weight(weight, torch.bfloat16), weight.detach().to(torch.bfloat16))


def test_outside_a_step_a_weight_is_cast_each_time():
    weight = _weight()
    first = cast_weight(weight, torch.bfloat16)
    assert _is_right(weight) and cast_weight(weight, torch.bfloat16) is not first
    assert cast_weight(weight, torch.float32) is weight


def test_inside_a_step_it_is_cast_once_for_each_dtype():
    weight, other = _weight(), _weight(2.0)
    casts = WeightCasts([weight, other])
    with casts.step():
        first = cast_weight(weight, torch.bfloat16)
        half = cast_weight(weight, torch.float16)
        assert cast_weight(weight, torch.bfloat16) is first and first.dtype == torch.bfloat16
        assert half.dtype == torch.float16 and cast_weight(weight, torch.float32) is weight
        assert _is_right(weight) and _is_right(other)
    assert cast_weight(weight, torch.bfloat16) is not first


def test_a_checkpoints_alias_of_a_parameter_gets_its_copy_and_a_part_its_own():
    weight = _weight()
    with WeightCasts([weight]).step():
        first = cast_weight(weight, torch.bfloat16)
        assert cast_weight(weight.detach(), torch.bfloat16) is first
        part = cast_weight(weight[:2], torch.bfloat16)
        assert torch.equal(part, first[:2])


def test_a_step_begins_with_the_weights_of_now():
    weight = _weight()
    casts = WeightCasts([weight])
    with casts.step():
        first = cast_weight(weight, torch.bfloat16)
    # Past PyTorch's count of changes, as a CUDA graph's replay is.
    weight.data.add_(1.0)
    with casts.step():
        assert cast_weight(weight, torch.bfloat16) is first and _is_right(weight)


def test_a_weight_changed_or_replaced_within_a_step_is_cast_again():
    weight = _weight()
    with WeightCasts([weight]).step():
        cast_weight(weight, torch.bfloat16)
        with torch.no_grad():
            weight.add_(1.0)
        assert _is_right(weight)
        weight.data = weight.data * 2.0
        assert _is_right(weight)


def test_replaced_weights_are_let_go_even_of_another_shape():
    weight = _weight()
    casts = WeightCasts([weight])
    for size in (15, 30, 45):
        weight.data = torch.linspace(-1, 1, size).view(-1, 5)
        for _ in range(2):
            with casts.step():
                assert _is_right(weight)
    assert len(casts._casts) == 1


def test_copies_that_a_graph_keeps_outlive_a_step_without_them():
    weight = _weight()
    casts = WeightCasts([weight])
    with casts.step():
        first = cast_weight(weight, torch.bfloat16)
    (kept,) = casts.copies()
    assert kept is first
    for _ in range(2):
        with casts.step():
            pass
    assert casts.copies() == []


def test_weights_of_no_parameter_are_not_kept():
    weight, other = _weight(), _weight()
    with WeightCasts([weight]).step():
        assert cast_weight(other, torch.bfloat16) is not cast_weight(other, torch.bfloat16)


def test_a_copy_of_a_loop_casts_its_own_weights():
    weight = _weight()
    casts = WeightCasts([weight])
    with casts.step():
        cast_weight(weight, torch.bfloat16)
    twin = copy.deepcopy(casts)
    (own,) = twin._parameters
    own.data.mul_(3.0)
    with twin.step(), casts.step():
        assert _is_right(own) and _is_right(weight)


def test_first_met_in_inference_mode_it_serves_later_steps():
    weight = _weight()
    casts = WeightCasts([weight])
    with torch.inference_mode(), casts.step():
        assert _is_right(weight)
    with casts.step():
        assert _is_right(weight)


def test_steps_overlap_in_any_order_and_end_with_an_error_too():
    one, other = _weight(), _weight(2.0)
    first, second = WeightCasts([one]).step(), WeightCasts([other]).step()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert cast_weight(other, torch.bfloat16) is cast_weight(other, torch.bfloat16)
    assert cast_weight(one, torch.bfloat16) is not cast_weight(one, torch.bfloat16)
    second.__exit__(None, None, None)
    with pytest.raises(KeyError), WeightCasts([one]).step():
        raise KeyError
    assert casting._active == []


def test_loops_in_two_threads_keep_to_their_own_weights():
    weights = [_weight(), _weight(2.0)]
    loops, right = [WeightCasts([w]) for w in weights], []

    def train(weight, casts):
        for _ in range(50):
            with casts.step():
                right.append(_is_right(weight))
            weight.data.mul_(1.01)

    threads = [Thread(target=train, args=pair) for pair in zip(weights, loops, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(right) == 100 and all(right) and casting._active == []
    assert [len(casts._casts) for casts in loops] == [1, 1]
