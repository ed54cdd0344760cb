"""Studies of operators: called as their operator or naming it, at sizes that config.yaml gives."""

import copy
import json
import re
from pathlib import Path

import pytest
import yaml

from tnp.dispatch import tuned_tables
from tnp.dispatch.registry import catalog
from workflow import operator_plan, plan, problems
from workflow.uses import _refusal
from workflow.validation import validate

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())
OPS = plan.ops(CONFIG, "cuda", "nvidia-h200")
CUDA = problems.target("cuda")
UNTUNED = {name: job for name, job in OPS.items() if job["study"] == "untuned"}


def test_a_study_of_another_name_measures_the_operator_that_it_names():
    assert {job["op"] for job in UNTUNED.values()} == {"attention"}
    assert all(name.startswith("untuned--") for name in UNTUNED)
    assert not {job["shape"] for job in UNTUNED.values()} & CONFIG["shapes"].keys()


def test_a_study_may_be_timed_more_briefly_than_others():
    (briefly,) = {job["timing"]["warmup_s"] for job in UNTUNED.values()}
    others = [
        job["timing"] for job in OPS.values() if "timing" not in CONFIG["ops"].get(job["study"], {})
    ]
    assert {timing["warmup_s"] for timing in others} == {CONFIG["timing"]["warmup_s"]}
    assert briefly < CONFIG["timing"]["warmup_s"]
    known = CONFIG["timing"].keys() - {"latency"}
    assert all(job["timing"].keys() - {"latency"} == known for job in OPS.values())


def test_a_study_of_latency_has_the_numbers_of_calls_and_no_other_study_has():
    asked = {name for name, spec in CONFIG["ops"].items() if spec.get("timing") == "latency"}
    assert asked and asked == {job["study"] for job in OPS.values() if "latency" in job["timing"]}
    (numbers,) = {str(job["timing"]["latency"]) for job in OPS.values() if job["study"] in asked}
    assert numbers == str({"warmup_calls": 100, "launches": 1000, "flushed_caches": 32})


def test_nothing_is_chosen_by_latency():
    config = copy.deepcopy(CONFIG)
    study = {"op": "attention", "timing": "latency", "implementations": ["fused", "auto"]}
    shared = {name: CONFIG["ops"]["attention"][name] for name in ("devices", "priority", "shapes")}
    config["ops"]["quick_one"] = study | shared | {"replicates": 1}
    ops = plan.ops(config, "cuda", "nvidia-h200")
    assert "quick_one--mid" in ops
    chosen_by = {name.split("--")[0] for name, _ in operator_plan.deciding(config, ops)}
    assert "attention" in chosen_by and "quick_one" not in chosen_by


@pytest.mark.parametrize(
    ("timing", "sentence"),
    [
        ("latenci", "ops.swiglu.timing: 'latenci' must be one of 'latency'"),
        (3, "ops.swiglu.timing: 3 must be keys with values"),
        ({"launches": 3}, "ops.swiglu.timing: unknown key 'launches'"),
    ],
)
def test_a_timing_that_is_none_is_named(timing, sentence):
    config = copy.deepcopy(CONFIG)
    config["ops"]["swiglu"]["timing"] = timing
    with pytest.raises(ValueError, match=re.escape(sentence)):
        validate(config)


def test_section_timing_says_how_latency_is_measured():
    config = copy.deepcopy(CONFIG)
    del config["timing"]["latency"]
    with pytest.raises(ValueError, match="timing: key 'latency' is missing"):
        validate(config)


def test_no_table_has_an_entry_of_what_nobody_tuned_for():
    entries = [
        entry
        for path in tuned_tables.COMMITTED.glob("*.json")
        for entry in tuned_tables.table(path)
    ]
    tuned = [entry["problem"]["sizes"] for entry in entries if entry["of"].startswith("attention")]
    asked = [json.loads(job["problem"])["sizes"] for job in UNTUNED.values()]
    assert len(asked) >= 60 and len(tuned) >= 60
    assert not [sizes for sizes in asked if sizes in tuned]
    assert {sizes["batch"] * sizes["n_heads"] for sizes in asked} == {8, 32, 64, 512}


def test_a_language_models_batch_has_all_its_tokens():
    problem = json.loads(OPS["cross_entropy--llama3_8b-train"]["problem"])
    assert problem["sizes"] == {"rows": 8 * 2048, "classes": 128_256}


def test_a_study_may_have_a_dtype_of_its_own():
    of = {
        job["study"]: json.loads(job["problem"])["dtype"]
        for job in OPS.values()
        if "problem" in job
    }
    assert of["lab_softmax"] == "float16" and of["softmax"] == "bfloat16"


def test_a_study_has_a_width_of_its_own():
    config = copy.deepcopy(CONFIG)
    config["ops"]["wide"] = config["ops"]["mlp"] | {"op": "mlp", "d_ff_storage": 2048}
    found = plan.ops(config, "cuda", "nvidia-h200")
    widths = {name: found[name]["d_ff_storage"] for name in ("wide--mid", "mlp--mid")}
    assert widths == {"wide--mid": 2048, "mlp--mid": 1408}


