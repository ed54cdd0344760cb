"""Bad input: one sentence that names the place, the value and what would be right."""

import copy
import re
from pathlib import Path

import pytest
import yaml

from workflow.validation import validate

ROOT = Path(__file__).parents[2]
TINY = yaml.safe_load((Path(__file__).parent / "config.yaml").read_text())


@pytest.mark.parametrize("file", ["config.yaml", "tests/workflow/config.yaml"])
def test_committed_configurations_are_valid(file):
    validate(yaml.safe_load((ROOT / file).read_text()))


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("tpying", 1, "config.yaml: unknown key 'tpying'"),
        ("shapes.tiny.n_contxt", 4, "unknown key 'n_contxt': did you mean 'n_context'"),
        ("shapes.tiny.batch", 0, "shapes.tiny.batch: 0 must be at least 1"),
        ("shapes.tiny.n_context", -5, "shapes.tiny.n_context: -5 must be at least 1"),
        ("shapes.tiny.n_target", "many", "'many' must be of type integer"),
        ("model.n_layers", True, "model.n_layers: True must be of type integer"),
        ("model.n_heads", 5, "d_model 32 must be a multiple of n_heads 5"),
        ("timing.timeout_s", 0, "timing.timeout_s: 0 must be larger than 0"),
        ("device", "gpu", "device: 'gpu'"),
        ("baseline", "sdpa_flsh", "unknown variant 'sdpa_flsh': did you mean 'sdpa_flash'"),
        ("steps.cpu.variants", ["fused"], "steps.cpu.variants: unknown variant 'fused'"),
        ("steps.cpu.shapes", ["small"], "steps.cpu.shapes: unknown shape 'small'"),
        ("steps.cpu.devices", ["tpu"], "steps.cpu.devices[0]: 'tpu' must be one of cuda, cpu"),
        ("variants.separate.attention", "seperate", "unknown implementation 'seperate'"),
        ("variants.separate.d_ff_storage", 40, "d_ff_storage: 40 is smaller than"),
        ("ops.rope", {"devices": ["cpu"], "shapes": ["tiny"], "implementations": ["a"],
                      "replicates": 1}, "ops: unknown operator 'rope'"),
        ("ops.attention.implementations", ["nope"], "unknown implementation 'nope'"),
        ("gates", ["baselin"], "gates: unknown gate 'baselin': did you mean 'baseline'"),
        ("training.gp_tiny.shape", "huge", "training.gp_tiny.shape: unknown shape 'huge'"),
        ("training.gp_tiny.source", "text", "'text' must be one of gaussian_process, images"),
    ],
)  # fmt: skip
def test_bad_value_is_named(path, value, sentence):
    config = copy.deepcopy(TINY)
    *parents, last = path.split(".")
    place = config
    for parent in parents:
        place = place[parent]
    place[last] = value
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        validate(config)
    assert "\n" not in str(error.value)


def test_missing_key_is_named():
    config = copy.deepcopy(TINY)
    del config["shapes"]["tiny"]["batch"]
    with pytest.raises(ValueError, match="shapes.tiny: 'batch' is a required property"):
        validate(config)
