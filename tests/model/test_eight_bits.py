"""Tests variants in 8 bits: their switches, what they are close to, and what they refuse."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from tests.model.test_transformer_np import loss_and_gradients, make_task
from tests.refusals import assert_refused
from tnp.dispatch import devices
from tnp.dispatch.registry import catalog
from tnp.model.buckets import Buckets
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import FAMILIES, Variant
from tnp.tasks.task import Task
from tnp.train.step import TrainingStep

CONFIG = TNPConfig(d_model=128, n_layers=2, n_heads=2, d_ff=96, n_components=2)
NAMES = ["fp8", "fp8_packed", "fp8_attention"]
FP8, PACKED, ATTENTION = map(Variant.named, NAMES)
ON_CPU = torch.device("cpu")


def build(variant: Variant | str, config: TNPConfig = CONFIG, **options) -> TransformerNP:
    torch.manual_seed(0)
    return TransformerNP(config, variant, torch.bfloat16, **options)


def with_lengths(task: Task) -> Task:
    """Returns the task with 3 points of context in the second sample, and 20 and 11 targets."""
    lengths = torch.tensor([[task.x_context.shape[1], 3], [20, 11]], dtype=torch.int32)
    return replace(task, context_lengths=lengths[0], target_lengths=lengths[1])


def test_they_are_ours_in_16_bits_but_for_products_in_8():
    fused = Variant.named("fused")
    narrow = [family for family, name in FP8.implementations().items() if name == "e4m3"]
    assert "mlp" in narrow and "attention" not in narrow
    assert replace(FP8, name="", **dict.fromkeys(narrow, "fused")) == replace(fused, name="")
    assert replace(PACKED, name="", pack=False) == replace(FP8, name="")
    in_8_bits = {"attention": "e4m3", "centred_keys": True}
    assert replace(FP8, name="", **in_8_bits) == replace(ATTENTION, name="")
    for variant, expected in ((FP8, narrow), (ATTENTION, ["attention", *narrow])):
        assert [operator.name for operator, _ in variant.in_8_bits] == expected
    for variant in (FP8, PACKED, ATTENTION):
        assert variant.base2 and dict(variant.block)["mlp"] == "e4m3"
        assert variant.rms_norm_linear is None and variant.role() == "own"
        assert variant.decode_attention == "triton"
    assert (FP8.buffered_attention, ATTENTION.buffered_attention) == ("triton", None)
    assert not any(variant.without_8_bits.in_8_bits for variant in (FP8, PACKED, ATTENTION))
    assert replace(FP8.without_8_bits, name="fused") == fused == fused.without_8_bits
    assert not fused.in_8_bits and not Variant.named("auto").in_8_bits


def test_auto_never_chooses_8_bits():
    for family in FAMILIES:
        for operator in catalog().family(family):
            for name in catalog().candidates(operator.name, "auto"):
                own = catalog().listed(operator.name, name).own
                assert own is None or not own.precision


@pytest.mark.parametrize("variant", NAMES)
def test_weights_load_in_either_precision(tmp_path, variant):
    model, narrow = build("fused"), build(variant)
    model.save(tmp_path / "wide")
    again = TransformerNP.load(tmp_path / "wide", variant)
    assert again.variant == Variant.named(variant) and again.compute_dtype == torch.bfloat16
    narrow.save(tmp_path / "narrow")
    back = TransformerNP.load(tmp_path / "narrow", "fused")
    for name, weight in model.state_dict().items():
        assert weight.equal(again.state_dict()[name]) and weight.equal(back.state_dict()[name])


def test_what_8_bits_cannot_run_is_refused_before_it_runs(monkeypatch):
    narrow, buffered = replace(CONFIG, d_model=72), replace(CONFIG, buffer=4)
    in_attention = "variant 'fp8_attention' cannot run attention in e4m3 here"
    assert_refused(
        (lambda: build("fp8", narrow),
         "'fp8' cannot run mlp in e4m3 here: D is 72: it takes multiples of 16. Choose variant"),
        (lambda: build("fp8_attention", replace(CONFIG, n_heads=4)),
         f"{in_attention}: it takes head_dim 64, not 32. Choose variant 'auto'"),
        *((lambda name=name, dtype=dtype: TransformerNP(CONFIG, name, dtype),
           f"it takes bfloat16, not {str(dtype)[6:]}. Choose variant 'auto'")
          for dtype in (torch.float16, torch.float32, torch.float64) for name in NAMES),
        (lambda: build("fp8_packed", buffered), "packs rows: a model with a buffer does not"),
        (lambda: build("fp8_attention", buffered), "has centred_keys: a mean of a sample's"),
        (lambda: build(replace(ATTENTION, centred_keys=False), buffered),
         "has attention 'e4m3': rows of a buffer need one that is causal"),
        (lambda: replace(ATTENTION, pack=True), "centred_keys takes a mean of each sample's rows"),
    )  # fmt: skip
    task, models = make_task(CONFIG), {"mlp": build("fp8"), "attention": build("fp8_attention")}
    calls = (
        lambda model: model(task.x_context, task.y_context, task.x_target),
        lambda model: model.loss(task),
        lambda model: model.encode(task.context),
        lambda model: model.predict(task.context, task.x_target),
        lambda model: model.sample_jointly(task.context, task.x_target),
        lambda model: TrainingStep(model, learning_rate=1e-4),
    )
    for target, sentence in (
        (devices.CPU, "Triton kernels run on CUDA"),
        (devices.named("A100"), "it needs compute capability 8.9 or newer, this GPU has 8.0"),
        (devices.named("A10"), "it needs compute capability 8.9 or newer, this GPU has 8.6"),
    ):
        monkeypatch.setitem(devices._seen, ON_CPU, target)
        for op, model in models.items():
            name = model.variant.name
            refused = f"^variant {name!r} cannot run {op} in e4m3 here: {sentence}.*[.] Choose"
            assert_refused(*((partial(call, model), refused) for call in calls), error=RuntimeError)
    monkeypatch.setitem(devices._seen, ON_CPU, devices.INTERPRETER)
    for name in NAMES:  # on a CPU a model computes in float32 unless told otherwise
        model = TransformerNP(CONFIG, name)
        assert_refused((partial(model.loss, task), "bfloat16, not float32"), error=RuntimeError)


@torch.no_grad()
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize(
    ("variant", "options"),
    [(FP8, {}), (PACKED, {}), (ATTENTION, {}), (replace(FP8, recompute_above=100), {})],
)
def test_a_prediction_is_close_to_that_in_16_bits(variant, options, ragged):
    """The bound is the error of two layers, each with a rounding to 3 bits of the mantissa."""
    task = make_task(CONFIG, n_context=150, n_target=20)
    if ragged:
        task = with_lengths(task)
    exact = TransformerNP(CONFIG, Variant("plain"), torch.float32)
    model = build(variant, **options)
    exact.load_state_dict(model.state_dict())
    tensors = task.x_context, task.y_context, task.x_target, task.context_lengths
    expected, found = exact(*tensors), model(*tensors)
    errors = {"fp8": found, "16 bits": build("fused")(*tensors)}
    errors = {name: (x - expected).norm() / expected.norm() for name, x in errors.items()}
    assert errors["16 bits"] < errors["fp8"] < 2**-4
    encoded = model.encode(task.context)
    at_once = model.predict(task.context, task.x_target)
    assert model.predict(encoded, task.x_target).mean.equal(at_once.mean)
    assert (at_once.mean - exact.predict(task.context, task.x_target).mean).abs().max() < 0.1


def distance(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Returns the relative error of all gradients together."""
    pairs = [(found[name].float(), x) for name, x in expected.items() if name != "loss"]
    off = sum((x - y).square().sum() for x, y in pairs)
    return float(off / sum(y.square().sum() for _, y in pairs)) ** 0.5


