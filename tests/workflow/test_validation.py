"""Bad input: one sentence that names the line, the place, the value and what would be right."""

import copy
import re
from pathlib import Path

import pytest
import yaml

from tnp.gates import GATES, gates_of, generic_gates
from workflow.configuration import places
from workflow.validation import validate

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())
TINY = yaml.safe_load((Path(__file__).parent / "config.yaml").read_text())
EVERY = [*GATES, *generic_gates()]
TINY["gates"] = EVERY
TINY["variants"]["separate"] = {"attention": "separate"}
TINY["steps"]["cpu"]["variants"] = ["sdpa_flash", "separate"]
TINY["tuning"] = {"shapes": ["tiny"], "operators": ["attention"]}
# Of an operator.
STUDY = {
    "devices": ["cpu"],
    "priority": 1,
    "shapes": ["tiny"],
    "implementations": ["torch"],
    "replicates": 1,
}
SWIGLU = {key: value for key, value in STUDY.items() if key != "shapes"}
TINY["ablation"] = {
    "devices": ["cpu"],
    "priority": 1,
    "base": "sdpa_flash",
    "full": "separate",
    "components": ["attention"],
    "shapes": {"tiny": {"cuda_graph": False, "replicates": 1}},
}
LARGE = 2**31
NOT_READ = "must be a finite number"


@pytest.mark.parametrize("file", ["config.yaml", "tests/workflow/config.yaml"])
def test_committed_configurations_are_valid(file):
    written = places(str(ROOT / file), [], {})
    validate(yaml.safe_load((ROOT / file).read_text()), written)


def changed(path: str, value: object) -> dict:
    config = copy.deepcopy(TINY)
    *parents, last = path.split(".")
    place = config
    for parent in parents:
        place = place[parent]
    place[last] = value
    return config


