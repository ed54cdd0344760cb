"""Tests the way from configuration to jobs."""

import json
import math
import re
from pathlib import Path

import pytest

from tests.workflow.conftest import changed
from tnp.bench import policy
from tnp.bench.outcome import implementation_of
from tnp.dispatch import tuned_tables
from tnp.dispatch.registry import catalog
from tnp.gates import n_shares
from tnp.model.variants import named_specs
from tnp.store.schemas import CEILINGS, FORMATS
from workflow import models, plan, problems
from workflow.configuration import read
from workflow.plan import Plan
from workflow.studies.ops import deciding
from workflow.validation import validate

CONFIG = read(Path(__file__).parents[2] / "config.yaml")
CHECKED = validate(CONFIG)
GPU, CPU = Plan(CHECKED, "cuda", "nvidia-h200"), Plan(CHECKED, "cpu", "cpu")
STEPS, OPS, PREDICTIONS = GPU.jobs["step"], GPU.jobs["op"], GPU.jobs["prediction"]
BENCHED = {name: job for name, job in OPS.items() if name not in GPU.on_demand}
UNTUNED = {name: job for name, job in OPS.items() if job["study"] == "untuned"}


def planned(config: dict) -> Plan:
    return Plan(validate(config), "cuda", "nvidia-h200")


def gates(job: dict) -> set[str]:
    return set(job["gates"].split("|"))


def test_ids_say_what_is_measured():
    parameters = STEPS["matrix--mid--separate--ckpt--graph"]
    assert parameters["checkpoint"] and parameters["cuda_graph"]
    assert parameters["n_context"] == 10_000
    assert "matrix--mid--separate" in STEPS
    assert not STEPS["memory_feasibility--large--sdpa_flash"]["optimizer"]


def test_a_device_takes_part_only_where_it_is_named():
    assert {job["study"] for job in CPU.jobs["step"].values()} == {"cpu"}
    assert CPU.jobs["train"].keys() == {"gp_cpu"}
    for kind in plan.TABLES.keys() - {"gate", "step", "train"}:
        assert CPU.jobs[kind] == {} and GPU.jobs[kind]


def test_an_operators_implementations_are_one_job_a_size_and_replicate():
    spec = CONFIG["ops"]["attention"]
    names = problems.implementations("attention", spec["implementations"])
    # One of ours stands in it twice.
    assert OPS["attention--mid"]["implementations"] == {
        name: f"attention--mid--{name}" for name in [*names, "fused--twin1"]
    }
    assert OPS["ceilings--copy"]["implementations"] == {"torch": "ceilings--copy"}
    ceilings = {name: job for name, job in OPS.items() if job["study"] == "ceilings"}
    assert ceilings["ceilings--matmul"]["dtype"] == CONFIG["compute_dtype"]["cuda"]
    assert ceilings["ceilings--matmul_e4m3"]["dtype"] == "e4m3"
    assert len(ceilings) == len(CEILINGS) + len(FORMATS) - 1
    jobs = [name for name, _ in GPU.order if name.startswith("attention--")]
    assert len(jobs) == len(spec["shapes"]) * spec["replicates"]


def test_an_operators_benchmark_has_the_sizes_it_depends_on():
    names = ("batch", "n_q", "n_k", "head_dim", "d_model", "d_ff", "d_ff_storage", "n_components")
    expected = {
        "attention--mid": (4, 11_000, 10_000, 64, None, None, None, None),
        "add_rms_norm--mid": (4, 11_000, None, None, 512, None, None, None),
        "mlp--mid": (4, 11_000, None, None, 512, 1365, 1408, None),
        "mixture_heads--mid": (4, 1_000, None, None, 512, 1365, 1408, 10),
        "mixture_nll--mid": (4, 1_000, None, None, None, None, None, 10),
    }
    assert {op: tuple(OPS[op].get(name) for name in names) for op in expected} == expected
    config = changed(CONFIG, "ops.wide", CONFIG["ops"]["mlp"] | {"op": "mlp", "d_ff_storage": 2048})
    del config["ops"]["mlp"]["d_ff_storage"]
    found = planned(config).jobs["op"]
    widths = {name: found[name]["d_ff_storage"] for name in ("wide--mid", "mlp--mid")}
    assert widths == {"wide--mid": 2048, "mlp--mid": 1365}