def test_gradients_are_those_of_16_bits_but_for_roundings_and_no_switch_changes_them():
    """Rounding to 3 bits of the mantissa changes a number by 2.6 % (root mean square), and so the
    product of two by 3.7 %. Recomputed blocks keep the sum of stream and update in bfloat16.
    """
    task = with_lengths(make_task(CONFIG, n_context=110, n_target=20))
    exact, model = TransformerNP(CONFIG, Variant("plain"), torch.float32), build(FP8)
    exact.load_state_dict(model.state_dict())
    expected, found = (loss_and_gradients(each, task) for each in (exact, model))
    in_16_bits, in_attention = (
        loss_and_gradients(build(one), task) for one in ("fused_centred", ATTENTION)
    )
    assert distance(in_16_bits, expected) < 0.01
    for narrow in (found, in_attention):
        assert 0.02 < distance(narrow, expected) < 0.08
    one_by_one = build(FP8)  # a hook keeps the layers of a block apart
    for block in one_by_one.blocks:
        block.mlp.register_forward_hook(lambda *_: None)
    apart = loss_and_gradients(one_by_one, task)
    assert all(apart[name].equal(x) for name, x in found.items())
    for other in (build(FP8, checkpoint=True), build(replace(FP8, recompute_above=100))):
        again = loss_and_gradients(other, task)
        assert again["loss"].equal(found["loss"]) and distance(again, found) < 2**-8


