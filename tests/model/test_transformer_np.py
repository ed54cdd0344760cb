"""Tests that targets see the context alone, that variants agree, and that padding is exact."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.refusals import assert_refused
from tnp.dispatch.plans import KernelPlan
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import FAMILIES, Variant
from tnp.tasks.task import Task

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


@pytest.mark.parametrize("d_x, d_y", [(2, 3), (5, 1)])
def test_any_number_of_dimensions(d_x, d_y):
    if d_x == 5:  # the specification's number of parameters
        d, d_ff, model = 512, 1365, TransformerNP(TNPConfig(), Variant("test"))
        n = 12 * (4 * d * d + 2 * d * d_ff + 2 * d) + 10 * (d * d_ff + d_ff * 3) + d + 3 * d + d * d
        assert sum(p.numel() for p in model.parameters()) == n
        assert all(p.dtype == torch.float32 for p in model.parameters())
    config = TNPConfig(d_x, d_y, d_model=32, n_layers=1, n_heads=2, d_ff=21, n_components=4)
    task = make_task(config)
    model = build(config)
    assert model(task.x_context, task.y_context, task.x_target).shape == (2, 5, 4, 1 + 2 * d_y)
    model.loss(task).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("skip_unread", [False, True])
def test_without_targets_there_is_nothing_to_predict(skip_unread):
    model, task = build(skip_unread=skip_unread), make_task(n_target=0)
    with pytest.raises(ValueError, match="it must hold at least one target"):
        model.loss(task)
    with pytest.raises(ValueError, match="it must hold at least one target"):
        model.predict(task.context, task.x_target)


def test_a_target_sees_the_context_as_a_set_and_no_other_target():
    model, task = build(), make_task()
    out = model(task.x_context, task.y_context, task.x_target)
    alone = model(task.x_context, task.y_context, task.x_target[:, :1])
    torch.testing.assert_close(out[:, :1], alone)
    order = torch.randperm(7, generator=torch.Generator().manual_seed(0))
    permuted = model(task.x_context[:, order], task.y_context[:, order], task.x_target)
    torch.testing.assert_close(permuted, out)
    # The control: the values shuffled away from their positions is another context.
    shuffled = model(task.x_context, task.y_context[:, order], task.x_target)
    assert (shuffled - out).abs().max() > 1e-3
    # A point of the context differs from a target at its place.
    x = torch.zeros(1, 1, 1)
    context, target = model.embed(x, x, None, out.dtype), model.embed(None, None, x, out.dtype)
    assert (context - target).abs().max() > 1e-2


def loss_and_gradients(model: TransformerNP, task: Task) -> dict[str, torch.Tensor]:
    loss = model.loss(task)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


# 2·(7 + 5) rows: 23 recomputes every block, 24 none.
@pytest.mark.parametrize("n_layers", [1, 2])
@pytest.mark.parametrize(
    "spec",
    [
        {"skip_unread": True},
        {"recompute_above": 23},
        {"recompute_above": 24},
        {"skip_unread": True, "recompute_above": 23},
        {"checkpoint": True},
    ],
)
def test_what_is_skipped_or_recomputed_changes_nothing(spec, n_layers):
    config = TNPConfig(d_model=32, n_layers=n_layers, n_heads=2, d_ff=21, n_components=3)
    task = make_task(config).to(dtype=torch.float64)
    plain, other = (
        loss_and_gradients(
            build(config, torch.float64, attention="reference", **changes).double(), task
        )
        for changes in ({}, spec)
    )
    for name, x in plain.items():
        torch.testing.assert_close(other[name], x, atol=1e-13, rtol=1e-11, msg=name)


class Calls(TorchDispatchMode):
    """Counts calls of every operator, in the backward pass too."""

    def __init__(self) -> None:
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count[function] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("recompute_above, n_runs", [(23, 2), (24, 1), (None, 1)])
def test_recomputing_keeps_the_results_of_attention(recompute_above, n_runs):
    fused = {"attention": "separate", "projection": "fused"}
    model = build(**fused, recompute_above=recompute_above)
    with Calls() as calls:
        loss_and_gradients(model, make_task())
    assert calls.count[torch.ops.tnp.attention.default] == CONFIG.n_layers
    assert calls.count[torch.ops.tnp.project_qkv.default] == n_runs * CONFIG.n_layers


@pytest.mark.parametrize("recompute_above", [23, None])
@pytest.mark.parametrize("implementation", ["separate", "fused"])
def test_attention_is_launched_once_a_layer(monkeypatch, implementation, recompute_above):
    launched, forward = [], KernelPlan.forward

    def counted(plan, *arguments):
        launched.append(plan.operator.name)
        return forward(plan, *arguments)

    monkeypatch.setattr(KernelPlan, "forward", counted)
    model = build(attention=implementation, recompute_above=recompute_above)
    loss_and_gradients(model, make_task())
    assert launched.count("attention") == CONFIG.n_layers


CENTRED = {"skip_unread": True, "centred_keys": True}


def test_all_operators_of_ours_give_the_results_of_torch():
    """Gates `skip_unread`, `checkpointing` and `centred` run them with switches."""
    task = make_task()
    own = loss_and_gradients(build(), task)
    ours = dict.fromkeys(FAMILIES, "fused")
    for name, x in loss_and_gradients(build(d_ff_storage=32, **ours), task).items():
        x = x[tuple(map(slice, own[name].shape))]  # without the padding
        torch.testing.assert_close(x, own[name], atol=1e-4, rtol=1e-3, msg=name)


@pytest.mark.parametrize("lengths", [None, [7, 3]])
def test_a_kept_encoding_has_centred_keys_too(lengths):
    task = make_task()
    if lengths:
        task = replace(task, context_lengths=torch.tensor(lengths, dtype=torch.int32))
    plain, centred = build(), build(**dict.fromkeys(FAMILIES, "fused"), **CENTRED)
    expected = plain.predict(task.context, task.x_target)
    found = centred.predict(centred.encode(task.context), task.x_target)
    torch.testing.assert_close(found.mean, expected.mean, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(found.variance, expected.variance, atol=1e-4, rtol=1e-3)


def test_what_is_no_model_is_named():
    model, task = build(), make_task()
    assert_refused(
        (lambda: TNPConfig(n_layers=0), "n_layers is 0"),
        (lambda: TNPConfig(n_layers=2.0), "n_layers is 2.0: it must be a whole number"),
        (lambda: TNPConfig(d_y=True), "d_y is True: it must be a whole number"),
        *((lambda s=s: TNPConfig(sigma_min=s), f"sigma_min is {s}: it must be finite")
          for s in (-1.0, float("nan"), float("inf"))),
        (lambda: TNPConfig(d_model=32, n_heads=3), "d_model 32 is not a multiple of n_heads 3"),
        (lambda: Variant("v", d_ff_storage=64.0),
         "d_ff_storage of variant 'v' is 64.0: it must be a whole"),
        (lambda: Variant("v", d_ff_storage=np.True_),
         "d_ff_storage of variant 'v' is np.True_: it must be a w"),
        (lambda: Variant("v", mlp="compiled"), "variant 'v' asks for mlp 'compiled': it is for b"),
        *((lambda w=w: build(d_ff_storage=w), f"d_ff_storage {w}: it must be from 21, .* to 128")
          for w in (20, 129, 1408)),
        (lambda: build(centred_keys=True), "centred_keys needs skip_unread"),
    )  # fmt: skip
    tensors = "x_context is a {}: a model is called with tens"
    assert_refused(
        (lambda: model(task.context, task.x_target), tensors.format("Context")),
        (lambda: model(task), tensors.format("Task")),
        error=TypeError,
    )


@pytest.mark.parametrize("name", ["auto", "fused", "pytorch_best", "sdpa_flash"])
def test_a_named_variant_stores_any_model_as_it_needs(name):
    """At most an eighth wider, in whole multiples of 128, which only some variants ask for."""
    variant = Variant.named(name)
    with pytest.warns(DeprecationWarning, match="needs no d_ff: a model pads hidden layers by its"):
        assert Variant.named(name, 48) == variant
    for d_ff in (21, 48, 64, 100, 127, 128, 129, 341, 500, 683, 1000, 1365, 1408, 2730):
        width = variant.storage(d_ff)
        assert d_ff <= width <= d_ff * 9 / 8 and (width == d_ff or width % 128 == 0)
        if name == "sdpa_flash":
            assert width == d_ff
        elif d_ff > 1016:
            assert width % 128 == 0
    model = TransformerNP(replace(CONFIG, d_ff=64), name)
    plain = TransformerNP(replace(CONFIG, d_ff=64), Variant("plain"))
    assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in plain.parameters())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_default_dtype_follows_the_device():
    model = TransformerNP(CONFIG)
    assert model.compute_dtype == torch.float32
    assert model.cuda().compute_dtype == torch.bfloat16
    assert model.cpu().compute_dtype == torch.float32
