"""From configuration to jobs."""

import copy
import json
import math
from pathlib import Path

import pytest
import yaml

from tnp.bench.outcome import implementation_of
from tnp.dispatch.registry import catalog
from tnp.model.variants import named_specs
from tnp.store.schemas import CEILINGS, FORMATS
from workflow import plan, problems

ROOT = Path(__file__).parents[2]
CONFIG = yaml.safe_load((ROOT / "config.yaml").read_text())


def test_ids_say_what_is_measured():
    steps = plan.steps(CONFIG, "cuda", "nvidia-h200")
    parameters = steps["matrix--mid--separate--ckpt--graph"]
    assert parameters["checkpoint"] and parameters["cuda_graph"]
    assert parameters["n_context"] == 10_000
    assert "matrix--mid--separate" in steps
    assert not steps["memory_feasibility--large--sdpa_flash"]["optimizer"]


def test_a_device_takes_part_only_where_it_is_named():
    assert {p["study"] for p in plan.steps(CONFIG, "cpu", "cpu").values()} == {"cpu"}
    assert plan.ops(CONFIG, "cpu", "cpu") == {}


def test_operator_sizes_follow_from_shape_and_model():
    op = plan.ops(CONFIG, "cuda", "nvidia-h200")["attention--mid"]
    assert (op["n_q"], op["n_k"], op["n_heads"], op["head_dim"]) == (11_000, 10_000, 8, 64)


def test_an_operators_implementations_are_one_job_a_size_and_replicate():
    ops = plan.ops(CONFIG, "cuda", "nvidia-h200")
    spec = CONFIG["ops"]["attention"]
    names = problems.implementations("attention", spec)
    # One of ours stands in it twice.
    assert ops["attention--mid"]["implementations"] == {
        name: f"attention--mid--{name}" for name in [*names, "fused--twin1"]
    }
    assert ops["ceilings--copy"]["implementations"] == {"torch": "ceilings--copy"}
    ceilings = {name: job for name, job in ops.items() if job["study"] == "ceilings"}
    assert ceilings["ceilings--matmul"]["dtype"] == CONFIG["compute_dtype"]["cuda"]
    assert ceilings["ceilings--matmul_e4m3"]["dtype"] == "e4m3"
    assert len(ceilings) == len(CEILINGS) + len(FORMATS) - 1
    jobs = [name for name, _ in plan.running_order(ops) if name.startswith("attention--")]
    assert len(jobs) == len(spec["shapes"]) * spec["replicates"]


def test_an_operators_benchmark_has_the_sizes_it_depends_on():
    ops = plan.ops(CONFIG, "cuda", "nvidia-h200")
    names = ("batch", "n_q", "n_k", "d_model", "d_ff", "d_ff_storage", "n_components")
    expected = {
        "attention--mid": (4, 11_000, 10_000, None, None, None, None),
        "add_rms_norm--mid": (4, 11_000, None, 512, None, None, None),
        "mlp--mid": (4, 11_000, None, 512, 1365, 1408, None),
        "mixture_heads--mid": (4, 1_000, None, 512, 1365, 1408, 10),
        "mixture_nll--mid": (4, 1_000, None, None, None, None, 10),
    }
    found = {op: tuple(ops[op].get(name) for name in names) for op in expected}
    assert found == expected
    unpadded = copy.deepcopy(CONFIG)
    del unpadded["ops"]["mlp"]["d_ff_storage"]
    assert plan.ops(unpadded, "cuda", "nvidia-h200")["mlp--mid"]["d_ff_storage"] == 1365


