"""Predictions: against closed forms and integrals, in chunks, from a kept encoding, joint draws."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.distributions import Normal

from tests.model.test_transformer_np import build, make_task
from tests.replays import Replays
from tnp.model.prediction import Prediction, bytes_per_target
from tnp.model.prediction_graphs import DecodeGraphs
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.ops.decode_attention import decode_attention
from tnp.ops.kv_cache.paged import CacheFull, PagedCache
from tnp.ops.mixture_nll import mixture_nll
from tnp.tasks.normalization import Normalization
from tnp.tasks.task import Context, Task


def parameters(d_y=1, n_components=3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 4, n_components, 1 + 2 * d_y, generator=generator)


def test_one_component_is_a_gaussian():
    p = parameters(n_components=1).double()
    exact = Normal(p[..., 0, 1:2], p[..., 0, 2:3].exp())
    prediction = Prediction(p)
    torch.testing.assert_close(prediction.mean, exact.mean)
    torch.testing.assert_close(prediction.variance, exact.variance)
    for probability in (0.01, 0.5, 0.975):
        torch.testing.assert_close(
            prediction.quantile(probability),
            exact.icdf(torch.tensor(probability, dtype=torch.float64)),
            rtol=1e-12,
            atol=1e-12,
        )


@pytest.mark.parametrize("d_y", [1, 3])
def test_log_prob_is_the_loss(d_y):
    p, y = parameters(d_y).double(), torch.randn(2, 4, d_y).double()
    prediction = Prediction(p, sigma_min=0.1)
    torch.testing.assert_close(-prediction.log_prob(y).mean(), mixture_nll(p, y, sigma_min=0.1))


def test_density_integrates_to_one_and_quantiles_invert_the_cdf():
    prediction = Prediction(parameters())
    grid = torch.linspace(-60, 60, 40_001, dtype=torch.float64)
    density = torch.stack([prediction.log_prob(y.expand(2, 4, 1)).exp() for y in grid[::20]])
    mass = torch.trapezoid(density, grid[::20], dim=0)
    torch.testing.assert_close(mass, torch.ones(2, 4).double(), rtol=1e-2, atol=1e-2)
    for probability in (0.05, 0.5, 0.9):
        y = prediction.quantile(probability)
        torch.testing.assert_close(
            prediction.marginal_cdf(y), torch.full_like(y, probability), rtol=1e-9, atol=1e-9
        )


def test_samples_have_the_mean_and_variance():
    torch.manual_seed(0)
    prediction = Prediction(parameters(d_y=2))
    samples = prediction.sample((20_000,))
    assert samples.shape == (20_000, 2, 4, 2)
    standard_error = prediction.variance.sqrt() / math.sqrt(20_000)
    assert ((samples.mean(0) - prediction.mean).abs() < 5 * standard_error).all()
    torch.testing.assert_close(samples.var(0), prediction.variance, rtol=0.2, atol=0.02)


@pytest.mark.parametrize("probability", [0.0, 1.0, -0.1, 2.0])
def test_probability_outside_the_unit_interval_raises(probability):
    with pytest.raises(ValueError, match="between 0 and 1"):
        Prediction(parameters()).quantile(probability)


@pytest.mark.parametrize("n_targets", [1, 2, 5, 1000])
def test_predict_in_chunks_is_the_model(n_targets, monkeypatch):
    model, task = build(), make_task()
    rows, heads = [], model.heads.forward
    monkeypatch.setattr(
        model.heads, "forward", lambda h, update: rows.append(h.shape[1]) or heads(h, update)
    )
    budget = n_targets * task.batch * bytes_per_target(model)
    prediction = model.predict(task.context, task.x_target, max_bytes=budget)
    assert sum(rows) == 5 and max(rows) == min(n_targets, 5)
    nll = -prediction.log_prob(task.y_target).mean().float()
    torch.testing.assert_close(nll, model.loss(task).detach())


def test_predictions_over_a_kept_encoding_are_the_models():
    model, task = build(), make_task()
    encoding = model.encode(task.context)
    for n in (5, 2):
        x = task.x_target[:, :n]
        expected = Prediction(model(task.x_context, task.y_context, x).detach())
        kept = model.predict(encoding, x)
        torch.testing.assert_close(kept.mean, expected.mean)
        torch.testing.assert_close(kept.variance, expected.variance)


@pytest.mark.parametrize("projection", ["torch", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kept_encoding_predicts_the_same_to_the_last_bit(projection, dtype):
    model, task = build(dtype=dtype, projection=projection), make_task()
    encoding = model.encode(task.context)
    anew, kept = (model.predict(of, task.x_target) for of in (task.context, encoding))
    assert torch.equal(anew.mean, kept.mean) and torch.equal(anew.variance, kept.variance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_that_carry_a_factor_are_those_of_the_model(dtype):
    """`fused` multiplies their weight ahead of a prediction, and the product in a step."""
    model, task = build(dtype=dtype, projection="fused", skip_unread=True), make_task()
    assert model.blocks[0].attention.base2
    whole = Prediction(model(task.x_context, task.y_context, task.x_target).detach())
    kept = model.predict(model.encode(task.context), task.x_target)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(kept.mean, whole.mean, rtol=tolerance, atol=tolerance)


def test_no_keys_are_made_of_targets(monkeypatch):
    model, task = build(projection="fused"), make_task()
    encoding = model.encode(task.context)
    monkeypatch.setattr("tnp.model.layers.project_qkv", None)
    model.predict(encoding, task.x_target)


def replayed(model, encoding):
    """The encoding with "graphs" of its own, and what counts them."""
    captures = Replays()
    return replace(encoding, graphs=DecodeGraphs(model.parameters(), captures)), captures


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replayed_predictions_are_the_launched_ones_at_every_size(dtype):
    model, task = build(dtype=dtype, projection="fused"), make_task(n_target=9)
    encoding = model.encode(task.context)
    kept, captures = replayed(model, encoding)
    found, expected = [], []
    for i in (0, 3, 1, 2, 4):  # the first of a size is launched, the second captured
        for n in (5, 2):
            x = task.x_target[:, i : i + n]
            found.append(model.predict(kept, x))
            expected.append(model.predict(encoding, x))
    for one, other in zip(found, expected, strict=True):  # none is another one's memory
        assert torch.equal(one.mean, other.mean) and torch.equal(one.variance, other.variance)
    assert captures.captured == 2
    x, budget = task.x_target[:, :4], 2 * task.batch * bytes_per_target(model)
    in_chunks = (model.predict(of, x, max_bytes=budget).mean for of in (kept, encoding))
    assert torch.equal(*in_chunks)


def test_past_the_most_graphs_targets_are_launched(monkeypatch):
    monkeypatch.setattr("tnp.model.prediction_graphs.MOST_GRAPHS", 1)
    model, task = build(), make_task()
    encoding, captures = replayed(model, model.encode(task.context))
    for n in (5, 5, 3, 3, 3):
        model.predict(encoding, task.x_target[:, :n])
    assert captures.captured == 1


def test_graphs_made_in_inference_mode_serve_outside_of_it():
    model, task = build(), make_task()
    with torch.inference_mode():
        encoding, _ = replayed(model, model.encode(task.context))
        first = model.predict(encoding, task.x_target).mean
    for _ in range(2):
        assert torch.equal(model.predict(encoding, task.x_target).mean, first)


def test_a_graph_needs_a_gpu():
    with pytest.raises(RuntimeError, match="a CUDA graph needs a CUDA device: .* is on cpu"):
        build().encode(make_task().context, cuda_graph=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_captured_predictions_are_the_launched_ones():
    model, task = build().cuda(), make_task(n_target=9).to("cuda")
    launched, replayed = (model.encode(task.context, cuda_graph=on) for on in (False, True))
    for i in (0, 3, 1, 2):
        for n in (5, 2):
            x = task.x_target[:, i : i + n]
            found, expected = (model.predict(of, x).mean for of in (replayed, launched))
            assert torch.equal(found, expected)


def test_a_joint_draw_is_made_of_predictions_that_know_the_draws_before():
    """Its last target is drawn from what the model predicts with all others in the context."""
    model, task = build(), make_task(batch=1, n_target=3)
    torch.manual_seed(0)
    drawn = model.sample_jointly(task.context, task.x_target, n_samples=4000)
    assert drawn.shape == (4000, 1, 3, 1)
    x, y, _ = task.context
    x = torch.cat([x.expand(4000, -1, -1), task.x_target[:, :2].expand(4000, -1, -1)], 1)
    y = torch.cat([y.expand(4000, -1, -1), drawn[:, 0, :2]], 1)
    last = model.predict(Context(x, y), task.x_target[:, 2:].expand(4000, -1, -1))
    # Values of the CDF at what was drawn are uniform: by Kolmogorov and Smirnov, 1e-6 of all draws
    # are further away.
    levels = last.marginal_cdf(drawn[:, 0, 2:]).flatten().sort()[0]
    distance = (levels - torch.linspace(0, 1, 4000)).abs().max()
    assert distance < 2.69 / math.sqrt(4000)


def test_joint_draws_of_samples_of_other_sizes_are_those_of_each(monkeypatch):
    """Every draw stands in for its mean, so that both ways must come to the same."""
    monkeypatch.setattr(Prediction, "sample", lambda self: self.mean)
    model, task = build(), make_task(n_target=3)
    lengths = torch.tensor([7, 2], dtype=torch.int32)
    task = task.to(dtype=torch.float64)  # as one's own data comes
    short = Context(task.x_context[1:, :2], task.y_context[1:, :2])
    expected = model.sample_jointly(short, task.x_target[1:])
    task.x_context[1, 2:] = task.y_context[1, 2:] = float("nan")
    together = model.sample_jointly(task.context._replace(lengths=lengths), task.x_target, 2)
    assert together.shape == (2, 2, 3, 1)
    torch.testing.assert_close(together[:, 1:].float(), expected.expand(2, -1, -1, -1).float())


@pytest.mark.parametrize("n_samples", [0, -1, 1.5])
def test_a_number_of_samples_that_nobody_can_draw_is_named(n_samples):
    task = make_task()
    with pytest.raises(ValueError, match=f"n_samples is {n_samples}: it must be a whole number"):
        build().sample_jointly(task.context, task.x_target, n_samples)


def test_other_numbers_of_samples_and_budgets_are_named():
    model, task = build(), make_task()
    with pytest.raises(ValueError, match="max_bytes is 0: it must be a whole number, at least 1"):
        model.predict(task.context, task.x_target, max_bytes=0)
    with pytest.raises(TypeError, match="context is a Task: give its context, task.context"):
        model.predict(task, task.x_target)
    with pytest.raises(ValueError, match=r"x_context is \(2, 0, 1\): it must hold at least one"):
        model.predict(Context(task.x_context[:, :0], task.y_context[:, :0]), task.x_target)
    with pytest.raises(ValueError, match=r"context_lengths\[0\] is 9: it must be from 1 to 7"):
        model.encode(task.context._replace(lengths=torch.tensor([9, 1], dtype=torch.int32)))
    with pytest.raises(ValueError, match="x_target has 1 samples and the context 2"):
        model.predict(task.context, task.x_target[:1])


def test_points_on_the_cpu_that_are_not_finite_are_named():
    model, task = build(), make_task()
    task.y_context[1, 3] = float("nan")
    with pytest.raises(
        ValueError, match=r"y_context of sample 1, point 3, is \[nan\]: every value"
    ):
        model.predict(task.context, task.x_target)
    lengths = torch.tensor([7, 3], dtype=torch.int32)  # it is padding now
    assert (
        model.predict(task.context._replace(lengths=lengths), task.x_target).mean.isfinite().all()
    )
    x_target = task.x_target.clone()
    x_target[0, 2] = float("nan")  # spoils no other target
    nan = model.predict(make_task().context, x_target).mean.isnan()
    assert nan[0, 2].all() and nan.sum() == 1


def test_what_is_no_context_is_named():
    model, task = build(), make_task()
    with pytest.raises(TypeError, match="context is a tuple: it must be a tnp.tasks.Context"):
        model.predict((task.x_context, task.y_context), task.x_target)
    with pytest.raises(TypeError, match="context is a Encoding: it must be a tnp.tasks.Context"):
        model.sample_jointly(model.encode(task.context), task.x_target)
    with pytest.raises(ValueError, match="x_target has 1 samples and the context 2: they must"):
        model.sample_jointly(task.context, task.x_target[:1])
    with pytest.raises(ValueError, match="y_context is on meta and x_context on cpu: they must"):
        model.predict(task.context._replace(y=task.y_context.to("meta")), task.x_target)
    with pytest.raises(ValueError, match="x_target is torch.int64: it must be a float dtype"):
        model.predict(task.context, task.x_target.long())


def test_a_variant_is_one_or_its_name_and_a_dtype_is_one():
    config = build().config
    assert TransformerNP(config).variant == Variant.named("auto")
    assert TransformerNP(config, "fused").variant == Variant.named("fused")
    with pytest.raises(TypeError, match="variant is a int: it must be a Variant or the name of"):
        TransformerNP(config, 3)
    assert TransformerNP(config).compute_dtype == torch.float32
    with pytest.raises(ValueError, match="compute_dtype is 'bfloat16': it must be a float dtype"):
        TransformerNP(build().config, build().variant, "bfloat16")


def test_arrays_are_points_too():
    model, task = build(), make_task()
    arrays = Context(task.x_context.numpy(), task.y_context.numpy())
    expected = model.predict(task.context, task.x_target).mean
    assert torch.equal(model.predict(arrays, task.x_target.numpy()).mean, expected)
    assert model.sample_jointly(arrays, task.x_target.tolist()).shape == (1, 2, 5, 1)
    missing = np.ma.masked_greater(arrays.y, arrays.y[1].max() - 1e-6)
    sample, point = np.argwhere(missing.mask)[0][:2]
    with pytest.raises(ValueError, match=rf"y_context of sample {sample}, point {point}, is .nan"):
        model.predict(arrays._replace(y=missing), task.x_target)
    with pytest.raises(TypeError, match="x_context is a NoneType: it must be a torch.Tensor or an"):
        model.predict(arrays._replace(x=None), task.x_target)


def test_a_batch_of_no_sample_is_named():
    model, task = build(), make_task()
    none, message = task.x_target[:0], "it must hold at least one sample"
    for run in (
        lambda: model.predict(Context(none, none), none),
        lambda: model.predict(task.context, none),
        lambda: model.sample_jointly(Context(none, none), none),
        lambda: model.nll(none, none, none, none),
    ):
        with pytest.raises(ValueError, match=message):
            run()


def test_a_model_with_a_normalization_speaks_the_users_units():
    plain, task = build(), make_task()
    units = Normalization([1.7e9], [60.0], [300.0], [5.0])
    torch.manual_seed(0)
    model = TransformerNP(plain.config, plain.variant, torch.float32, normalization=units)
    raw = Task(
        task.x_context.double() * 60 + 1.7e9,
        task.y_context.double() * 5 + 300,
        task.x_target.double() * 60 + 1.7e9,
        task.y_target.double() * 5 + 300,
    )
    expected = plain.loss(task) + math.log(5.0)
    torch.testing.assert_close(model.loss(raw), expected)
    prediction = model.predict(raw.context, raw.x_target)
    torch.testing.assert_close(-prediction.log_prob(raw.y_target).mean().float(), expected)
    own = plain.predict(task.context, task.x_target)
    expected = own.quantile(0.9).double() * 5 + 300
    torch.testing.assert_close(prediction.quantile(0.9), expected, rtol=1e-6, atol=1e-4)
    assert model.sample_jointly(raw.context, raw.x_target).mean() > 200


@pytest.mark.parametrize("lengths", [None, [7, 4]])
def test_an_encoding_goes_to_pages_and_targets_read_it_there(lengths):
    """What `decode_attention` finds in pages is what attention finds in the encoding."""
    model, task = build(attention="reference", dtype=torch.float64).double(), make_task()
    if lengths is not None:
        task = replace(task, context_lengths=torch.tensor(lengths, dtype=torch.int32))
    encoding = model.encode(task.context)
    k, v = encoding.blocks[0]
    sizes = {"n_kv_heads": k.shape[1], "head_dim": k.shape[3], "dtype": k.dtype, "device": "cpu"}
    cache = PagedCache(6, page=3, n_layers=len(encoding.blocks), **sizes)
    handles = encoding.to_pages(cache)
    assert cache.n_keys(handles).tolist() == (lengths or [7, 7])
    q = torch.randn_like(k[:, :, :1])
    for layer, (k, v) in enumerate(encoding.blocks):
        table, n_keys = cache.page_table(handles), cache.n_keys(handles, layer)
        found = decode_attention(q, *cache.layer(layer), n_keys, table)
        expected = decode_attention(q, k, v, n_keys)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
    n_free = cache.n_free
    with pytest.raises(CacheFull, match="are needed"):
        encoding.to_pages(cache)
    assert cache.n_free == n_free
    for n_layers in (1, 3):
        other = PagedCache(6, page=3, n_layers=n_layers, **sizes)
        with pytest.raises(ValueError, match=f"has {n_layers} layers and the encoding 2"):
            encoding.to_pages(other)
        assert other.n_free == 6