@pytest.mark.parametrize(
    "study, change, message",
    [
        ("untuned", {"op": "atention"}, "ops.untuned: unknown operator 'atention'"),
        ("untuned", {"timing": {"warmup": 1.0}}, "ops.untuned.timing: unknown key 'warmup'"),
        ("untuned", {"timing": {"warmup_s": -1.0}}, "warmup_s: -1.0 must be at least 0"),
        ("rope", {"at": ["llama3_8b/train", "gpt2/train"]}, "gpt2 has no rope"),
        ("rms_norm", {"problems": {"wide": {"rows": 2, "width": 16_385}}},
         "ops.rms_norm: wide: 'fused' cannot run it: it takes widths up to 16384"),
        ("rope", {"at": ["llama3_8b"]}, "'llama3_8b' must be a model and a run"),
        ("rope", {"problems": {"none": {"batch": 0}}}, "problems.none.batch: 0 must be at least 1"),
        ("rope", {"problems": {}}, "ops.rope.problems: .* must not be empty"),
        ("swiglu", {"problems": {"x": {"rows": 1, "width": 1, "dtype": 3}}}, "no size or option"),
        ("gates", {"op": "rope", "devices": ["cuda"], "priority": 1, "at": ["llama3_8b/train"],
         "implementations": ["torch"], "replicates": 1},
         "ops.gates: 'gates' is a section or a target already"),
        ("rope", {"at": ["llama3_8b/trian"]}, "'llama3_8b/trian' is no model/run"),
    ],
)  # fmt: skip
def test_a_study_that_cannot_be_is_refused(study, change, message):
    config = copy.deepcopy(CONFIG)
    config["ops"].setdefault(study, {}).update(change)
    with pytest.raises(ValueError, match=message):
        validate(config)


def test_what_is_forward_only_may_be_timed_and_trains_nothing():
    operator = catalog().operator("gelu_linear")
    problem = operator.problem("bfloat16", rows=8, n_in=16, n_out=16)
    asked = operator, "addmm_activation", problem
    assert _refusal(*asked, trains=False) is None
    assert "forward only" in _refusal(*asked, trains=True)


def test_a_problem_that_no_gate_case_is_like_is_named():
    operator = catalog().operator("swiglu")
    said = problems.without_case(operator.problem("float64", rows=1, width=8), "cuda")
    assert said == "no gate case of swiglu has float64 and no option: nothing would prove it"
    assert problems.without_case(operator.problem("float16", rows=1, width=8), "cuda") is None


GROUPED = {"causal": True, "n_kv_heads": 8, "window": 4096}
ALIKE = {"batch": 2, "n_heads": 32, "n_q": 9, "n_k": 9, "head_dim": 128}


def test_numbers_among_options_may_be_others_than_a_gates():
    operator = catalog().operator("attention")
    asked = operator.problem("bfloat16", **ALIKE, **GROUPED)
    assert asked.options not in {case.problem.options for case in operator.cases(CUDA)}
    assert problems.without_case(asked, "cuda") is None


@pytest.mark.parametrize("change", [{"base2": True}, {"n_keys": True}, {"causal": False}])
def test_a_flag_that_no_gate_case_has_beside_the_others_is_refused(change):
    operator = catalog().operator("attention")
    said = problems.without_case(operator.problem("bfloat16", **ALIKE, **GROUPED | change), "cuda")
    assert said.startswith("no gate case of attention has bfloat16 and ")
    assert all(f"{name} {value}" in said for name, value in change.items() if value)


def test_a_number_is_no_reason_to_take_a_problem_without_it():
    """Packed sequences without a window are proven by cases of their own."""
    operator = catalog().operator("attention")
    given = {"cu_seqlens_q": True, "cu_seqlens_k": True, "n_sequences": 3}
    asked = operator.problem("float16", **ALIKE | {"batch": 1}, **given)
    assert "n_sequences 3: nothing would prove it" in problems.without_case(asked, "cuda")


def test_nothing_is_measured_twice():
    """The same contenders at the same problem would be two numbers for one thing."""
    by_name = {"config_id", "study", "shape", "priority", "implementations"}
    first = {}
    for name, job in OPS.items():
        what = {key: value for key, value in job.items() if key not in by_name}
        asked = json.dumps([what, list(job["implementations"])], sort_keys=True)
        assert asked not in first, f"{name} is {first[asked]}"
        first[asked] = name


def test_a_host_study_is_held_against_what_implementations_take():
    config = copy.deepcopy(CONFIG)
    config["host"]["problems"]["norm"]["sizes"]["width"] = 16_385
    with pytest.raises(ValueError, match="host.problems.norm: 'fused' cannot run it: .* 16384"):
        validate(config)