def test_the_ablation_adds_each_component_and_takes_it_away():
    steps = plan.steps(CONFIG, "cuda", "nvidia-h200")
    assert plan.steps(CONFIG, "cpu", "cpu").keys().isdisjoint(steps)
    spec = CONFIG["ablation"]
    at_large = [p for p in steps.values() if (p["study"], p["shape"]) == ("ablation", "large")]
    assert len(at_large) == 2 + 2 * len(spec["shapes"]["large"]["components"])
    at_mid = [p for p in steps.values() if (p["study"], p["shape"]) == ("ablation", "mid")]
    assert len(at_mid) == 2 + 2 * len(spec["components"])
    assert not any(p["cuda_graph"] for p in at_large)
    only = steps["ablation--small--only_mlp--graph"]
    base, full = (plan.variants(CONFIG)[spec[end]] for end in ("base", "full"))
    assert full["d_ff_storage"] == 1408 and named_specs()[spec["full"]]["d_ff_storage"] is True
    assert only["variant_spec"] == base | {"mlp": "fused"}
    without = steps["ablation--small--without_mlp--graph"]
    assert without["variant_spec"] | {"mlp": "fused"} == full and without["cuda_graph"]
    assert (
        steps["ablation--mid--without_attention--graph"]["variant_spec"]["attention"]
        == (base["attention"])
    )
    assert "skip_unread" not in steps["ablation--mid--without_skip_unread--graph"]["variant_spec"]


def test_a_step_says_what_it_uses_and_what_it_waits_for():
    steps = plan.steps(CONFIG, "cuda", "nvidia-h200")
    only = steps["ablation--small--only_mlp--graph"]
    operators = json.loads(only["operators"])
    assert operators["mlp"] == "fused" and operators["rms_norm"] == "torch"
    assert only["gates"] == "baseline|op--mlp--fused|cuda_graphs"
    assert steps["matrix--mid--sdpa_flash"]["gates"] == "baseline"
    # Only the large step has rows enough to be recomputed.
    assert "checkpointing" not in steps["ablation--mid--fused--graph"]["gates"].split("|")
    assert "checkpointing" in steps["ablation--large--fused"]["gates"].split("|")
    runs = plan.training(CONFIG, "cuda", "nvidia-h200")
    assert runs["gp_small_sdpa"]["gates"] == "baseline|cuda_graphs"


def test_the_runs_that_are_compared_differ_in_their_variant_alone():
    runs = plan.training(CONFIG, "cuda", "nvidia-h200")
    own = ("config_id", "run", "variant", "variant_spec", "operators", "gates")
    compared = [
        {key: value for key, value in runs[f"gp_small_{name}"].items() if key not in own}
        for name in ("sdpa", "fused", "flash")
    ]
    assert compared[0] == compared[1] == compared[2]


def test_training_overrides_its_shape():
    run = plan.training(CONFIG, "cpu", "cpu")["gp_cpu"]
    assert (run["batch"], run["n_context"], run["n_target"]) == (16, 64, 64)
    assert run["model"]["d_model"] == 64


def test_studies_run_by_priority_and_in_rounds_each_in_its_own_order():
    steps = plan.steps(CONFIG, "cuda", "nvidia-h200")
    order = plan.running_order(steps)
    rounds = [(steps[name]["priority"], replicate) for name, replicate in order]
    assert rounds == sorted(rounds)
    first, second = (
        [name for name, r in order if r == wanted and steps[name]["study"] == "matrix"]
        for wanted in (1, 2)
    )
    assert sorted(first) == sorted(second) and first != second
    assert order == plan.running_order(dict(reversed(steps.items())))


def test_noise_is_one_implementation_with_its_copies():
    ops = plan.ops(CONFIG, "cuda", "nvidia-h200")
    spec = CONFIG["noise"]
    jobs = {name: job for name, job in ops.items() if job["study"] == "noise"}
    assert set(jobs) == {
        f"noise--{op}--{shape}--{name}"
        for op, study in spec["ops"].items()
        for shape in study["shapes"]
        for name in study["implementations"]
    }
    for job in jobs.values():
        assert len(set(job["implementations"].values())) == spec["copies"]
        assert len(set(map(implementation_of, job["implementations"]))) == 1
    # Enough for a statement about one comparison in a hundred, each of them in two passes.
    assert 2 * len(jobs) * math.comb(spec["copies"], 2) >= 1000