def test_the_ablation_adds_each_component_and_takes_it_away():
    spec = CONFIG["ablation"]
    for shape, components in (("large", spec["shapes"]["large"]["components"]),
                              ("mid", spec["components"])):  # fmt: skip
        at = [p for p in STEPS.values() if (p["study"], p["shape"]) == ("ablation", shape)]
        assert len(at) == 2 + 2 * len(components)
        assert {p["cuda_graph"] for p in at} == {shape == "mid"}
        assert {p["replicates"] for p in at} == {3 if shape == "mid" else 1}
    only = STEPS["ablation--small--only_mlp--graph"]
    base, full = (models.variants(CHECKED)[spec[end]] for end in ("base", "full"))
    assert full["d_ff_storage"] == 1408 and named_specs()[spec["full"]]["d_ff_storage"] is True
    assert only["variant_spec"] == base | {"mlp": "fused"}
    without = STEPS["ablation--small--without_mlp--graph"]
    assert without["variant_spec"] | {"mlp": "fused"} == full and without["cuda_graph"]
    attention = STEPS["ablation--mid--without_attention--graph"]["variant_spec"]["attention"]
    assert attention == base["attention"]
    assert "skip_unread" not in STEPS["ablation--mid--without_skip_unread--graph"]["variant_spec"]


def test_a_job_says_what_it_uses_and_what_it_waits_for():
    only = STEPS["ablation--small--only_mlp--graph"]
    operators = json.loads(only["operators"])
    assert operators["mlp"] == "fused" and operators["rms_norm"] == "torch"
    assert only["gates"] == "baseline|op--mlp--fused|cuda_graphs"
    assert STEPS["matrix--mid--sdpa_flash"]["gates"] == "baseline"
    # Only the large step has rows enough to be recomputed.
    assert "checkpointing" not in gates(STEPS["ablation--mid--fused--graph"])
    assert "checkpointing" in gates(STEPS["ablation--large--fused"])
    assert "checkpointing" in gates(STEPS["matrix--mid--fused--ckpt"])
    for name in (
        "varying--varying--fused",
        "varying_samples--varying_samples--fused_packed--graph",
    ):
        assert "ragged" in gates(STEPS[name]) and STEPS[name]["vary"]["n_context"] == [3, 64]
    assert not {"ragged", "centred"} & gates(STEPS["headline--small--fused--graph"])
    assert "centred" in gates(STEPS["centred--small--fused_centred--graph"])
    runs = GPU.jobs["train"]
    assert runs["gp_small_sdpa"]["gates"] == "baseline|cuda_graphs"
    assert "buffer" in gates(runs["gp_small_buffer"]) and "buffer" not in gates(runs["gp_small"])
    assert PREDICTIONS["predictions--mid_b1--sdpa_cudnn_padded"]["gates"] == "baseline|cuda_graphs"
    ours = {"op--linear--fused", "op--attention--fused", "op--mlp--fused", "skip_unread"}
    assert ours <= gates(PREDICTIONS["predictions--mid_b1--fused"])


def test_the_runs_that_are_compared_differ_in_their_variant_alone():
    runs = GPU.jobs["train"]
    own = ("config_id", "run", "variant", "variant_spec", "operators", "gates", "baseline")
    compared = [
        {key: value for key, value in runs[f"gp_small_{name}"].items() if key not in own}
        for name in ("sdpa", "fused", "flash")
    ]
    assert compared[0] == compared[1] == compared[2]


def test_training_overrides_its_shape():
    run = CPU.jobs["train"]["gp_cpu"]
    assert (run["batch"], run["n_context"], run["n_target"]) == (16, 64, 64)
    assert run["model"]["d_model"] == 64 and "devices" not in run
    assert CPU.job("train", "gp_cpu", None) == run


def test_studies_run_by_priority_and_in_rounds_each_in_its_own_order():
    order = plan.running_order(STEPS)
    rounds = [(STEPS[name]["priority"], replicate) for name, replicate in order]
    assert rounds == sorted(rounds)
    first, second = (
        [name for name, r in order if r == wanted and STEPS[name]["study"] == "backends"]
        for wanted in (1, 2)
    )
    assert sorted(first) == sorted(second) and first != second
    assert order == plan.running_order(dict(reversed(STEPS.items())))
    of_study = GPU.studies()
    assert sum(map(len, of_study.values())) == len(GPU.order)
    assert of_study["backends"] == [job for job in order if job[0].startswith("backends--")]