@pytest.mark.parametrize(
    ("path", "value", "sentence"),
    [
        ("tpying", 1, "config.yaml: unknown key 'tpying'"),
        ("shapes.tiny.n_contxt", 4, "unknown key 'n_contxt': did you mean 'n_context'"),
        ("shapes.tiny.batch", 0, "shapes.tiny.batch: 0 must be at least 1"),
        (
            "shapes.same",
            {"batch": 2, "n_context": 24, "n_target": 8},
            "shapes.same: has the sizes of shape 'tiny': use 'tiny' alone",
        ),
        ("shapes.tiny.batch", 2.0, "shapes.tiny.batch: 2.0 must be a whole number"),
        ("shapes.tiny.batch", None, "shapes.tiny.batch: an empty value must be a whole number"),
        ("shapes.tiny.n_context", -5, "shapes.tiny.n_context: -5 must be at least 1"),
        ("shapes.tiny.n_context", 10**12, "n_context: 1000000000000 must be at most 2147483647"),
        ("shapes.tiny.n_context", LARGE - 1,
         "shapes.tiny: n_context 2147483647 and n_target 8 are 2147483655 points: they must be at "
         "most 2147483647"),
        ("shapes.tiny.n_target", "many", "'many' must be a whole number"),
        ("shapes.tiny", [1, 2], "shapes.tiny: [1, 2] must be keys with values"),
        ("shapes", {}, "shapes: {} must not be empty"),
        (f"shapes.{'a' * 49}", {"batch": 1, "n_context": 1, "n_target": 1},
         "must be a name of at most 48 small letters"),
        ("shapes.Tiny", {"batch": 1, "n_context": 1, "n_target": 1}, "'Tiny' must be a name of"),
        ("model.n_layers", True, "model.n_layers: true must be a whole number"),
        ("model.n_heads", 5, "model: d_model 32 must be a multiple of n_heads 5"),
        ("model.d_model", 48, "model: attention 'separate' cannot run it: it takes head_dim "
         "16, 32, 48, 64, 80, 96, 128, 192, 256, not 24"),
        ("timing.timeout_s", 0, "timing.timeout_s: 0 must be larger than 0"),
        ("timing.timeout_s", float("inf"), f"timing.timeout_s: inf {NOT_READ}"),
        ("timing.timeout_s", 1e300, "timing.timeout_s: 1e+300 must be at most 1000000"),
        ("timing.warmup_s", float("nan"), f"timing.warmup_s: nan {NOT_READ}"),
        ("timing.long_step_s", float("nan"), f"timing.long_step_s: nan {NOT_READ}"),
        ("device", "gpu", "device: 'gpu' must be auto, cpu, cuda, or the slug of a GPU"),
        ("timing.warmup_s", "3e-4", "timing.warmup_s: '3e-4' is text to YAML"),
        ("timing.warmup_s", "0.5", f"'0.5' {NOT_READ}"),
        (
            "shapes.tiny.vary",
            {"n_context": [3, 64], "n_target": [8, 8]},
            "shapes.tiny: n_context is 24: it must be 34, the mean of 3 to 64",
        ),
        (
            "shapes.tiny.vary",
            {"n_context": [24, 24], "n_target": [9, 7]},
            "shapes.tiny.vary.n_target: [9, 7] must go from the smallest to the largest",
        ),
        (
            "training.gp_tiny.vary",
            {"n_context": [9, 4], "n_target": [8, 8]},
            "training.gp_tiny.vary.n_context: [9, 4] must go from the smallest to the largest",
        ),
        (
            "training.gp_tiny.vary",
            {"n_context": [4, 9], "n_target": [8, 8], "together": 16},
            "training.gp_tiny.vary.together: 16 must be at least 17, the largest context and",
        ),
        (
            "training.gp_tiny.vary",
            {"n_context": [4, 9], "n_target": [8, 8], "each": "sample"},
            "training.gp_tiny.vary.each: sizes of a training run are drawn for each batch",
        ),
        (
            "shapes.tiny.vary",
            {"n_context": [24, 24], "n_target": [8, 8], "log": True},
            "shapes.tiny.vary.log: log is for training runs",
        ),
        ("steps.cpu.variants", ["sdpa_flsh"], "'sdpa_flsh': did you mean 'sdpa_flash'"),
        ("steps.cpu.variants", ["own"], "steps.cpu.variants: unknown variant 'own'"),
        ("steps.cpu.variants", "separate", "steps.cpu.variants: 'separate' must be a list"),
        ("steps.cpu.shapes", ["small"], "steps.cpu.shapes: unknown shape 'small'"),
        ("steps.cpu.shapes", ["tiny", "tiny"], "steps.cpu.shapes: 'tiny' stands in it twice"),
        ("steps.cpu.devices", ["tpu"], "steps.cpu.devices[0]: 'tpu' must be one of 'cuda', 'cpu'"),
        ("steps.cpu.devices", [], "steps.cpu.devices: [] must not be empty"),
        ("steps.cpu.replicates", LARGE, "steps.cpu.replicates: 2147483648 must be at most 1000"),
        ("variants.separate.attention", "seperate", "unknown implementation 'seperate'"),
        ("variants.separate.d_ff_storage", 40, "d_ff_storage: 40 is smaller than"),
        ("variants.separate.d_ff_storage", 4096, "d_ff_storage: 4096 is wider than the model"),
        ("variants.separate.mlp", "compiled",
         "variants.separate.mlp: a variant cannot use 'compiled': it is for benchmarks"),
        ("ops.ropes", STUDY | {"implementations": ["a"]}, "ops: unknown operator 'ropes'"),
        ("ops.rope", STUDY, "ops.rope: the neural process has no rope"),
        ("ops.swiglu", SWIGLU | {"at": ["llama/train"]},
         "ops.swiglu: 'llama/train' is no model/run: models has nothing"),
        ("ops.swiglu", SWIGLU, "one of the keys shapes, at, problems is missing"),
        ("ops.swiglu", SWIGLU | {"problems": {"one": {"rows": 4}}}, "swiglu needs size 'width'"),
        ("ops.swiglu", SWIGLU | {"problems": {"one": {"rows": []}}},
         "problems.one.rows: [] must be a whole number or text or true or false"),
        ("ops.swiglu", SWIGLU | {"shapes": [], "problems": {"Two": {"rows": 4, "width": 4}}},
         "'Two' must be a name of"),
        ("ops.mixture_nll",
         STUDY | {"problems": {"tiny": {"rows": 1, "n_components": 2, "d_y": 1}}},
         "ops.mixture_nll: two of its problems are called 'tiny'"),
        ("ops.attention.implementations", ["nope"], "unknown implementation 'nope'"),
        ("ops.cpu", STUDY, "steps.cpu: a study under ops has the same name"),
        ("ops.mlp", STUDY | {"implementations": ["single"], "d_ff_storage": 40},
         "ops.mlp.d_ff_storage: 40 is smaller"),
        ("variants.separate.mlp", "fusd", "variants.separate.mlp: unknown implementation 'fusd'"),
        ("variants.separate.skip_unread", 1, "skip_unread: 1 must be true or false"),
        ("variants.separate.norm", "torch", "variants.separate: unknown key 'norm': did you mean "
         "'rms_norm'"),
        ("variants.only_mlp", {"attention": "fused"}, "are the ablation's: rename the variant"),
        ("steps.ablation", {"devices": ["cpu"], "priority": 1, "shapes": [], "variants": [],
                            "replicates": 1, "checkpoint": [False], "cuda_graph": [False]},
         "steps.ablation: 'ablation' is a section or a target already"),
        ("ablation.base", "sdpa", "ablation.base: unknown variant 'sdpa'"),
        ("ablation.full", "sdpa_flash", "unknown difference of base and full 'attention'"),
        ("ablation.components", ["mlp"], "unknown difference of base and full 'mlp'"),
        ("ablation.shapes", {"huge": {"cuda_graph": True, "replicates": 1}},
         "ablation.shapes: unknown shape 'huge'"),
        ("tuning.shapes", ["tny"], "tuning.shapes: unknown shape 'tny': did you mean 'tiny'"),
        ("tuning.operators", ["atention"], "unknown operator 'atention': did you mean 'attention'"),
        ("tuning.operators", ["rope"], "tuning.operators[0]: the neural process has no rope"),
        ("gates", ["baselin"], "gates: unknown gate 'baselin': did you mean 'baseline'"),
        ("training.gp_tiny.shape", "huge", "training.gp_tiny.shape: unknown shape 'huge'"),
        ("training.gp_tiny.warmup_steps", 21, "warmup_steps: 21 must be at most steps, 20"),
        ("training.gp_tiny.source", "image", "unknown source 'image': did you mean 'images'"),
        ("training.gp_tiny.learning_rate", float("nan"), f"learning_rate: nan {NOT_READ}"),
        ("training.gp_tiny.learning_rate", float("inf"), f"learning_rate: inf {NOT_READ}"),
        ("training.gp_tiny.learning_rate", 1e300, "learning_rate: 1e+300 must be at most 1"),
        ("training.gp_tiny.shape", "x" * 300, "unknown shape 'xxxxxxxx"),
        ("training.gp_tiny.seed", LARGE, "seed: 2147483648 must be at most 2147483647"),
        ("training.gp_tiny.steps", LARGE, "steps: 2147483648 must be at most 2147483647"),
        ("training.gp_tiny.model", TINY["model"] | {"d_model": 33},
         "training.gp_tiny.model: d_model 33 must be a multiple of n_heads 2"),
        ("training.baseline", TINY["training"]["gp_tiny"],
         "training.baseline: a gate has the same name: rename the run"),
        ("training.gp_tiny",
         TINY["training"]["gp_tiny"] | {"source": "images", "n_context": 300_000},
         "training.gp_tiny: n_context 300000 and n_target 8 are 300008 points: they must be at "
         "most 262144"),
    ],
)  # fmt: skip
def test_bad_value_is_named(path, value, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        validate(changed(path, value))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"shapes": ["mild"]}, "predictions.shapes: unknown shape 'mild'"),
        ({"variants": ["fuse"]}, "predictions.variants: unknown variant 'fuse'"),
        (
            {"variants": ["pytorch_best"]},
            "predictions.variants[0]: 'pytorch_best' is compiled and predictions are not",
        ),
        ({"shapes": ["varying"]}, "predictions.shapes[0]: the sizes of 'varying' vary: name a"),
    ],
)
def test_predictions_that_cannot_be_timed_are_named(changes, sentence):
    config = copy.deepcopy(CONFIG)
    config["predictions"] |= changes
    with pytest.raises(ValueError, match=re.escape(sentence)):
        validate(config)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"shapes": ["mild"]}, "host.steps.shapes: unknown shape 'mild'"),
        ({"shapes": ["varying"]}, "host.steps.shapes[0]: the sizes of 'varying' vary: name a"),
        ({"captured": ["fuse"]}, "host.steps.captured: unknown variant 'fuse'"),
        ({"launched": []}, "host.steps.launched: [] must not be empty"),
    ],
)
def test_steps_whose_host_cannot_be_timed_are_named(changes, sentence):
    config = copy.deepcopy(CONFIG)
    config["host"]["steps"] |= changes
    with pytest.raises(ValueError, match=re.escape(sentence)):
        validate(config)


