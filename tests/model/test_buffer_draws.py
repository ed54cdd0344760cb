"""Tests that draws by the causal buffer are made of predictions under the mask."""

from dataclasses import replace

import pytest
import torch

from tests.buffers import ROOM, WITH, assert_equal, exact, lengths, task_of, with_role
from tests.model.test_transformer_np import build, make_task
from tests.replays import Replays
from tnp.gates.buffer import masked
from tnp.model import sample_graph, sampling
from tnp.model.prediction import Prediction, draw
from tnp.model.sample_graph import Draws
from tnp.ops.mixture_nll import split_parameters
from tnp.tasks.normalization import Normalization
from tnp.tasks.task import Context


def means(monkeypatch, config, n_rows: int) -> None:
    """Every draw stands in for its mean, in the units that it is asked for with."""

    def mean(parameters, gumbel, normal, sigma_min, normalization):
        assert gumbel.shape == (n_rows, 1, config.n_components)
        assert normal.shape == (n_rows, 1, config.d_y)
        assert sigma_min == config.sigma_min
        return Prediction(parameters, sigma_min, normalization).mean

    monkeypatch.setattr(sample_graph, "draw", mean)


@lengths
@pytest.mark.parametrize("n_target", [1, ROOM + 1, 2 * ROOM + 3])
def test_draws_are_made_of_predictions_under_the_mask(lengths, n_target, monkeypatch):
    """Compares draws by their means, so that both ways must come to the same."""
    model, task = exact(replace(WITH, sigma_min=0.1)), task_of(n_target, lengths)
    means(monkeypatch, model.config, n_rows=4)
    drawn = model.sample_jointly(task.context, task.x_target, n_samples=2)
    assert drawn.shape == (2, 2, n_target, 1)
    assert_equal(drawn[1], drawn[0])
    for b in range(2):
        m = 7 if lengths is None else int(lengths[b])
        x, y = task.x_context[b : b + 1, :m], task.y_context[b : b + 1, :m]
        for first in range(0, n_target, ROOM + 1):
            run = slice(first, first + ROOM + 1)
            entered = task.x_target[b : b + 1, run], drawn[0, b : b + 1, run]
            n_seen = torch.arange(entered[0].shape[1])
            found = masked(model, Context(x, y), entered, entered[0], n_seen)
            assert_equal(drawn[0, b : b + 1, run], Prediction(found.detach()).mean)
            x, y = torch.cat([x, entered[0]], 1), torch.cat([y, entered[1]], 1)


@pytest.mark.parametrize("buffer", [True, False])
def test_a_target_that_is_nan_is_refused_before_any_is_drawn(buffer):
    model, task = exact(), task_of(ROOM + 3)
    task.x_target[1, 2] = float("nan")
    with pytest.raises(ValueError, match=r"x_target of sample 1, point 2, is \[nan\]: every value"):
        model.sample_jointly(task.context, task.x_target, buffer=buffer)


def test_draws_of_one_context_are_drawn_each_for_itself():
    model, task = with_role(build(WITH)), make_task()
    torch.manual_seed(0)
    drawn = model.sample_jointly(task.context, task.x_target, n_samples=3)
    assert len({tuple(one.flatten().tolist()) for one in drawn}) == 3
    short = replace(task, y_target=drawn[1].to(task.y_target.dtype))
    assert model.joint_log_density(short).isfinite().all()


@lengths
@pytest.mark.parametrize("n_samples", [1, 2])
def test_replayed_draws_are_the_launched_ones(lengths, n_samples, monkeypatch):
    """One graph serves all runs, the second and later ones over longer contexts."""
    model, task = exact(), task_of(3 * (ROOM + 1), lengths)
    x_target, captures = task.x_target.repeat(n_samples, 1, 1), Replays()

    @torch.no_grad()
    def drawn(captures: Replays | None) -> torch.Tensor:
        torch.manual_seed(0)
        draws, context = Draws(model, x_target, captures), task.context
        for x in x_target.split(ROOM + 1, 1):
            y = draws.run(model.encode(context), ROOM + 1)
            if len(context.x) < len(x):  # from here on each draw has its own
                context = sampling._repeated(context, n_samples)
            context = sampling._joined(context, x, y)
        return context.y

    assert torch.equal(drawn(captures), drawn(None)) and captures.captured == 1


def test_draws_follow_the_mixture():
    """Compares shares of components, and mean and deviation of each, over 20,000 draws."""
    mu = torch.tensor([-30.0, 50.0])
    log_sigma = torch.tensor([0.5, 2.0]).log()
    log_weight = torch.tensor([0.2, 0.8]).log()
    parameters = torch.stack([log_weight, mu, log_sigma], -1).expand(1, 20_000, -1, -1)
    generator = torch.Generator().manual_seed(0)
    gumbel = -torch.empty(1, 20_000, 2).exponential_(generator=generator).log()
    normal = torch.randn(1, 20_000, 1, generator=generator)
    drawn = draw(parameters, gumbel, normal)
    first = drawn[drawn < 0]
    assert abs(len(first) / 20_000 - 0.2) < 5 * (0.16 / 20_000) ** 0.5
    for of, mean, deviation in ((first, -30.0, 0.5), (drawn[drawn > 0], 50.0, 2.0)):
        error = deviation / len(of) ** 0.5
        assert abs(of.mean() - mean) < 5 * error and abs(of.std() - deviation) < 5 * error


@pytest.mark.parametrize("sigma_min", [0.0, 0.3])
@pytest.mark.parametrize("units", [None, Normalization([0.0], [1.0], [300.0], [5.0])], ids=bool)
def test_a_draw_is_of_the_component_that_the_noise_chose(sigma_min, units):
    parameters, normal = torch.randn(2, 5, 3, 3), torch.randn(2, 5, 1, dtype=torch.float64)
    _, mu, log_sigma = split_parameters(parameters.double(), sigma_min)
    for k in range(3):
        gumbel = torch.zeros(2, 5, 3)
        gumbel[..., k] = 100.0
        expected = mu[:, :, k] + log_sigma.exp()[:, :, k] * normal
        expected = expected if units is None else 300.0 + 5.0 * expected
        if units is None:
            drawn = draw(parameters, gumbel, normal.float(), sigma_min)
        else:
            drawn = draw(parameters, gumbel, normal, sigma_min, units)
        torch.testing.assert_close(drawn.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_draws_are_the_launched_ones(monkeypatch):
    model, task = with_role(build(WITH)).cuda(), make_task(n_target=11).to("cuda")
    means(monkeypatch, model.config, n_rows=2 * len(task.x_target))
    drawn = [
        model.sample_jointly(task.context, task.x_target, 2, cuda_graph=on) for on in (False, True)
    ]
    assert torch.equal(*drawn)