def test_a_job_is_told_its_replicate_and_nothing_that_only_orders_it():
    told = GPU.job("step", "matrix--mid--separate", "2")
    assert told["replicate"] == 2 and not {"replicates", "priority"} & told.keys()
    rest = {name: value for name, value in told.items() if name != "replicate"}
    assert rest.items() <= STEPS["matrix--mid--separate"].items()


def test_noise_is_one_implementation_with_its_copies():
    spec = CONFIG["noise"]
    jobs = {name: job for name, job in OPS.items() if job["study"] == "noise"}
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
    [("auto", "cpu", "cpu"), ("cpu", "nvidia-h200", "cpu"), ("nvidia-a100", "cpu", "nvidia-a100"),
     ("cuda", "nvidia-h200", "nvidia-h200"), ("cuda", "cpu", None)],
)  # fmt: skip
def test_device(wanted, found, slug):
    if slug is None:
        with pytest.raises(ValueError, match="no NVIDIA GPU is visible"):
            plan.device(wanted, found)
    else:
        assert plan.device(wanted, found) == slug


def test_what_is_for_a_gpu_says_that_none_is_visible_and_what_runs_here():
    sentences = CPU.elsewhere()
    ours = {"headline", "mlp", "ablation", "gp_small", "joint", "profiles", "noise", "host"}
    assert "cpu" not in sentences and ours <= set(sentences)
    assert sentences["headline"] == (
        "'headline' is for cuda alone, and no NVIDIA GPU is visible: what can be run here is cpu, "
        "figures, gates and all"
    )
    there = GPU.elsewhere()
    assert "headline" not in there
    assert re.search("and the device is 'nvidia-h200': what .* specification, .*gates and all$",
                     there["cpu"])  # fmt: skip
    assert CPU.names_elsewhere()["mlp--mid--fused"] == sentences["mlp"]
    assert "cpu--small_b1--fused" not in CPU.names_elsewhere()


def test_every_kind_of_job_can_be_measured_again_but_what_is_on_demand():
    jobs = GPU.names()
    assert {kind for kind, _ in jobs.values()} == plan.TABLES.keys()
    assert jobs["attention--mid--sdpa_flash"] == ("op", "attention--mid")
    assert jobs["gates--baseline"] == ("gate", "baseline")
    assert GPU.on_demand and not GPU.on_demand.keys() & jobs.keys()


def test_predictions_are_a_job_for_each_shape_and_variant():
    assert set(PREDICTIONS) == {
        f"{study}--{shape}--{variant}"
        for study in ("predictions", "joint")
        for shape in CONFIG[study]["shapes"]
        for variant in CONFIG[study]["variants"]
    }
    job, joint = PREDICTIONS["predictions--mid_b1--fused"], PREDICTIONS["joint--mid_b1--fused"]
    assert (job["batch"], job["n_context"], job["n_target"]) == (1, 10_000, 1000)
    assert job["dtype"] == CONFIG["compute_dtype"]["cuda"] and job["study"] == "predictions"
    # Joint samples are of a model with a buffer, and wait for its gate.
    assert joint["study"] == "joint" and joint["model"] == CONFIG["model"] | {"buffer": 128}
    assert gates(joint) - gates(job) == {"buffer"} and "buffer" not in job["model"]


def test_language_models_are_a_job_for_each_format_with_the_forms_that_have_it():
    jobs, section = GPU.jobs["generation"], CONFIG["language_models"]
    assert len(jobs) == (3 + 9 + 1 + 2) * len(section["weights"]) + 3
    job = jobs["language_models--llama3_1b--b8_p1024_bf16"]
    assert job["forms"] == section["forms"] and job["dtype"] == "bfloat16"
    assert (job["batch"], job["n_prompt"], job["n_new"]) == (8, 1024, 128)
    assert job["timing"]["long_samples"] >= 5 and "latency" not in job["timing"]
    coded = jobs["language_models--llama3_1b--b8_p1024_int4"]["forms"]
    assert coded == [form for form in section["forms"] if not form.startswith("hf")]


def test_profiles_are_a_job_for_each_implementation_of_each_problem():
    jobs = GPU.jobs["profile"]
    job = jobs["profiles--attention--mid--fused"]
    assert job["implementation"] == "fused" and list(job["implementations"]) == ["fused"]
    assert job["study"] == "profiles" and job["sections"] == CONFIG["profiles"]["sections"]
    assert job["problem"] == OPS["attention--mid"]["problem"]
    assert "profiles--rms_norm--llama3_8b-train--torch" in jobs
    causal = jobs["profiles--attention_training--llama3_8b-train--separate"]
    assert causal["op"] == "attention" and '"causal":true' in causal["problem"]


