"""Tests that a saved model predicts the same as any variant, and that no damaged one is used."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.model.test_transformer_np import CONFIG, build, make_task
from tests.refusals import assert_refused
from tnp.model import checkpoint
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import FAMILIES, Variant
from tnp.tasks.normalization import Normalization
from tnp.util import tensor_archive

UNITS = Normalization([1.0], [2.0], [3.0], [4.0])
OURS = Variant("ours", **dict.fromkeys(FAMILIES, "fused"), skip_unread=True, d_ff_storage=32)


def unlike_zero(**spec) -> TransformerNP:
    torch.manual_seed(3)
    config = replace(CONFIG, sigma_min=0.1)
    return TransformerNP(config, Variant("test", **spec), torch.float32, normalization=UNITS)


@pytest.mark.parametrize("before", [{}, {"d_ff_storage": 24}], ids=str)
@pytest.mark.parametrize("after", [Variant("plain"), Variant("wide", d_ff_storage=40), OURS])
def test_a_kept_model_predicts_the_same_as_any_variant(tmp_path, before, after):
    model, task = unlike_zero(**before), make_task()
    model.save(tmp_path / "model")
    again = TransformerNP.load(tmp_path / "model", after)
    assert (again.config, again.variant) == (model.config, after)
    assert again.normalization.numbers() == UNITS.numbers()
    expected, found = (m.predict(task.context, task.x_target) for m in (model, again))
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.variance, expected.variance, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [None, "fused", "auto"])
def test_weights_in_the_padding_are_not_left_out(tmp_path, name):
    """The specification's width is padded to 1408, and 21 is stored as it is."""
    small = TNPConfig(d_model=16, n_layers=1, n_heads=2, n_components=2)
    for config, width in ((small, 1408), (replace(small, d_ff=21), 21)):
        model = TransformerNP(config, *[name] * (name is not None))
        assert model.heads.width == width and model.heads.up.shape[1] == width
        for p in model.parameters():
            torch.nn.init.normal_(p)
        if width == config.d_ff:
            model.save(tmp_path)
        else:
            with pytest.raises(
                ValueError, match=r"mlp.up holds weights in its padding .units 1365"
            ):
                model.save(tmp_path)


def test_a_state_of_another_width_or_model_is_one_sentence():
    state = unlike_zero(d_ff_storage=40).state_dict()
    wide = r"up is 40 units wide in the state and 2\d in this mod"
    weights = checkpoint.unpadded_weights(build(TNPConfig(d_model=16, n_layers=1, n_heads=2)))
    assert_refused(
        (lambda: unlike_zero().load_state_dict(state), wide),
        (lambda: unlike_zero(d_ff_storage=24).load_state_dict(state), wide),
        (lambda: checkpoint.set_weights(unlike_zero(), weights),
         "the weights do not fit TNPConfig"),
    )  # fmt: skip
    unlike_zero(d_ff_storage=40).load_state_dict(state)


@pytest.mark.parametrize("number", [np.float64, np.float32, torch.tensor])
def test_a_model_of_numbers_of_numpy_and_torch_is_loaded_again(tmp_path, number):
    config = replace(CONFIG, sigma_min=number(0.25), heads_gain=number(0.5), d_y=np.int64(1))
    units = Normalization([number(1.0)], np.ones(1), torch.zeros(1), [np.float32(2.0)])
    model = TransformerNP(config, normalization=units)
    model.save(tmp_path)
    again = TransformerNP.load(tmp_path)
    assert again.config == config
    assert {type(value) for value in vars(config).values()} <= {int, float, type(None)}
    assert again.normalization.numbers() == units.numbers()
    for name in ("sigma_min", "heads_gain"):
        with pytest.raises(ValueError, match=f"{name} is True: it must be a number"):
            replace(CONFIG, **{name: True})


