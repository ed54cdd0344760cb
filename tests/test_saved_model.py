"""A model that is kept: the same predictions again, as any variant, and nothing damaged is used."""

from dataclasses import replace

import pytest
import torch

from tests.test_model import CONFIG, build, make_task
from tnp import archive, saved_model
from tnp.model import TNPConfig, TransformerNP
from tnp.normalization import Normalization
from tnp.variants import FAMILIES, Variant

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
    file = tmp_path / saved_model.FILE
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is damaged, or is none at all: name a folder"):
        TransformerNP.load(tmp_path, Variant("plain"))
    unlike_zero().save(tmp_path)
    TransformerNP.load(tmp_path, Variant("plain"))
    archive.save(file, {"weights": {}})
    with pytest.raises(ValueError, match="lacks compute_dtype, config, normalization"):
        TransformerNP.load(tmp_path, Variant("plain"))


@pytest.mark.parametrize("dtype", ["float7", "nn"])
def test_a_model_of_another_version_is_one_sentence(tmp_path, dtype):
    unlike_zero().save(tmp_path)
    file = tmp_path / saved_model.FILE
    state = archive.load(file, "cpu", saved_model.KEYS, "model", "")
    archive.save(file, state | {"compute_dtype": dtype})
    with pytest.raises(ValueError, match="was not written by this version|compute_dtype is <mod"):
        TransformerNP.load(tmp_path, Variant("plain"))
    archive.save(file, state | {"config": state["config"] | {"d_z": 1}})
    with pytest.raises(ValueError, match="was not written by this version"):
        TransformerNP.load(tmp_path, Variant("plain"))


def test_a_dtype_that_no_model_computes_in_is_refused(tmp_path):
    unlike_zero().save(tmp_path)
    for dtype in ("float32", torch.int32):
        with pytest.raises(ValueError, match="it must be a float dtype, such as torch.bfloat16"):
            TransformerNP.load(tmp_path, Variant("plain"), compute_dtype=dtype)


def test_weights_of_another_model_are_refused():
    weights = saved_model.unpadded_weights(build(TNPConfig(d_model=16, n_layers=1, n_heads=2)))
    with pytest.raises(ValueError, match="weights are not of a model with TNPConfig"):
        saved_model.set_weights(unlike_zero(), weights)