def test_steps_of_the_hosts_study_are_a_job_a_shape_and_come_before_its_calls():
    jobs, section = GPU.jobs["host_step"], CONFIG["host"]["steps"]
    assert list(jobs) == [f"host--steps--{shape}" for shape in section["shapes"]]
    job = jobs["host--steps--small"]
    forms = [(form["variant"], form["cuda_graph"]) for form in job["forms"]]
    assert forms == [(name, False) for name in section["launched"]] + [
        (name, True) for name in section["captured"]
    ]
    order = [name for name, _ in plan.running_order(jobs | GPU.jobs["host"])]
    assert set(order[: 2 * len(jobs)]) == set(jobs) and job["study"] == "host"


def test_section_gates_may_ask_for_one_of_each_implementation_of_ours():
    every = planned(CONFIG).gates
    assert every[0] == "baseline" and len(set(every)) == len(every)
    ours = {
        f"op--{op}--{name}"
        for op in catalog().operators
        for name in catalog().names(op)
        if catalog().role(op, name) == "own"
    }
    assert set(every) == ours | set(CONFIG["gates"]) - {plan.EVERY_OPERATOR}


def test_operators_at_runs_of_language_models_and_at_sizes_by_name():
    problem = json.loads(OPS["cross_entropy--llama3_8b-train"]["problem"])
    assert problem["sizes"] == {"rows": 8 * 2048, "classes": 128_256}
    config = {name: section for name, section in CONFIG.items() if name != "noise"}
    config["models"] = {"llama": {"gated": True, "d_ff": 14336, "d_model": 4096}}
    config["runs"] = {"train_2k": {"batch": 2, "n_tokens": 2048}}
    config["profiles"] = {"priority": 1, "sections": "quick", "ops": {
        "mlp": {"shapes": ["small"], "implementations": ["torch"]}}}  # fmt: skip
    swiglu = {"priority": 1, "at": ["llama/train_2k"], "dtypes": ["float16"]}
    swiglu |= {"problems": {"narrow": {"rows": 7, "width": 40}}}
    swiglu |= {"implementations": ["torch", "installed", "ours"], "passes": ["forward"]}
    config |= {"ops": {"swiglu": swiglu}}
    del config["tuning"]
    ops = planned(config).jobs["op"]
    assert set(ops) == {"swiglu--llama-train_2k_fp16", "swiglu--narrow_fp16"}
    llama, narrow = ops.values()
    assert llama["shape"] == "llama/train_2k_fp16" and llama["passes"] == ["forward"]
    problem = json.loads(llama["problem"])
    assert problem["sizes"] == {"rows": 4096, "width": 14336} and problem["dtype"] == "float16"
    assert json.loads(narrow["problem"])["sizes"] == {"rows": 7, "width": 40}
    others = catalog().installed("swiglu")
    assert list(narrow["implementations"]) == ["torch", *others, "triton", "triton--twin1"]


def test_a_study_of_several_dtypes_has_each_problem_in_each():
    names = [f"dtypes_layer_norm--gpt2-train_1k_{short}" for short in ("fp16", "fp32")]
    assert [json.loads(OPS[name]["problem"])["dtype"] for name in names] == ["float16", "float32"]


def test_every_kernel_of_ours_has_a_profile_and_a_latency():
    known = catalog()
    every = {(op, one.name) for op in known.operators for one in known.ours(op)}
    profiled = {(job["op"], job["implementation"]) for job in GPU.jobs["profile"].values()}
    single = {(job["op"], implementation_of(name)) for job in OPS.values()
              for name in job["implementations"] if policy.LATENCY in job["timing"]}  # fmt: skip
    assert every <= profiled and every <= single


def test_a_gate_of_many_cases_runs_in_several_processes_on_a_gpu():
    gpu, cpu = map(problems.target, ("cuda", "cpu"))
    assert n_shares("op--attention--fused", gpu, 4) == 4
    assert n_shares("op--attention--fused", cpu, 4) == 1
    assert n_shares("op--swiglu--triton", gpu, 4) == n_shares("finite", gpu, 4) == 1


