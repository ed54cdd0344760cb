"""Tests bad input: a sentence names the line, the place, the value and what would be right."""

import copy
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.workflow.conftest import changed
from tnp.dispatch.registry import catalog
from tnp.gates import GATES, gates_of, generic_gates
from workflow import problems
from workflow.configuration import places
from workflow.models import refusal
from workflow.validation import validate

ROOT = Path(__file__).parents[2]
EVERY = [*GATES, *generic_gates()]
LARGE = 2**31
SIZES = {"batch": 1, "n_context": 1, "n_target": 1}
# The tests' configuration with every section that one may have.
TINY = yaml.safe_load((Path(__file__).parent / "config.yaml").read_text()) | yaml.safe_load("""
variants:
  sdpa_flash: { attention: sdpa_flash }
  separate: { attention: separate }
  compiled: { attention: sdpa_flash, compile: true }
  packed: { attention: sdpa_flash, pack: true }
models: { llama: { gated: true, d_ff: 64, d_model: 32 }, gpt: { d_model: 32, d_ff: 64 } }
runs: { train: { batch: 2, n_tokens: 16 } }
tuning: { shapes: [tiny], operators: [attention] }
ablation:
  { devices: [cpu], priority: 1, base: sdpa_flash, full: separate, components: [attention],
    shapes: { tiny: { cuda_graph: false } } }
predictions: { priority: 1, shapes: [tiny], variants: [sdpa_flash] }
joint: { priority: 1, shapes: [tiny], variants: [sdpa_flash], buffer: 4 }
language_models:
  priority: 1
  runs: { small: { model: small_llama, batch: [1], prompt: [8], new: 4 } }
  weights: [bf16]
  forms: [hf]
noise: { priority: 1, copies: 2, ops: { mlp: { shapes: [tiny], implementations: [torch] } } }
host:
  priority: 1
  steps: { priority: 1, shapes: [tiny], launched: [sdpa_flash], captured: [] }
  problems: { norm: { op: rms_norm, sizes: { rows: 8, width: 8 }, implementations: [torch] } }
profiles:
  { priority: 1, sections: quick, ops: { mlp: { shapes: [tiny], implementations: [torch] } } }
""")
TINY["gates"] = EVERY
TINY["steps"]["cpu"]["variants"] = ["sdpa_flash", "separate"]
TINY["shapes"]["odd"] = {"batch": 3, "n_context": 4, "n_target": 5}
VARYING = {"batch": 5, "n_context": 4, "n_target": 5,
           "vary": {"n_context": [4, 4], "n_target": [5, 5]}}  # fmt: skip
SWIGLU = {"devices": ["cpu"], "priority": 1, "implementations": ["torch"]}
ONE = {"one": {"rows": 4, "width": 8}}

# On each line a place, a value for it as YAML writes it, and what the sentence has.
SENTENCES = Path(__file__).with_name("sentences.txt").read_text()
ROWS = [line.split(" | ") for line in SENTENCES.splitlines()]


