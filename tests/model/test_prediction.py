"""Tests predictions in chunks, from a kept encoding and from pages, and joint draws.

`tests/tasks/test_normalization_moments.py` holds them to closed forms.
"""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.model.test_transformer_np import build, make_task
from tests.refusals import assert_refused
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


def test_log_prob_is_the_loss():
    p, y = parameters(3).double(), torch.randn(2, 4, 3).double()
    prediction = Prediction(p, sigma_min=0.1)
    torch.testing.assert_close(-prediction.log_prob(y).mean(), mixture_nll(p, y, sigma_min=0.1))


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


@pytest.mark.parametrize("projection", ["torch", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_kept_encoding_predicts_as_the_model_does(projection, dtype, monkeypatch):
    """`fused` multiplies the queries' weight ahead of a prediction, and the product in a step."""
    model = build(dtype=dtype, projection=projection, skip_unread=projection == "fused")
    task, tolerance = make_task(), {torch.float32: 1e-5, torch.bfloat16: 4e-2}[dtype]
    assert model.blocks[0].attention.base2 == (projection == "fused")
    encoding, anew = model.encode(task.context), model.predict(task.context, task.x_target)
    monkeypatch.setattr("tnp.model.layers.project_qkv", None)  # no keys are made of targets
    kept = model.predict(encoding, task.x_target)
    assert torch.equal(anew.mean, kept.mean) and torch.equal(anew.variance, kept.variance)
    few = model.predict(encoding, task.x_target[:, :2])
    monkeypatch.undo()
    whole = Prediction(model(task.x_context, task.y_context, task.x_target).detach())
    for found, expected in ((kept.mean, whole.mean), (few.variance, whole.variance[:, :2])):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


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


def test_graphs_made_in_inference_mode_serve_outside_of_it_up_to_the_most(monkeypatch):
    monkeypatch.setattr("tnp.model.prediction_graphs.MOST_GRAPHS", 1)
    model, task = build(), make_task()
    with torch.inference_mode():
        encoding, captures = replayed(model, model.encode(task.context))
        first = model.predict(encoding, task.x_target).mean
    for _ in range(2):
        assert torch.equal(model.predict(encoding, task.x_target).mean, first)
    for _ in range(3):  # of another size, past the most graphs
        model.predict(encoding, task.x_target[:, :3])
    assert captures.captured == 1


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


def test_what_nobody_can_predict_is_named():
    model, task = build(), make_task()
    (x, y, _), x_target = task.context, task.x_target
    many, none = torch.tensor([9, 1], dtype=torch.int32), x_target[:0]

    def predict(context, x_target=x_target, **options):
        return lambda: model.predict(context, x_target, **options)

    def draw(context, x_target=x_target, n_samples=1):
        return lambda: model.sample_jointly(context, x_target, n_samples)

    assert_refused(
        *((draw(task.context, n_samples=n), f"n_samples is {n}: it must") for n in (0, -1, 1.5)),
        (predict(task.context, max_bytes=0), "max_bytes is 0: it must be a whole number, at least"),
        (predict(Context(x[:, :0], y[:, :0])), r"x_context is \(2, 0, 1\): it must hold at least"),
        (lambda: model.encode(task.context._replace(lengths=many)), r"lengths\[0\] is 9: it must"),
        (predict(task.context, x_target[:1]), "x_target has 1 samples and the context 2"),
        (draw(task.context, x_target[:1]), "x_target has 1 samples and the context 2: they must"),
        (predict(Context(x, y.to("meta"))), "y_context is on meta and x_context on cpu: they must"),
        (predict(task.context, x_target.long()), "x_target is torch.int64: it must be a float dt"),
        (predict(Context(none, none), none), "it must hold at least one sample"),
        (predict(task.context, none), "it must hold at least one sample"),
        (draw(Context(none, none), none), "it must hold at least one sample"),
        (lambda: model.nll(none, none, none, none), "it must hold at least one sample"),
        *((lambda p=p: Prediction(parameters()).quantile(p), "between 0 and 1")
          for p in (0.0, 1.0, -0.1, 2.0)),
    )  # fmt: skip
    assert_refused(
        (predict(task), "context is a Task: give its context, task.context"),
        (predict((x, y)), "context is a tuple: it must be a tnp.tasks.Context"),
        (draw(model.encode(task.context)), "context is a Encoding: it must be a tnp.tasks.Context"),
        error=TypeError,
    )
    with pytest.raises(RuntimeError, match="a CUDA graph needs a CUDA device: .* is on cpu"):
        model.encode(task.context, cuda_graph=True)


def test_points_on_the_cpu_that_are_not_finite_are_named():
    model, task = build(), make_task()
    task.y_context[1, 3] = float("nan")
    with pytest.raises(ValueError, match=r"y_context of sample 1, point 3, is \[nan\]: every val"):
        model.predict(task.context, task.x_target)
    lengths = torch.tensor([7, 3], dtype=torch.int32)  # it is padding now
    found = model.predict(task.context._replace(lengths=lengths), task.x_target)
    assert found.mean.isfinite().all()
    x_target = task.x_target.clone()
    x_target[0, 2] = float("nan")  # spoils no other target
    nan = model.predict(make_task().context, x_target).mean.isnan()
    assert nan[0, 2].all() and nan.sum() == 1


def in_units(plain: TransformerNP, task: Task) -> tuple[TransformerNP, Task]:
    """Returns the same model and task in seconds since 1970 and in kelvin."""
    units = Normalization([1.7e9], [60.0], [300.0], [5.0])
    model = TransformerNP(plain.config, plain.variant, torch.float32, normalization=units)
    model.load_state_dict(plain.state_dict())
    x, y = (lambda x: x.double() * 60 + 1.7e9), (lambda y: y.double() * 5 + 300)
    return model, Task(x(task.x_context), y(task.y_context), x(task.x_target), y(task.y_target))


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


def test_a_model_with_a_normalization_speaks_the_users_units():
    plain, task = build(), make_task()
    model, raw = in_units(plain, task)
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
    """`decode_attention` finds in pages what attention finds in the encoding."""
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
