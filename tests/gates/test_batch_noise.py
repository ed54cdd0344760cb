"""Tests how much a narrower format changes gradients, beside the differences of batches."""

import copy

import pytest
import torch

from tests.model.test_transformer_np import build
from tnp.gates import batch_noise, blocked, gates_for, models, run_gate
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.tasks.gaussian_process import GaussianProcessTasks

BATCHES = [GaussianProcessTasks().sample(0, step, 2, 5, 4) for step in range(6)]


def test_equal_models_do_not_differ():
    model = build()
    found = batch_noise.ratios(model, copy.deepcopy(model), BATCHES)
    assert set(found.values()) == {0.0} and found.keys() == dict(model.named_parameters()).keys()


def test_it_is_the_difference_over_the_standard_deviation():
    """One model's gradients are twice another's, so the difference is the gradient itself."""
    model, twice = build(), build()
    twice.nll = lambda *task: 2.0 * TransformerNP.nll(twice, *task)
    name = "blocks.0.mlp.up"
    gradients = torch.stack(
        [models.gradients_by_tensor(model, task)[1][name].double() for task in BATCHES]
    )
    expected = gradients.square().sum((1, 2)).mean() / gradients.var(0).sum()
    found = batch_noise.ratios(model, twice, BATCHES)[name]
    assert found == pytest.approx(expected.sqrt().item(), rel=1e-5)


def test_coarse_weights_are_seen():
    model, coarse = build(), build()
    batch_noise.round_mlp_to_2_bits(coarse)
    assert max(batch_noise.ratios(model, coarse, BATCHES).values()) > batch_noise.BOUND


def test_no_step_waits_for_it():
    for variant in ("fp8", "fp8_attention"):
        assert "batch_noise" not in gates_for(Variant.named(variant).implementations())


def test_a_red_check_stops_what_it_names_alone():
    row = {"gate": "batch_noise", "op": "mlp", "implementation": "e4m3", "status": "ok"}
    row |= {"passed": False, "check": "gradient", "metric": "ratio", "value": 0.2, "bound": 0.1}
    assert "batch_noise is red" in blocked([row], {"mlp": "e4m3"}).reason
    assert blocked([row], {"mlp": "fused"}) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_why_not():
    (row,) = run_gate("batch_noise", "cpu")["gates"]
    assert (row["status"], row["reason"]) == (
        "unsupported",
        "this gate needs an NVIDIA GPU",
    )