def refused(config: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        validate(config)
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("file", ["config.yaml", "tests/workflow/config.yaml"])
def test_committed_configurations_are_valid(file):
    written = places(str(ROOT / file), [], {})
    validate(yaml.safe_load((ROOT / file).read_text()), written)


def test_what_the_table_starts_from_is_valid():
    validate(TINY)


@pytest.mark.parametrize(("change", "sentence"), ROWS, ids=[change for change, _ in ROWS])
def test_bad_value_is_named(change, sentence):
    path, _, value = change.partition(": ")
    config = changed(TINY, path, yaml.safe_load(value))
    config["shapes"] = config["shapes"] and config["shapes"] | {"varying": VARYING}
    if path == "training.gp_tiny.n_context":
        config["training"]["gp_tiny"]["source"] = "images"
    if path == "training.gp_tiny.variant":
        config["training"]["gp_tiny"]["model"] = config["model"] | {"buffer": 4}
    refused(config, sentence)


def test_a_missing_key_is_named():
    config = copy.deepcopy(TINY)
    del config["shapes"]["tiny"]["batch"]
    refused(config, "shapes.tiny: key 'batch' is missing")
    config = copy.deepcopy(TINY)
    del config["timing"]["latency"]
    refused(config, "timing: key 'latency' is missing")


def test_an_ablation_goes_from_pytorchs_to_ours():
    config = copy.deepcopy(TINY)
    config["ablation"] |= {"base": "separate", "full": "sdpa_flash"}
    refused(config, "must be a variant of PyTorch's operators alone")


def test_a_run_is_compared_with_one_that_differs_in_its_variant_alone():
    config, run = copy.deepcopy(TINY), TINY["training"]["gp_tiny"]
    config["training"]["base"] = run | {"variant": "separate", "eval_every": 20}
    config["training"]["gp_tiny"] = run | {"baseline": "separate"}
    validate(config)
    for change in ({"seed": 1}, {"steps": 21}, {"learning_rate": 0.1}, {"n_target": 7}):
        config["training"]["base"] |= change
        refused(config, "no run of variant 'separate' has the same seed and settings")
        config["training"]["base"] = run | {"variant": "separate"}


def test_the_sizes_that_an_operator_takes_bound_the_model():
    config = changed(TINY, "variants.separate.rms_norm", "fused")
    config["model"] |= {"d_model": 32768, "n_heads": 512}
    refused(config, "model: rms_norm 'fused' cannot run it: it takes widths up to 16384, not 32768")
    config["model"] |= {"d_model": 96, "n_heads": 4}
    config["variants"] = dict.fromkeys(config["variants"], {"attention": "reference"})
    config |= {"ops": {}, "host": None, "joint": None, "predictions": None, "ablation": None}
    validate({name: section for name, section in config.items() if section is not None})


def test_storage_holds_the_hidden_layer_of_a_run_with_a_model_of_its_own():
    config = changed(TINY, "variants.sdpa_flash.d_ff_storage", 64)
    config["training"]["gp_tiny"]["model"] = config["model"] | {"d_ff": 65}
    refused(config, "'sdpa_flash' has d_ff_storage 64, less than the run's")


@pytest.mark.parametrize(
    "section, value, place",
    [
        ("steps", TINY["steps"], "steps.cpu.variants[1]"),
        ("ablation", TINY["ablation"], "ablation.full"),
        ("training", {"t": TINY["training"]["gp_tiny"] | {"variant": "separate"}},
         "training.t.variant"),
        ("ops", {"attention": TINY["ops"]["attention"] | {"implementations": ["separate"]}},
         "ops.attention.implementations[0]"),
        ("ops", {"attention": TINY["ops"]["attention"] | {"implementations": ["auto"]}},
         "ops.attention.implementations[0]"),
        ("predictions", TINY["predictions"] | {"variants": ["separate"]},
         "predictions.variants[0]"),
        ("joint", TINY["joint"] | {"variants": ["separate"]}, "joint.variants[0]"),
        ("host", TINY["host"] | {"steps": TINY["host"]["steps"] | {"captured": ["separate"]}},
         "host.steps.captured[0]"),
        ("noise", {"priority": 1, "copies": 2, "ops": {
            "attention": {"shapes": ["tiny"], "implementations": ["separate"]}}},
         "noise.ops.attention.implementations[0]"),
    ],
)  # fmt: skip
def test_what_is_ours_needs_a_gate_of_its_own(section, value, place):
    shared = ("device", "model", "compute_dtype", "shapes", "variants", "timing", "gates")
    config = {name: TINY[name] for name in shared} | {section: value}
    validate(config)
    for gate in gates_of("attention", "separate"):
        fewer = config | {"gates": [name for name in EVERY if name != gate]}
        with pytest.raises(ValueError, match=re.escape(f"{place}: attention ")) as error:
            validate(fewer)
        assert f"cannot be used: gates must name {gate}" in str(error.value)


def test_what_trains_in_8_bits_needs_the_gates_of_its_operators_alone():
    config = changed(TINY, "variants.eight", {"attention": "sdpa_flash", "mlp": "e4m3"})
    config["steps"] = {"eight": config["steps"]["cpu"] | {"variants": ["eight"]}}
    validate(config | {"gates": [name for name in EVERY if name != "batch_noise"]})
    fewer = config | {"gates": [name for name in EVERY if name != "op--mlp--e4m3"]}
    refused(fewer, "mlp 'e4m3' cannot be used: gates must name op--mlp--e4m3")


def test_what_is_forward_only_may_be_timed_and_trains_nothing():
    operator = catalog().operator("gelu_linear")
    problem = operator.problem("bfloat16", rows=8, n_in=16, n_out=16)
    asked = operator, "addmm_activation", problem
    assert refusal(*asked, trains=False) is None
    assert "forward only" in refusal(*asked, trains=True)


ALIKE = {"batch": 2, "n_heads": 32, "n_q": 9, "n_k": 9, "head_dim": 128}
GROUPED = {"causal": True, "n_kv_heads": 8, "window": 4096}


@pytest.mark.parametrize(
    "op, dtype, sizes, sentence",
    [
        ("swiglu", "float16", {"rows": 1, "width": 8}, None),
        ("swiglu", "float64", {"rows": 1, "width": 8},
         "no gate case of swiglu has float64 and no option: nothing would prove it"),
        # Numbers among options may be others than a gate's, flags may not.
        ("attention", "bfloat16", ALIKE | GROUPED, None),
        ("attention", "bfloat16", ALIKE | GROUPED | {"base2": True}, "base2 True"),
        ("attention", "bfloat16", ALIKE | GROUPED | {"n_keys": True}, "n_keys True"),
        ("attention", "bfloat16", ALIKE | GROUPED | {"causal": False}, "window 4096"),
        # Packed sequences without a window are proven by cases of their own.
        ("attention", "float16", ALIKE | {"batch": 1, "cu_seqlens_q": True, "cu_seqlens_k": True,
                                          "n_sequences": 3}, "n_sequences 3: nothing would prove"),
    ],
)  # fmt: skip
def test_a_problem_that_no_gate_case_is_like_is_named(op, dtype, sizes, sentence):
    said = problems.without_case(catalog().operator(op).problem(dtype, **sizes), "cuda")
    assert said is None if sentence is None else sentence in said


@pytest.mark.parametrize(
    "line, by, sentence",
    [
        ("  tiny:", "  tiny: { batch: 0, n_context: 24, n_target: 8 }", "shapes.tiny.batch: 0 mu"),
        ("  cpu:", "  CPU:", "steps: 'CPU' must be a name"),
        ("  - op--linear--fused", "  - op--linear--fusd", "gates: unknown gate 'op--linear--fusd'"),
        ("    seed:", "    sed: 0", "training.gp_tiny: unknown key 'sed': did you mean 'seed'"),
        ("    shape:", "    shape: tny", "training.gp_tiny.shape: unknown shape 'tny'"),
        ("    variants:", "    variants: [sdpa_flash, own]", "steps.cpu.variants: unknown variant"),
        ("    implementations:", "    implementations: [fused]", "attention 'fused' cannot be"),
        ("    replicates: 1", "    replicate: 1", "ops.attention: unknown key 'replicate'"),
        # A grid has its own.
        ("  tiny:", "  tiny{batch}: { batch: [2, 0], n_context: 24, n_target: 8 }", "shapes.tiny0"),
        ("  tiny:", "  tiny{btch}: { batch: [2, 0] }", "key 'btch' is missing, which stands in"),
        ("    shapes: [tiny]", '    shapes: ["ti{n,m}y"]', "steps.cpu.shapes: unknown shape 'tim"),
    ],
)
def test_the_line_is_named(line, by, sentence, tmp_path):
    text = (Path(__file__).parent / "config.yaml").read_text().splitlines()
    number = next(n for n, found in enumerate(text) if found.startswith(line))
    file = tmp_path / "own.yaml"
    file.write_text("\n".join([*text[:number], by, *text[number + 1 :]]))
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        validate(yaml.safe_load(file.read_text()), places(str(file), [], {}))
    assert str(error.value).startswith(f"{file}, line {number + 1}: ")


def test_the_file_that_has_the_last_word_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [tmp_path / name for name in ("config.yaml", "other.yaml", "third.yaml")]
    files[0].write_text(yaml.safe_dump(TINY))
    files[1].write_text("shapes:\n  tiny:\n    batch: 0\n    n_target: 0\n")
    files[2].write_text("# \n\nshapes: {tiny: {batch: -1}}\n")
    written = places("config.yaml", files[1:], {"device": "gpu"})
    for sizes, device, sentence in (
        ({"batch": -1}, "cpu", "^third.yaml, line 3: shapes.tiny.batch: -1 must be"),
        ({"n_target": 0}, "cpu", "^other.yaml, line 4: shapes.tiny.n_target: 0 must be"),
        ({}, "gpu", "^--config: device: 'gpu' must be auto, cpu"),
    ):
        config = changed(TINY, "device", device)
        config["shapes"]["tiny"] |= sizes
        with pytest.raises(ValueError, match=sentence):
            validate(config, written)
