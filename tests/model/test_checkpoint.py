"""A model that is kept: the same predictions again, as any variant, and nothing damaged is used."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.model.test_transformer_np import CONFIG, build, make_task
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
                ValueError, match=r"mlp.up holds weights in its padding, units 1365"
            ):
                model.save(tmp_path)


def test_a_state_of_another_width_is_one_sentence():
    state = unlike_zero(d_ff_storage=40).state_dict()
    for spec in ({}, {"d_ff_storage": 24}):
        with pytest.raises(
            ValueError, match=r"up is 40 units wide in the state and 2\d in this mod"
        ):
            unlike_zero(**spec).load_state_dict(state)
    unlike_zero(d_ff_storage=40).load_state_dict(state)


@pytest.mark.parametrize("number", [np.float64, np.float32, torch.tensor])
def test_a_model_of_numbers_of_numpy_and_torch_is_loaded_again(tmp_path, number):
    config = replace(CONFIG, sigma_min=number(0.25), heads_gain=number(0.5), d_y=np.int64(1))
    units = Normalization([number(1.0)], np.ones(1), torch.zeros(1), [np.float32(2.0)])
    model = TransformerNP(config, normalization=units)
    model.save(tmp_path)
    again = TransformerNP.load(tmp_path)
    assert again.config == config and {type(v) for v in vars(config).values()} <= {
        int,
        float,
        type(None),
    }
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


@pytest.mark.parametrize(
    "cast",
    [
        assigned,
        lambda model: model.float(),
        lambda model: model.half().float(),
        lambda model: model.to(torch.bfloat16).to("cpu", torch.float32),
        lambda model: model.type(torch.float64),
        lambda model: copy.deepcopy(model).float(),
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: model.to("meta").to_empty(device="cpu"),
    ],
)
def test_units_are_exact_whatever_the_model_is_cast_to(cast):
    numbers = [[1.7e9 + 50.125], [10.1], [1e9 + 0.1], [1e-3]]
    units = Normalization(*numbers)
    model = TransformerNP(CONFIG, normalization=units)
    found = cast(model).normalization
    tensors = [found.x_mean, found.x_deviation, found.y_mean, found.y_deviation]
    assert [x.tolist() for x in tensors] == numbers == list(found.numbers().values())
    assert all(x.dtype == torch.float64 for x in tensors)


def test_units_stay_where_a_cuda_graph_reads_them():
    units = Normalization([1.0], [2.0], [3.0], [4.0])
    before = dict(units.named_buffers())
    units.to("cpu").half().to("cpu", torch.float32)
    assert all(x is before[name] for name, x in units.named_buffers())


def test_padding_stays_zero_where_a_model_held_other_numbers(tmp_path):
    unlike_zero().save(tmp_path)
    again = TransformerNP.load(tmp_path, Variant("wide", d_ff_storage=40))
    assert again.heads.up[:, CONFIG.d_ff :].abs().max() == 0


def test_a_named_variant_and_another_dtype(tmp_path):
    unlike_zero().save(tmp_path)
    model = TransformerNP.load(tmp_path, "auto", compute_dtype=torch.bfloat16)
    assert model.variant == Variant.named("auto")
    assert model.compute_dtype == torch.bfloat16
    with pytest.raises(ValueError, match="there is no variant 'fastest': choose from sdpa_flash"):
        TransformerNP.load(tmp_path, "fastest")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="device is cuda, and no NVIDIA GPU is visible here"):
        TransformerNP.load(tmp_path, Variant("plain"), "cuda")


def test_a_folder_without_a_model_is_one_sentence(tmp_path):
    with pytest.raises(
        ValueError, match=r"holds no model.pt: name a folder that TransformerNP.save"
    ):
        TransformerNP.load(tmp_path, Variant("plain"))


def test_a_damaged_model_is_one_sentence_and_what_replaces_it_is_whole(tmp_path):
    unlike_zero().save(tmp_path)
    file = tmp_path / checkpoint.FILE
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged, or is none at all: name a folder"):
        TransformerNP.load(tmp_path, Variant("plain"))
    unlike_zero().save(tmp_path)
    TransformerNP.load(tmp_path, Variant("plain"))
    tensor_archive.save(file, {"weights": {}})
    with pytest.raises(ValueError, match="lacks compute_dtype, config, normalization"):
        TransformerNP.load(tmp_path, Variant("plain"))


@pytest.mark.parametrize("dtype", ["float7", "nn"])
def test_a_model_of_another_version_is_one_sentence(tmp_path, dtype):
    unlike_zero().save(tmp_path)
    file = tmp_path / checkpoint.FILE
    state = tensor_archive.load(file, "cpu", checkpoint.KEYS, "model", "")
    tensor_archive.save(file, state | {"compute_dtype": dtype})
    with pytest.raises(ValueError, match="was not written by this version|compute_dtype is <mod"):
        TransformerNP.load(tmp_path, Variant("plain"))
    tensor_archive.save(file, state | {"config": state["config"] | {"d_z": 1}})
    with pytest.raises(ValueError, match="was not written by this version"):
        TransformerNP.load(tmp_path, Variant("plain"))


def test_a_dtype_that_no_model_computes_in_is_refused(tmp_path):
    unlike_zero().save(tmp_path)
    for dtype in ("float32", torch.int32):
        with pytest.raises(ValueError, match="it must be a float dtype, such as torch.bfloat16"):
            TransformerNP.load(tmp_path, Variant("plain"), compute_dtype=dtype)


def test_what_would_run_code_is_named(tmp_path):
    unlike_zero().save(tmp_path)
    file = tmp_path / checkpoint.FILE
    state = tensor_archive.load(file, "cpu", checkpoint.KEYS, "model", "")
    torch.save(state | {"config": np.float64(1.0)}, file)
    tensor_archive.seal(file)
    with pytest.raises(ValueError, match="holds numpy.*scalar, which is neither a number, a text"):
        TransformerNP.load(tmp_path)


def test_the_default_dtype_is_that_of_the_device_it_is_loaded_on(tmp_path):
    TransformerNP(CONFIG).save(tmp_path)
    model = TransformerNP.load(tmp_path)
    assert model.compute_dtype == torch.float32


def test_weights_of_another_model_are_refused():
    weights = checkpoint.unpadded_weights(build(TNPConfig(d_model=16, n_layers=1, n_heads=2)))
    with pytest.raises(ValueError, match="weights are not of a model with TNPConfig"):
        checkpoint.set_weights(unlike_zero(), weights)