def test_what_cannot_be_loaded_is_refused_and_the_file_before_stays(tmp_path):
    file = tmp_path / "kept.pt"
    tensor_archive.save(file, {"about": 1})
    for value in (np.ones(3), lambda: 0, print):
        with pytest.raises(TypeError, match=r"cannot save .*kept.pt: about.x\[1\] is a "):
            tensor_archive.save(file, {"about": {"x": [1, value]}})
    assert tensor_archive.load(file, "cpu", {"about"}, "state", "") == {"about": 1}


def assigned(model: TransformerNP) -> TransformerNP:
    weights = copy.deepcopy(model.state_dict())
    model.to("meta").load_state_dict(weights, assign=True)
    return model


IN_PLACE = [
    lambda model: model.float(),
    lambda model: model.half().float(),
    lambda model: model.to(torch.bfloat16).to("cpu", torch.float32),
]


@pytest.mark.parametrize(
    "cast",
    [
        *IN_PLACE,
        assigned,
        lambda model: model.type(torch.float64),
        lambda model: copy.deepcopy(model).float(),
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: model.to("meta").to_empty(device="cpu"),
    ],
)
def test_units_are_exact_whatever_the_model_is_cast_to(cast):
    numbers = [[1.7e9 + 50.125], [10.1], [1e9 + 0.1], [1e-3]]
    model = TransformerNP(CONFIG, normalization=Normalization(*numbers))
    before = dict(model.normalization.named_buffers())
    found = cast(model).normalization
    tensors = [found.x_mean, found.x_deviation, found.y_mean, found.y_deviation]
    assert [x.tolist() for x in tensors] == numbers == list(found.numbers().values())
    assert all(x.dtype == torch.float64 for x in tensors)
    if cast in IN_PLACE:  # a CUDA graph reads them where they are
        assert all(x is before[name] for name, x in found.named_buffers())


def test_a_named_variant_and_another_dtype(tmp_path):
    unlike_zero().save(tmp_path)
    assert TransformerNP.load(tmp_path).compute_dtype == torch.float32
    model = TransformerNP.load(tmp_path, "auto", compute_dtype=torch.bfloat16)
    assert model.variant == Variant.named("auto")
    assert model.compute_dtype == torch.bfloat16
    wide = TransformerNP.load(tmp_path, Variant("wide", d_ff_storage=40))
    assert wide.heads.up[:, CONFIG.d_ff :].abs().max() == 0

    def load(*asked, **options):
        return lambda: TransformerNP.load(tmp_path, *asked, **options)

    assert_refused(
        (load("fastest"), "there is no variant 'fastest': choose from sdpa_flash"),
        *((load("auto", compute_dtype=dtype), "it must be a float dtype, such as torch.bfloat16")
          for dtype in ("float32", torch.int32)),
    )  # fmt: skip
    if not torch.cuda.is_available():
        assert_refused((load("auto", "cuda"), "device is cuda, and no NVIDIA GPU is visible here"))


def test_a_file_that_is_no_model_of_this_version_is_one_sentence_and_is_replaced(tmp_path):
    def load():
        TransformerNP.load(tmp_path, Variant("plain"))

    assert_refused((load, r"holds no model.pt: name a folder that TransformerNP.save"))
    unlike_zero().save(tmp_path)
    file = tmp_path / checkpoint.FILE
    state = tensor_archive.load(file, "cpu", checkpoint.KEYS, "model", "")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    assert_refused((load, "is damaged, or is none at all: name a folder"))
    for changed, sentence in (
        ({"weights": {}}, "lacks compute_dtype, config, normalization"),
        (state | {"compute_dtype": "float7"}, "is of another version of tnp"),
        (state | {"compute_dtype": "nn"}, "is of another version of tnp|compute_dtype is <mod"),
        (state | {"config": state["config"] | {"d_z": 1}}, "is of another version of tnp"),
    ):
        tensor_archive.save(file, changed)
        assert_refused((load, sentence))
    torch.save(state | {"config": np.float64(1.0)}, file)  # it would run code
    tensor_archive.seal(file)
    assert_refused((load, "holds numpy.*scalar, which is neither a number, a text"))
    unlike_zero().save(tmp_path)
    load()