def test_a_study_may_be_timed_in_its_own_way():
    (untuned,) = {job["timing"]["max_sampling_s"] for job in UNTUNED.values()}
    others = [job["timing"] for job in BENCHED.values()
              if "timing" not in CONFIG["ops"].get(job["study"], {})]  # fmt: skip
    usual = CONFIG["timing"]["max_sampling_s"]
    assert {timing["max_sampling_s"] for timing in others} == {usual} != {untuned}
    known = CONFIG["timing"].keys() - {"latency"}
    assert all(job["timing"].keys() - {"latency"} == known for job in OPS.values())
    # A study of latency has the numbers of calls, and no other study has.
    asked = {name for name, spec in CONFIG["ops"].items() if spec.get("timing") == "latency"}
    assert asked and asked == {job["study"] for job in OPS.values() if "latency" in job["timing"]}
    for job in OPS.values():
        assert (
            job["timing"].get("latency", CONFIG["timing"]["latency"]) == CONFIG["timing"]["latency"]
        )


def test_no_table_has_an_entry_of_what_nobody_tuned_for():
    assert {job["op"] for job in UNTUNED.values()} == {"attention"}
    assert all(name.startswith("untuned--") for name in UNTUNED)
    files = tuned_tables.COMMITTED.glob("*.json")
    entries = [entry for path in files for entry in tuned_tables.table(path)]
    tuned = [entry["problem"]["sizes"] for entry in entries if entry["of"].startswith("attention")]
    asked = [json.loads(job["problem"])["sizes"] for job in UNTUNED.values()]
    assert len(asked) >= 60 and len(tuned) >= 60
    assert not [sizes for sizes in asked if sizes in tuned]
    assert {sizes["batch"] * sizes["n_heads"] for sizes in asked} == {8, 32, 64, 512}


def test_nothing_is_measured_twice():
    """The same contenders at the same problem would be two numbers for one thing."""
    by_name = {"config_id", "study", "shape", "priority", "implementations"}
    first: dict[str, str] = {}
    for name, job in BENCHED.items():
        what = {key: value for key, value in job.items() if key not in by_name}
        asked = json.dumps([what, list(job["implementations"])], sort_keys=True)
        assert asked not in first, f"{name} is {first[asked]}"
        first[asked] = name


def test_an_operation_that_two_implementations_share_is_tuned_once():
    of_mid = {name: one for name, one in GPU.on_demand.items() if "--mid--" in name}
    assert {name: (list(one["forced"]), one["passes"]) for name, one in of_mid.items()} == {
        "tuning--attention--mid--forward": (["separate"], ["forward"]),
        "tuning--attention--mid--separate": (["separate"], ["backward"]),
        "tuning--attention--mid--fused": (["fused"], ["backward"]),
        "tuning--attention--mid--forward_8bit": (["e4m3"], ["forward"]),
    }
    for name, one in GPU.on_demand.items():
        assert one["forced"] == {contender: {} for contender in one["implementations"]}
        assert (one["study"], one["config_id"]) == ("tuning", name)
    assert {one["shape"] for one in GPU.on_demand.values()} == set(CONFIG["tuning"]["shapes"])
    assert not GPU.on_demand.keys() & GPU.benchmarks.keys()
    without = {name: section for name, section in CONFIG.items() if name != "tuning"}
    assert not CPU.on_demand and not planned(without).on_demand


def test_implementations_are_chosen_by_the_benchmarks_at_the_shapes_to_tune():
    jobs = deciding(CHECKED, OPS)
    assert ("attention--large", 2) in jobs and ("mlp--small", 1) in jobs
    tuned = {OPS[name]["shape"] for name, _ in jobs}
    assert tuned == set(CONFIG["tuning"]["shapes"])
    for op in {OPS[name]["op"] for name, _ in jobs}:
        known, timed = catalog(), set(CONFIG["ops"][op]["implementations"])
        assert set(known.candidates(op, "auto")) - set(known.installed(op)) <= timed
        assert set(CONFIG["ops"][op]["shapes"]) - tuned  # where nothing was tuned
    without = {name: section for name, section in CONFIG.items() if name != "tuning"}
    assert deciding(CHECKED, CPU.jobs["op"]) == deciding(validate(without), OPS) == []
    study = {"op": "attention", "priority": 1, "timing": "latency", "shapes": ["mid"]}
    quick = changed(CONFIG, "ops.quick", study | {"implementations": ["fused", "auto"]})
    ops = planned(quick).jobs["op"]
    assert "quick--mid" in ops and "quick--mid" not in dict(deciding(validate(quick), ops))