def test_steps_whose_sizes_vary_wait_for_the_gate_of_padding():
    steps = plan.steps(CONFIG, "cuda", "nvidia-h200")
    for name in (
        "varying--varying--fused",
        "varying_samples--varying_samples--fused_packed--graph",
    ):
        assert "ragged" in steps[name]["gates"].split("|")
        assert steps[name]["vary"]["n_context"] == [3, 64]
    assert "ragged" not in steps["headline--small--fused--graph"]["gates"].split("|")


def test_the_strongest_pytorch_has_every_saving_that_ours_has():
    variants = named_specs()
    saving = ("skip_unread", "d_ff_storage")
    for name in ("pytorch_best", "pytorch_best_autotuned"):
        assert {key: variants[name][key] for key in saving} == {
            key: variants["fused"][key] for key in saving
        }
    headline = CONFIG["steps"]["headline"], CONFIG["steps"]["headline_large"]
    assert all({"pytorch_best", "fused"} <= set(study["variants"]) for study in headline)


@pytest.mark.parametrize(
    ("wanted", "found", "slug"),
    [("auto", "cpu", "cpu"), ("cpu", "nvidia-h200", "cpu"), ("nvidia-a100", "cpu", "nvidia-a100")],
)
def test_device(wanted, found, slug):
    assert plan.device(wanted, found) == slug


def test_what_is_for_a_gpu_says_that_none_is_visible_and_what_runs_here():
    config = CONFIG | {"device": "auto"}
    sentences = plan.elsewhere(config, "cpu", "cpu")
    assert "cpu" not in sentences and {"headline", "mlp", "ablation", "gp_small"} <= set(sentences)
    assert sentences["headline"] == (
        "'headline' is for cuda alone, and no NVIDIA GPU is visible: what can be run here is cpu, "
        "gates and all"
    )
    assert "headline" not in (there := plan.elsewhere(config, "cuda", "nvidia-h200"))
    assert (
        "and the device is 'nvidia-h200': what can be run here is specification, " in there["cpu"]
    )


def test_cuda_without_gpu_is_refused():
    with pytest.raises(ValueError, match="no NVIDIA GPU is visible"):
        plan.device("cuda", "cpu")


def test_every_kind_of_job_can_be_measured_again():
    jobs = plan.names(CONFIG, "cuda", "nvidia-h200")
    assert {kind for kind, _ in jobs.values()} == plan.TABLES.keys()


def test_predictions_are_a_job_for_each_shape_and_variant():
    jobs = plan.predictions(CONFIG, "cuda", "nvidia-h200")
    expected = {
        f"{study}--{shape}--{variant}"
        for study in ("predictions", "joint")
        for shape in CONFIG[study]["shapes"]
        for variant in CONFIG[study]["variants"]
    }
    assert set(jobs) == expected and plan.predictions(CONFIG, "cpu", "cpu") == {}
    job = jobs["predictions--mid_b1--fused"]
    assert (job["batch"], job["n_context"], job["n_target"]) == (1, 10_000, 1000)
    assert job["dtype"] == CONFIG["compute_dtype"]["cuda"] and job["study"] == "predictions"


def test_joint_samples_are_of_a_model_with_a_buffer_and_wait_for_its_gate():
    jobs = plan.predictions(CONFIG, "cuda", "nvidia-h200")
    job, other = jobs["joint--mid_b1--fused"], jobs["predictions--mid_b1--fused"]
    assert job["study"] == "joint" and job["model"] == CONFIG["model"] | {"buffer": 128}
    waits, others = (one["gates"].split("|") for one in (job, other))
    assert set(waits) - set(others) == {"buffer"} and "buffer" not in other["model"]
    assert "'joint' is for cuda alone" in plan.elsewhere(CONFIG, "cpu", "cpu")["joint"]
    training = plan.training(CONFIG, "cuda", "nvidia-h200")
    assert "buffer" in training["gp_small_buffer"]["gates"].split("|")
    assert "buffer" not in training["gp_small"]["gates"].split("|")