def test_models_with_a_buffer_name_variants_that_can_run_them():
    config = copy.deepcopy(CONFIG)
    config["joint"]["variants"] = ["fused", "fused_packed"]
    with pytest.raises(ValueError, match=r"joint.variants\[1\]: 'fused_packed' packs rows: a mod"):
        validate(config)
    config = copy.deepcopy(CONFIG)
    config["training"]["gp_small_buffer"]["variant"] = "fused_centred"
    with pytest.raises(ValueError, match="gp_small_buffer.variant: 'fused_centred' has centred_k"):
        validate(config)
    config = copy.deepcopy(CONFIG)
    config["joint"]["buffer"] = 0
    with pytest.raises(ValueError, match="joint.buffer: 0"):
        validate(config)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"sections": "fast"}, "profiles.sections: 'fast' must be one of 'quick', 'full'"),
        ({"devices": ["cpu"]}, "profiles.devices[0]: 'cpu' must be one of 'cuda'"),
        ({"ops": {"swigl": {"implementations": ["torch"]}}}, "unknown operator 'swigl'"),
        (
            {"ops": {"mlp": {"shapes": ["small"], "implementations": ["fuse"]}}},
            "profiles.ops.mlp.implementations: unknown implementation 'fuse'",
        ),
        (
            {"ops": {"mlp": {"shapes": ["smal"], "implementations": ["fused"]}}},
            "profiles.ops.mlp.shapes: unknown shape 'smal'",
        ),
        (
            {"ops": {"mlp": {"implementations": ["fused"]}}},
            "profiles.ops.mlp: one of the keys shapes, at, problems is missing",
        ),
    ],
)
def test_what_cannot_be_profiled_is_named(changes, sentence):
    config = copy.deepcopy(CONFIG)
    config["profiles"] |= changes
    with pytest.raises(ValueError, match=re.escape(sentence)):
        validate(config)


