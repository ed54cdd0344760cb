"""From configuration to jobs, and from imports to the files a job depends on."""

import copy
import json
import math
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import yaml

from tnp.bench.outcome import implementation_of
from tnp.catalog import AUTO, IMPLEMENTATIONS, catalog
from tnp.gates import gates_for, gates_of
from tnp.schemas import CEILINGS
from tnp.variants import FAMILIES
from workflow import plan, problems, sources

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
    base, full = CONFIG["variants"][spec["base"]], CONFIG["variants"][spec["full"]]
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
    assert only["gates"] == "baseline|op--mlp--fused|kernels|cuda_graphs"
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


def test_the_strongest_pytorch_has_every_saving_that_ours_has():
    variants = CONFIG["variants"]
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


def files(found: dict[str, str]) -> set[str]:
    """Those that these definitions stand in, and tables."""
    names = {name.partition(":")[0] for name in found}
    return {n if n.endswith(".json") else f"{n.replace('.', '/')}.py" for n in names}


def test_a_kernel_is_a_source_of_what_uses_it_and_of_nothing_else():
    steps = plan.steps(CONFIG, "cuda", "nvidia-h200")
    kernel = "triton_forward.py"

    def uses(found: dict[str, str]) -> bool:
        return any(file.endswith(kernel) for file in files(found))

    assert uses(sources.of_step(steps["matrix--mid--separate"]))
    assert not uses(sources.of_step(steps["matrix--mid--sdpa_flash"]))
    assert uses(sources.of_gate("op--attention--separate"))
    assert not uses(sources.of_gate("baseline"))
    assert "tnp/model.py" in files(sources.of_gate("baseline"))


def test_a_variants_operators_are_sources_each_of_its_own():
    steps = plan.steps(CONFIG, "cuda", "nvidia-h200")
    kernels = {
        op: f"tnp/ops/{file}.py"
        for op, file in (("mlp", "mlp/composed"), ("rms_norm", "rms_norm/triton_rms_norm"))
    }

    def used(found: dict[str, str]) -> set[str]:
        return {op for op, kernel in kernels.items() if kernel in files(found)}

    assert used(sources.of_step(steps["ablation--small--only_mlp--graph"])) == {"mlp"}
    assert used(sources.of_step(steps["ablation--small--fused--graph"])) == {"mlp", "rms_norm"}
    assert used(sources.of_step(steps["matrix--mid--fused_attention"])) == set()
    assert used(sources.of_gate("op--mlp--fused")) == {"mlp"}
    assert (
        used(sources.of_gate("op--attention--separate"))
        == used(sources.of_gate("baseline"))
        == set()
    )
    fused, torch = ({"op": "mlp", "implementation": name} for name in ("fused", "torch"))
    assert used(sources.of_op(fused)) == {"mlp"} and used(sources.of_op(torch)) == set()
    assert not any("rms_norm" in f or "attention" in f for f in files(sources.of_op(torch)))


KERNELS = {
    f"tnp/ops/{module}.py"
    for module in (
        "attention/triton_forward",
        "attention/triton_backward",
        "attention/few_keys",
        "attention/hopper_forward",
        "attention/hopper_backward",
        "embedding/triton_embedding",
        "hopper_matmul",
        "hopper_silu",
        "mixture_heads/hopper",
        "mixture_heads/triton_heads",
        "mixture_nll/triton_mixture_nll",
        "mlp/composed",
        "norms",
        "projection/products",
        "rms_norm/triton_rms_norm",
        "triton_matmul",
        "weight_gradient",
    )
}


def used_kernels(found: dict[str, str]) -> set[str]:
    return (KERNELS | {"tnp/ops/mlp/single.py"}) & files(found)


def test_a_plain_step_has_no_kernel_of_ours_among_its_sources():
    steps = plan.steps(CONFIG, "cuda", "nvidia-h200")
    assert used_kernels(sources.of_step(steps["matrix--mid--sdpa_flash"])) == set()
    assert used_kernels(sources.of_step(steps["ablation--small--fused--graph"])) == KERNELS


def test_the_gate_of_the_whole_model_of_ours_has_every_kernel_among_its_sources():
    assert used_kernels(sources.of_gate("skip_unread")) == KERNELS | {"tnp/ops/mlp/single.py"}
    # Else an edited kernel would void what PyTorch's steps wait for.
    for gate in ("baseline", "checkpointing", "cuda_graphs"):
        assert used_kernels(sources.of_gate(gate)) == set()


def test_what_a_backward_runs_is_its_source():
    fused, single = (
        used_kernels(sources.of_op({"op": "mlp", "implementation": name}))
        for name in ("fused", "single")
    )
    assert single == fused | {"tnp/ops/mlp/single.py"}
    assert "tnp/ops/mlp/composed.py" in fused and "tnp/ops/hopper_silu.py" in fused
    projection = used_kernels(sources.of_gate("op--linear--fused"))
    assert projection == {"tnp/ops/weight_gradient.py", "tnp/ops/projection/products.py"}