def test_profiles_are_a_job_for_each_implementation_of_each_problem():
    jobs = plan.profiles(CONFIG, "cuda", "nvidia-h200")
    job = jobs["profiles--attention--mid--fused"]
    assert job["implementation"] == "fused" and list(job["implementations"]) == ["fused"]
    assert job["study"] == "profiles" and job["sections"] == CONFIG["profiles"]["sections"]
    assert job["problem"] == plan.ops(CONFIG, "cuda", "x")["attention--mid"]["problem"]
    assert "profiles--rms_norm--llama3_8b-train--torch" in jobs
    causal = jobs["profiles--attention_training--llama3_8b-train--separate"]
    assert causal["op"] == "attention" and '"causal":true' in causal["problem"]
    assert plan.profiles(CONFIG, "cpu", "cpu") == {}
    assert "'profiles' is for cuda alone" in plan.elsewhere(CONFIG, "cpu", "cpu")["profiles"]


def test_predictions_wait_for_the_gates_of_what_they_use():
    jobs = plan.predictions(CONFIG, "cuda", "nvidia-h200")
    assert jobs["predictions--mid_b1--sdpa_cudnn_padded"]["gates"] == "baseline|cuda_graphs"
    gates = jobs["predictions--mid_b1--fused"]["gates"].split("|")
    assert {"op--linear--fused", "op--attention--fused", "op--mlp--fused", "skip_unread"} <= {
        *gates
    }


def test_section_gates_may_ask_for_one_of_each_implementation_of_ours():
    every = plan.gates({"gates": ["baseline", plan.EVERY_OPERATOR, "op--swiglu--triton"]})
    assert every[0] == "baseline" and len(set(every)) == len(every)
    ours = {
        f"op--{op}--{name}"
        for op in catalog().operators
        for name in catalog().names(op)
        if catalog().role(op, name) == "own"
    }
    assert set(every) == ours | {"baseline"}
    assert set(plan.gates(CONFIG)) >= ours


def test_operators_at_runs_of_language_models_and_at_sizes_by_name():
    config = copy.deepcopy(CONFIG)
    config["models"] = {"llama": {"gated": True, "d_ff": 14336, "d_model": 4096}}
    config["runs"] = {"train_2k": {"batch": 2, "n_tokens": 2048}}
    config["ops"] = {
        "swiglu": {
            "devices": ["cuda"],
            "priority": 1,
            "at": ["llama/train_2k"],
            "problems": {"narrow": {"rows": 7, "width": 40}},
            "implementations": ["torch", "installed", "triton"],
            "replicates": 1,
        }
    }
    config["noise"] = {"devices": [], "ops": {}}
    ops = plan.ops(config, "cuda", "nvidia-h200")
    assert set(ops) == {"swiglu--llama-train_2k", "swiglu--narrow"}
    llama, narrow = ops.values()
    assert llama["shape"] == "llama/train_2k"
    assert json.loads(llama["problem"])["sizes"] == {"rows": 4096, "width": 14336}
    assert json.loads(narrow["problem"])["sizes"] == {"rows": 7, "width": 40}
    others = catalog().installed("swiglu")
    assert list(narrow["implementations"]) == ["torch", *others, "triton", "triton--twin1"]


def test_steps_of_the_host_s_study_are_a_job_a_shape_and_come_before_its_calls():
    jobs = plan.host_steps(CONFIG, "cuda", "nvidia-h200")
    section = CONFIG["host"]["steps"]
    assert list(jobs) == [f"host--steps--{shape}" for shape in section["shapes"]]
    job = jobs["host--steps--small"]
    forms = [(form["variant"], form["cuda_graph"]) for form in job["forms"]]
    assert forms == [(name, False) for name in section["launched"]] + [
        (name, True) for name in section["captured"]
    ]
    calls = plan.host(CONFIG, "cuda", "nvidia-h200")
    order = [name for name, _ in plan.running_order(jobs | calls)]
    assert set(order[: 2 * len(jobs)]) == set(jobs) and job["study"] == "host"
    assert plan.host_steps(CONFIG, "cpu", "cpu") == {}