def test_what_predicts_needs_the_gates_of_ours():
    config = copy.deepcopy(CONFIG)
    config["gates"] = ["baseline"]
    config["steps"], config["ops"], config["training"] = {}, {}, {}
    for section in ("ablation", "noise", "profiles"):
        del config[section]
    with pytest.raises(ValueError, match=r"predictions.variants\[1\]: .*gates must name"):
        validate(config)


def test_an_ablation_goes_from_pytorchs_to_ours():
    config = copy.deepcopy(TINY)
    config["ablation"] |= {"base": "separate", "full": "sdpa_flash"}
    with pytest.raises(ValueError, match="must be a variant of PyTorch's operators alone"):
        validate(config)


def test_missing_key_is_named():
    config = copy.deepcopy(TINY)
    del config["shapes"]["tiny"]["batch"]
    with pytest.raises(ValueError, match="shapes.tiny: key 'batch' is missing"):
        validate(config)


def test_the_sizes_that_an_operator_takes_bound_the_model():
    config = changed("variants.separate.rms_norm", "fused")
    config["model"] |= {"d_model": 32768, "n_heads": 512}
    sentence = "model: rms_norm 'fused' cannot run it: it takes widths up to 16384, not 32768"
    with pytest.raises(ValueError, match=sentence):
        validate(config)
    config["model"] |= {"d_model": 96, "n_heads": 4}
    config["variants"] = dict.fromkeys(config["variants"], {"attention": "reference"})
    del config["ablation"]
    config["ops"] = {}
    validate(config)  # which has no kernel to fit


def test_storage_holds_the_hidden_layer_of_a_run_with_a_model_of_its_own():
    config = changed("variants.sdpa_flash.d_ff_storage", 64)
    config["training"]["gp_tiny"]["model"] = config["model"] | {"d_ff": 65}
    with pytest.raises(ValueError, match="'sdpa_flash' has d_ff_storage 64, less than the run's"):
        validate(config)


@pytest.mark.parametrize(
    "change, place",
    [
        ({}, "steps.cpu.variants[1]"),
        ({"steps": {}}, "ablation.full"),
        ({"steps": {}, "training": "separate"}, "training.gp_tiny.variant"),
        ({"steps": {}, "ops": "separate"}, "ops.attention.implementations[0]"),
        ({"steps": {}, "ops": "auto"}, "ops.attention.implementations[0]"),
    ],
)
def test_what_is_ours_needs_a_gate_of_its_own(change, place):
    config = copy.deepcopy(TINY)
    config["steps"] = change.get("steps", config["steps"])
    if len(change) > 1:
        del config["ablation"]
    if "training" in change:
        config["training"]["gp_tiny"]["variant"] = change["training"]
    if "ops" in change:
        config["ops"]["attention"]["implementations"] = [change["ops"]]
    validate(config)
    for gate in gates_of("attention", "separate"):
        fewer = config | {"gates": [name for name in EVERY if name != gate]}
        name = change.get("ops", "separate")
        sentence = f"{place}: attention {name!r} cannot be used: gates must name {gate}"
        with pytest.raises(ValueError, match=re.escape(sentence)):
            validate(fewer)


