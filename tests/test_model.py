"""The model: targets see the context only, variants agree, padding and prediction are exact."""

import pytest
import torch

from tnp.model import TNPConfig, TransformerNP
from tnp.step import TrainingStep
from tnp.tasks import Task
from tnp.variants import Variant

CONFIG = TNPConfig(d_model=32, n_layers=2, n_heads=2, d_ff=21, n_components=3)


def build(config=CONFIG, dtype=torch.float32, checkpoint=False, **spec) -> TransformerNP:
    torch.manual_seed(0)
    return TransformerNP(config, Variant("test", **spec), dtype, checkpoint=checkpoint)


def make_task(config=CONFIG, batch=2, n_context=7, n_target=5) -> Task:
    generator = torch.Generator().manual_seed(1)

    def draw(n, d):
        return torch.randn(batch, n, d, generator=generator)

    return Task(
        draw(n_context, config.d_x),
        draw(n_context, config.d_y),
        draw(n_target, config.d_x),
        draw(n_target, config.d_y),
    )


def test_parameter_count_is_the_specifications():
    model = TransformerNP(TNPConfig(), Variant("test"))
    d, d_ff = 512, 1365
    blocks = 12 * (4 * d * d + 2 * d * d_ff + 2 * d)
    heads = 10 * (d * d_ff + d_ff * 3) + d
    embedding = 3 * d + d * d
    assert sum(p.numel() for p in model.parameters()) == blocks + heads + embedding
    assert all(p.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("d_x, d_y", [(1, 1), (2, 1), (2, 3), (5, 2)])
def test_any_number_of_dimensions(d_x, d_y):
    config = TNPConfig(d_x, d_y, d_model=32, n_layers=1, n_heads=2, d_ff=21, n_components=4)
    task = make_task(config)
    model = build(config)
    assert model(task.x_context, task.y_context, task.x_target).shape == (2, 5, 4, 1 + 2 * d_y)
    model.loss(task).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_target_sees_neither_other_targets_nor_its_own_y():
    model, task = build(), make_task()
    alone = model(task.x_context, task.y_context, task.x_target[:, :1])
    together = model(task.x_context, task.y_context, task.x_target)
    torch.testing.assert_close(together[:, :1], alone)


def test_context_is_a_set_and_is_used():
    model, task = build(), make_task()
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    out = model(task.x_context, task.y_context, task.x_target)
    permuted = model(task.x_context[:, order], task.y_context[:, order], task.x_target)
    torch.testing.assert_close(permuted, out)
    # The control: the values shuffled away from their positions is another context.
    shuffled = model(task.x_context, task.y_context[:, order], task.x_target)
    assert (shuffled - out).abs().max() > 1e-3


def test_context_and_target_with_equal_coordinates_differ():
    model = build()
    x = torch.zeros(1, 1, 1)
    context = model.embed(x, torch.zeros(1, 1, 1), None, torch.float32)
    target = model.embed(None, None, x, torch.float32)
    assert (context - target).abs().max() > 1e-2


def test_checkpointing_changes_nothing():
    task = make_task()
    gradients = []
    for checkpoint in (False, True):
        model = build(checkpoint=checkpoint)
        loss = model.loss(task)
        loss.backward()
        gradients.append([loss.detach()] + [p.grad for p in model.parameters()])
    for plain, recomputed in zip(*gradients, strict=True):
        assert torch.equal(plain, recomputed)


def test_padding_is_exact_through_training():
    task = make_task()
    models = [build(), build(d_ff_storage=32)]
    for model in models:
        step = TrainingStep(model, learning_rate=1e-2)
        for _ in range(5):
            step(task)
    plain, padded = models
    torch.testing.assert_close(padded.loss(task), plain.loss(task))
    assert padded.heads.up[:, 21:].abs().max() == 0
    assert padded.blocks[0].mlp.down[:, 21:].abs().max() == 0
    torch.testing.assert_close(padded.blocks[1].mlp.up[:21], plain.blocks[1].mlp.up)


@pytest.mark.parametrize("max_targets", [1, 2, 5, 1000])
def test_predict_in_chunks_is_the_model(max_targets):
    model, task = build(), make_task()
    prediction = model.predict(task, max_targets)
    nll = -prediction.log_prob(task.y_target).mean()
    torch.testing.assert_close(nll, model.loss(task).detach())


def test_predict_does_not_read_the_targets_values():
    model, task = build(), make_task()
    poisoned = Task(
        task.x_context, task.y_context, task.x_target, torch.full_like(task.y_target, float("nan"))
    )
    torch.testing.assert_close(model.predict(poisoned).mean, model.predict(task).mean)


def test_bad_sizes_raise_naming_the_value():
    with pytest.raises(ValueError, match="n_layers is 0"):
        TNPConfig(n_layers=0)
    with pytest.raises(ValueError, match="d_model 32 is not a multiple of n_heads 3"):
        TNPConfig(d_model=32, n_heads=3)
    with pytest.raises(ValueError, match="d_ff_storage 20"):
        build(d_ff_storage=20)
    with pytest.raises(ValueError, match="max_targets is 0"):
        build().predict(make_task(), 0)
