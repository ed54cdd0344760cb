"""Tests that gate `finite` counts what is not finite, and which steps wait for it."""

import math

import pytest
import torch

from tests.model.test_transformer_np import build
from tnp.gates import finite, gates_for, run_gate
from tnp.tasks.gaussian_process import GaussianProcessTasks


def tasks() -> list:
    return [GaussianProcessTasks().sample(0, step, 2, 5, 4) for step in range(3)]


def test_a_sound_model_has_nothing_that_is_not_finite():
    assert finite.n_not_finite(build(), tasks()) == 0


def test_losses_and_gradients_are_counted():
    model = build()
    with torch.no_grad():
        model.blocks[0].mlp.up[0, 0] = math.nan
    n_parameters = len(list(model.parameters()))
    assert 3 < finite.n_not_finite(model, tasks()) <= 3 + n_parameters


@pytest.mark.parametrize("control", [finite.infinite_weight, finite.nan_in_context])
def test_a_control_shows_in_the_loss(control):
    assert not math.isfinite(control(build(), tasks()[0]))


def test_steps_in_8_bits_alone_wait_for_it():
    assert "finite" in gates_for({"mlp": "e4m3"}) and "finite" in gates_for({"attention": "e4m3"})
    assert "finite" not in gates_for({"mlp": "fused"})
    assert "fp8" in finite.variants() and "fused" not in finite.variants()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_why_not():
    (row,) = run_gate("finite", "cpu")["gates"]
    assert (row["status"], row["reason"]) == ("unsupported", "this gate needs an NVIDIA GPU")