def test_what_trains_in_8_bits_needs_the_gate_of_its_gradients():
    config = copy.deepcopy(TINY) | {"gates": EVERY}
    config["variants"]["eight"] = {"attention": "sdpa_flash", "mlp": "e4m3"}
    config["steps"] = {"eight": config["steps"]["cpu"] | {"variants": ["eight"]}}
    validate(config)
    fewer = config | {"gates": [name for name in EVERY if name != "batch_noise"]}
    sentence = "mlp 'e4m3' cannot be used: gates must name batch_noise"
    with pytest.raises(ValueError, match=sentence):
        validate(fewer)


def written_at(path: Path, *others: Path, **overrides) -> dict[str, str]:
    return places(str(path), others, overrides)


@pytest.mark.parametrize(
    "line, by, sentence",
    [
        (
            "  tiny:",
            "  tiny: { batch: 0, n_context: 24, n_target: 8 }",
            "shapes.tiny.batch: 0 must",
        ),
        ("  cpu:", "  CPU:", "steps: 'CPU' must be a name"),
        ("  - op--linear--fused", "  - op--linear--fusd", "gates: unknown gate 'op--linear--fusd'"),
        ("    seed:", "    sed: 0", "training.gp_tiny: unknown key 'sed': did you mean 'seed'"),
        ("    shape:", "    shape: tny", "training.gp_tiny.shape: unknown shape 'tny'"),
        ("    variants:", "    variants: [sdpa_flash, own]", "steps.cpu.variants: unknown variant"),
        (
            "    implementations:",
            "    implementations: [fused]",
            "attention 'fused' cannot be used",
        ),
        ("    replicates: 1", "    replicate: 1", "ops.attention: unknown key 'replicate'"),
    ],
)
def test_the_line_is_named(line, by, sentence, tmp_path):
    text = (Path(__file__).parent / "config.yaml").read_text().splitlines()
    number = next(n for n, found in enumerate(text) if found.startswith(line))
    file = tmp_path / "own.yaml"
    file.write_text("\n".join([*text[:number], by, *text[number + 1 :]]))
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        validate(yaml.safe_load(file.read_text()), written_at(file))
    assert str(error.value).startswith(f"{file}, line {number + 1}: ")


def test_a_key_that_is_missing_is_asked_for_where_it_belongs(tmp_path):
    file = tmp_path / "own.yaml"
    file.write_text("\n".join(["device: cpu", "shapes:", "  tiny:", "    batch: 1"]))
    config = TINY | yaml.safe_load(file.read_text())
    with pytest.raises(ValueError, match="own.yaml, line 3: shapes.tiny: key 'n_context' is miss"):
        validate(config, written_at(file))


def test_the_file_that_has_the_last_word_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [tmp_path / name for name in ("config.yaml", "other.yaml", "third.yaml")]
    files[0].write_text(yaml.safe_dump(TINY))
    files[1].write_text("shapes:\n  tiny:\n    batch: 0\n    n_target: 0\n")
    files[2].write_text("# \n\nshapes: {tiny: {batch: -1}}\n")
    config = copy.deepcopy(TINY)
    config["shapes"]["tiny"] |= {"batch": -1}
    written = written_at(Path("config.yaml"), *files[1:], device="gpu")
    with pytest.raises(ValueError, match=r"^third.yaml, line 3: shapes.tiny.batch: -1 must be"):
        validate(config, written)
    config["shapes"]["tiny"] |= {"batch": 1, "n_target": 0}
    with pytest.raises(ValueError, match=r"^other.yaml, line 4: shapes.tiny.n_target: 0 must be"):
        validate(config, written)
    config["shapes"]["tiny"] |= {"n_target": 1}
    with pytest.raises(ValueError, match="^--config: device: 'gpu' must be auto, cpu"):
        validate(config | {"device": "gpu"}, written)