def test_a_model_with_a_buffer_is_close_to_that_in_16_bits():
    """The bound is that of a prediction: see above."""
    config = replace(CONFIG, n_layers=1, buffer=4)
    task = make_task(config, n_context=40, n_target=9)
    narrow, wide = build("fp8", config), build("fused", config)
    found = loss_and_gradients(narrow, task)
    assert 0.01 < distance(found, loss_and_gradients(wide, task)) < 0.08
    with torch.no_grad():
        difference = narrow.joint_log_density(task) - wide.joint_log_density(task)
    assert 0 < difference.abs().max() < 9 * 0.1


def test_steps_of_varying_sizes_are_those_of_16_bits():
    config, task = replace(CONFIG, n_layers=1), make_task(CONFIG, n_context=110, n_target=20)
    steps = [
        TrainingStep(build(one, config), learning_rate=1e-3, buckets=Buckets(128, 64))
        for one in (FP8, PACKED, Variant.named("fused"))
    ]
    for each in (task, with_lengths(task), make_task(CONFIG, n_context=9, n_target=40)):
        *narrow, wide = (step(each) for step in steps)
        assert all(0 < (loss - wide).abs() < 0.02 for loss in narrow)


def test_a_compiled_step_is_the_eager_one():
    config, task = replace(CONFIG, n_layers=1), make_task(CONFIG, n_context=40, n_target=9)
    eager, compiled = (
        TrainingStep(build(one, config), learning_rate=1e-3)
        for one in (FP8, replace(FP8, compile=True))
    )
    assert [eager(task).item() for _ in range(2)] == [compiled(task).item() for _ in range(2)]


@torch.no_grad()
def test_targets_do_not_see_one_another():
    """A block of 128 rows shares a scale, a power of two, and rows of unlike sizes lose nothing."""
    model, task = build(FP8), make_task(CONFIG, n_context=40, n_target=140)
    together = model.predict(task.context, task.x_target)
    alone = model.predict(task.context, task.x_target[:, 7:8])
    assert (alone.mean[:, 0] - together.mean[:, 7]).abs().max() < 2**-6
    spoiled = task.x_target.clone()
    spoiled[0, 3] = float("nan")
    found = model.predict(task.context, spoiled).mean
    assert found[0, 3].isnan().all()
    others = torch.ones(2, 140, dtype=torch.bool)
    others[0, 3] = False
    assert (found[others] - together.mean[others]).abs().max() < 2**-6
