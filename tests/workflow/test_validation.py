"""Bad input: one sentence that names the place, the value and what would be right."""

import copy
import re
from pathlib import Path

import pytest
import yaml

from workflow.validation import validate

ROOT = Path(__file__).parents[2]
TINY = yaml.safe_load((Path(__file__).parent / "config.yaml").read_text())
TINY["ablation"] = {
    "devices": ["cpu"],
    "base": "sdpa_flash",
    "full": "separate",
    "components": ["attention"],
    "shapes": {"tiny": {"cuda_graph": False, "replicates": 1}},
}


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
        ("device", "gpu", "device: 'gpu' must be auto, cpu, cuda, or the slug of a GPU"),
        ("timing.warmup_s", "3e-4", "timing.warmup_s: '3e-4' is text to YAML"),
        ("timing.warmup_s", "0.5", "'0.5' must be of type number"),
        ("steps.cpu.variants", ["sdpa_flsh"], "'sdpa_flsh': did you mean 'sdpa_flash'"),
        ("steps.cpu.variants", ["fused"], "steps.cpu.variants: unknown variant 'fused'"),
        ("steps.cpu.shapes", ["small"], "steps.cpu.shapes: unknown shape 'small'"),
        ("steps.cpu.devices", ["tpu"], "steps.cpu.devices[0]: 'tpu' must be one of cuda, cpu"),
        ("variants.separate.attention", "seperate", "unknown implementation 'seperate'"),
        ("variants.separate.d_ff_storage", 40, "d_ff_storage: 40 is smaller than"),
        ("ops.rope", {"devices": ["cpu"], "shapes": ["tiny"], "implementations": ["a"],
                      "replicates": 1}, "ops: unknown operator 'rope'"),
        ("ops.attention.implementations", ["nope"], "unknown implementation 'nope'"),
        ("ops.embedding", {"devices": ["cpu"], "shapes": ["tiny"], "implementations": ["torch"],
                           "replicates": 1}, "ops: unknown operator 'embedding'"),
        ("variants.separate.mlp", "fusd", "variants.separate.mlp: unknown implementation 'fusd'"),
        ("variants.separate.skip_unread", 1, "skip_unread: 1 must be of type boolean"),
        ("variants.only_mlp", {"attention": "fused"}, "are the ablation's: rename the variant"),
        ("steps.ablation", {"devices": ["cpu"], "shapes": [], "variants": [], "replicates": 1,
                            "checkpoint": [False], "cuda_graph": [False]},
         "steps.ablation: that is section ablation"),
        ("ablation.base", "sdpa", "ablation.base: unknown variant 'sdpa'"),
        ("ablation.full", "sdpa_flash", "unknown difference of base and full 'attention'"),
        ("ablation.components", ["mlp"], "unknown difference of base and full 'mlp'"),
        ("ablation.shapes", {"huge": {"cuda_graph": True, "replicates": 1}},
         "ablation.shapes: unknown shape 'huge'"),
        ("gates", ["baselin"], "gates: unknown gate 'baselin': did you mean 'baseline'"),
        ("training.gp_tiny.shape", "huge", "training.gp_tiny.shape: unknown shape 'huge'"),
        ("training.gp_tiny.warmup_steps", 10**6, "1000000 must be at most steps"),
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


def test_an_ablation_goes_from_pytorchs_to_ours():
    config = copy.deepcopy(TINY)
    config["ablation"] |= {"base": "separate", "full": "sdpa_flash"}
    with pytest.raises(ValueError, match="must be one of PyTorch's variants"):
        validate(config)


def test_missing_key_is_named():
    config = copy.deepcopy(TINY)
    del config["shapes"]["tiny"]["batch"]
    with pytest.raises(ValueError, match="shapes.tiny: 'batch' is a required property"):
        validate(config)