def test_what_auto_may_choose_is_its_source_and_gate():
    steps = plan.steps(CONFIG, "cuda", "nvidia-h200")
    step = steps["auto--mid--auto--graph"]
    assert set(json.loads(step["operators"]).values()) == {"auto"}
    every = [
        gates_for({family: name})
        for family in FAMILIES
        for operator in catalog().family(family)
        for name in catalog().candidates(operator.name, AUTO)
    ]
    assert set(step["gates"].split("|")) == set().union(*every) | {"skip_unread", "cuda_graphs"}

    def of(op: str, name: str) -> set[str]:
        parameters = {"op": op, "implementation": name, "device_slug": "nvidia-h200"}
        return files(sources.of_op(parameters))

    mlp = {name: of("mlp", name) for name in ("torch", "single", "fused", "auto")}
    assert mlp["auto"] == mlp["torch"] | mlp["single"] | mlp["fused"] | {"nvidia-h200.json"}
    # Its kernels' entries decide about what is ours too, and nothing about PyTorch's.
    attention = {name: of("attention", name) for name in ("sdpa_flash", "fused", "auto")}
    found = {name: "nvidia-h200.json" in own for name, own in (mlp | attention).items()}
    assert found["auto"] and found["fused"] and not found["torch"] and not found["sdpa_flash"]
    assert not any("peers" in file for file in attention["auto"])
    assert "nvidia-h200.json" not in files(sources.of_gate("op--mlp--fused"))


def test_what_is_timed_is_named_by_the_gates_that_it_waits_for():
    """Otherwise an edit of it would leave its rows proven by gates that never saw the edit."""
    model = re.compile(r"tnp\.(ops|model|step)(\.|:|$)")

    def unproven(found: dict[str, str], gates: list[str]) -> set[str]:
        ran = {name for name in sources.code(found) if model.match(name)}
        return ran - set().union(*map(sources.of_gate, gates))

    for step in plan.steps(CONFIG, "cuda", "nvidia-h200").values():
        assert not unproven(sources.of_step(step), step["gates"].split("|")), step["config_id"]
    for config_id, job in plan.ops(CONFIG, "cuda", "nvidia-h200").items():
        ceiling = job["op"] in CEILINGS
        for name in () if ceiling else set(map(implementation_of, job["implementations"])):
            if gates := gates_of(job["op"], name):
                found = sources.of_op(job | {"implementation": name}, without=())
                # PyTorch's are compared with, and need no proof, where "auto" may take them too.
                plain = set()
                for other in catalog().candidates(job["op"], name):
                    if catalog().listed(job["op"], other).provider == "torch":
                        plain |= sources.of_op(job | {"implementation": other}, ()).keys()
                assert unproven(found, gates) <= plain, (config_id, name)


def test_every_kind_of_job_can_be_measured_again():
    jobs = plan.names(CONFIG, "cuda", "nvidia-h200")
    assert {kind for kind, _ in jobs.values()} == plan.TABLES.keys()


def test_a_fingerprint_sees_the_tuned_tables_and_the_script():
    found = sources.of_step(plan.steps(CONFIG, "cuda", "nvidia-h200")["matrix--mid--separate"])
    assert "nvidia-h200.json" in files(found)
    turned = dict(reversed(found.items()))
    prints = [sources.fingerprint(*of) for of in (
        ("gate", found), ("gate", turned), ("benchmark", found), ("gate", sources.code(found)),
    )]  # fmt: skip
    assert prints[0] == prints[1] and len(set(prints)) == 3


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


PLANNING = """
import sys, time
started = time.perf_counter()
import yaml
from tnp.bench.outcome import implementation_of
from workflow import plan, sources
from workflow.validation import validate
config = yaml.safe_load(open("config.yaml"))
validate(config)
where = config, "cuda", "nvidia-h200"
for gate in plan.gates(config):
    sources.of_gate(gate)
for step in plan.steps(*where).values():
    sources.of_step(step)
for op in (plan.ops(*where) | plan.tuning(*where)).values():
    for name in map(implementation_of, op["implementations"]):
        sources.of_op(op | {"implementation": name})
for run in plan.training(*where).values():
    sources.of_training(run)
print(f"planned in {time.perf_counter() - started:.1f} s")
heavy = {name.partition(".")[0] for name in sys.modules}
heavy &= {"torch", "triton", *sys.argv[1:]}
sys.exit(", ".join(heavy) or 0)
"""


def test_planning_for_a_gpu_imports_nothing_that_computes():
    """Neither PyTorch nor Triton, nor a module that an entry point names."""
    entries = metadata.entry_points(group=IMPLEMENTATIONS)
    modules = {entry.module.partition(".")[0] for entry in entries} - {"tnp"}
    done = subprocess.run(
        [sys.executable, "-c", PLANNING, *modules], cwd=ROOT, capture_output=True, text=True
    )
    print(done.stdout)  # how long it took, which nothing is asserted of
    assert done.returncode == 0, f"it imported {done.stderr}"
    assert "planned in" in done.stdout
