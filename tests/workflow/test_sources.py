"""Tests which definitions each job depends on, without importing what computes."""

import json
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import duckdb

from tnp.bench.outcome import implementation_of
from tnp.dispatch.registry import AUTO, IMPLEMENTATIONS, OPERATORS, catalog, is_automatic
from tnp.gates import gates_for, gates_of
from tnp.model.variants import FAMILIES
from tnp.store.schemas import CEILINGS
from workflow import sources
from workflow.configuration import read
from workflow.plan import Plan
from workflow.studies import kinds
from workflow.validation import validate

ROOT = Path(__file__).parents[2]
CONFIG = validate(read(ROOT / "config.yaml"))
JOBS = Plan(CONFIG, "cuda", "nvidia-h200").jobs
STEPS, OPS = JOBS["step"], JOBS["op"]


def of_job(kind: str, job: dict) -> dict[str, str]:
    return kinds()[kind].code(job)


def of_step(name: str) -> dict[str, str]:
    return of_job("step", STEPS[name])


def files(found: dict[str, str]) -> set[str]:
    """Returns the files of these definitions, and tables."""
    names = {name.partition(":")[0] for name in found}
    return {n if n.endswith(".json") else f"{n.replace('.', '/')}.py" for n in names}


def test_a_kernel_is_a_source_of_what_uses_it_and_of_nothing_else():
    kernel = "portable/forward.py"

    def uses(found: dict[str, str]) -> bool:
        return any(file.endswith(kernel) for file in files(found))

    assert uses(of_step("matrix--mid--separate"))
    assert not uses(of_step("matrix--mid--sdpa_flash"))
    assert uses(sources.of_gate("op--attention--separate"))
    assert not uses(sources.of_gate("baseline"))
    assert "tnp/model/network.py" in files(sources.of_gate("baseline"))


def test_gates_run_all_that_an_operators_benchmark_needs_a_gate_for():
    """A part that no gate runs leaves a row undecided. `auto` may choose a form without a gate."""
    own = {
        (job["op"], name): job | {"implementation": name}
        for job in OPS.values()
        for name in map(implementation_of, job["implementations"])
        if job["op"] not in CEILINGS and not is_automatic(name) and gates_of(job["op"], name)
    }
    assert len(own) > 30
    timed = {pair: sources.of_op(job) for pair, job in own.items()}
    with duckdb.connect() as connection:
        connection.execute((ROOT / "workflow/sql/stg_macros.sql").read_text())
        parts = [sorted({part for found in timed.values() for part in found})]
        query = "select part from (select unnest(?) as part) where needs_a_gate('definition', part)"
        awaiting = {part for (part,) in connection.execute(query, parts).fetchall()}
    for (op, name), found in timed.items():
        tested = {part for gate in gates_of(op, name) for part in sources.of_gate(gate).items()}
        missing = {(part, hash_) for part, hash_ in found.items() if part in awaiting} - tested
        assert not missing, f"{op} {name}"


def test_a_variants_operators_are_sources_each_of_its_own():
    kernels = {
        op: f"tnp/ops/{file}.py"
        for op, file in (("mlp", "mlp/composed"), ("rms_norm", "rms_norm/triton_rms_norm"))
    }

    def used(found: dict[str, str]) -> set[str]:
        return {op for op, kernel in kernels.items() if kernel in files(found)}

    assert used(of_step("ablation--small--only_mlp--graph")) == {"mlp"}
    assert used(of_step("ablation--small--fused--graph")) == {"mlp", "rms_norm"}
    assert used(of_step("matrix--mid--fused_attention")) == set()
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
        "attention/portable/forward",
        "attention/portable/backward",
        "attention/few_keys",
        "attention/hopper/forward",
        "attention/hopper/backward",
        "embedding/triton_embedding",
        "_shared/hopper_matmul",
        "_shared/hopper_silu",
        "mixture_heads/hopper",
        "mixture_heads/saved_z",
        "mixture_heads/triton_heads",
        "mixture_nll/triton_mixture_nll",
        "mlp/composed",
        "_shared/norms",
        "projection/products",
        "rms_norm/triton_rms_norm",
        "_shared/triton_matmul",
        "_shared/weight_gradient",
    )
}


def used_kernels(found: dict[str, str]) -> set[str]:
    return (KERNELS | {"tnp/ops/mlp/single.py"}) & files(found)


def test_a_plain_step_has_no_kernel_of_ours_among_its_sources():
    assert used_kernels(of_step("matrix--mid--sdpa_flash")) == set()
    assert used_kernels(of_step("ablation--small--fused--graph")) == KERNELS


def test_the_gate_of_the_whole_model_of_ours_has_every_kernel_among_its_sources():
    assert used_kernels(sources.of_gate("skip_unread")) == KERNELS | {"tnp/ops/mlp/single.py"}
    # Nor has it kernels to learn from, which "auto" never chooses.
    assert not any("wmma" in name for name in sources.of_gate("skip_unread"))
    assert any("wmma" in name for name in sources.of_gate("tolerances"))
    # The gate names these two.
    for name in ("separate", "fused"):
        assert catalog().load("attention", name).selectable
    # Otherwise an edited kernel would void what PyTorch's steps wait for.
    for gate in ("baseline", "checkpointing", "cuda_graphs"):
        assert used_kernels(sources.of_gate(gate)) == set()


def test_a_gate_of_all_operators_has_those_outside_the_model_among_its_sources():
    kernel = "tnp/ops/swiglu/triton_swiglu.py"
    gates = ("tolerances", "kernels", "skip_unread")
    assert [kernel in files(sources.of_gate(gate)) for gate in gates] == [True, True, False]


def test_what_a_backward_runs_is_its_source():
    fused, single = (
        used_kernels(sources.of_op({"op": "mlp", "implementation": name}))
        for name in ("fused", "single")
    )
    assert single == fused | {"tnp/ops/mlp/single.py"}
    assert "tnp/ops/mlp/composed.py" in fused and "tnp/ops/_shared/hopper_silu.py" in fused
    projection = used_kernels(sources.of_gate("op--linear--fused"))
    own = {"tnp/ops/_shared/weight_gradient.py", "tnp/ops/projection/products.py"}
    assert projection == own | {"tnp/ops/_shared/triton_matmul.py"}  # tiles of a few rows


def test_what_auto_may_choose_is_its_source_and_gate():
    step = STEPS["auto--mid--auto--graph"]
    assert set(json.loads(step["operators"]).values()) == {"auto"}
    every = [
        gates_for({family: name})
        for family in FAMILIES
        for operator in catalog().family(family)
        for name in catalog().candidates(operator.name, AUTO)
    ]
    assert set(step["gates"].split("|")) == set().union(*every) | {
        "skip_unread", "cuda_graphs", "op--transformer_block--fused"
    }  # fmt: skip

    def of(op: str, name: str) -> set[str]:
        parameters = {"op": op, "implementation": name, "device_slug": "nvidia-h200"}
        return files(sources.of_op(parameters))

    mlp = {name: of("mlp", name) for name in ("torch", "single", "fused", "auto")}
    assert mlp["auto"] == mlp["torch"] | mlp["single"] | mlp["fused"]  # no table chooses an MLP
    # Its kernels' entries decide about what is ours too, and nothing about PyTorch's.
    attention = {name: of("attention", name) for name in ("sdpa_flash", "fused", "auto")}
    found = {name: "nvidia-h200.json" in own for name, own in (mlp | attention).items()}
    assert found["auto"] and found["fused"] and not found["torch"] and not found["sdpa_flash"]
    assert not any("peers" in file for file in attention["auto"])
    assert "nvidia-h200.json" not in files(sources.of_gate("op--mlp--fused"))


def test_what_is_timed_is_named_by_the_gates_that_it_waits_for():
    """Otherwise an edit of it would leave its rows proven by gates that never saw the edit."""
    model = re.compile(
        r"tnp\.(ops|train\.step|model\.(network|transformer_np|causal_buffer|prediction|sampling|"
        r"sample_graph))(\.|:|$)"
    )

    def unproven(found: dict[str, str], gates: list[str]) -> set[str]:
        ran = {name for name in sources.code(found) if model.match(name)}
        return ran - set().union(*map(sources.of_gate, gates))

    for kind in ("step", "prediction"):
        for job in JOBS[kind].values():
            assert not unproven(of_job(kind, job), job["gates"].split("|")), job["config_id"]
    for config_id, job in OPS.items():
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


def test_a_fingerprint_sees_the_tuned_tables_and_the_script():
    found = of_step("matrix--mid--separate")
    assert "nvidia-h200.json" in files(found)
    turned = dict(reversed(found.items()))
    prints = [sources.fingerprint(*of) for of in (
        ("gate", found), ("gate", turned), ("benchmark", found), ("gate", sources.code(found)),
    )]  # fmt: skip
    assert prints[0] == prints[1] and len(set(prints)) == 3


def test_the_order_of_implementations_voids_nothing():
    """The table has entries of each."""
    job = OPS["attention--mid"]
    turned = job | {"implementations": dict(reversed(job["implementations"].items()))}
    assert of_job("op", job) == of_job("op", turned)
    tables = [name for name in of_job("op", job) if ".json:" in name]
    assert len(tables) > 2


PLANNING = """
import sys, time
started = time.perf_counter()
from workflow import sources
from workflow.configuration import read
from workflow.plan import Plan
from workflow.studies import kinds
from workflow.validation import validate
plan = Plan(validate(read("config.yaml")), "cuda", "nvidia-h200")
for gate in plan.gates:
    sources.of_gate(gate)
for kind, jobs in plan.jobs.items():
    for job in jobs.values():
        kinds()[kind].completed(job)
print(f"planned in {time.perf_counter() - started:.1f} s")
heavy = {name.partition(".")[0] for name in sys.modules}
heavy &= {"torch", "triton", *sys.argv[1:]}
sys.exit(", ".join(heavy) or 0)
"""


def test_planning_for_a_gpu_imports_nothing_that_computes():
    """Neither PyTorch nor Triton, nor a package whose entry points are implementations alone."""

    def packages(group: str) -> set[str]:
        return {entry.module.partition(".")[0] for entry in metadata.entry_points(group=group)}

    # An operator's declaration is imported, and so is the package that holds it.
    modules = packages(IMPLEMENTATIONS) - packages(OPERATORS) - {"tnp"}
    done = subprocess.run(
        [sys.executable, "-c", PLANNING, *modules], cwd=ROOT, capture_output=True, text=True
    )
    print(done.stdout)  # how long it took, which nothing is asserted of
    assert done.returncode == 0, f"it imported {done.stderr}"
    assert "planned in" in done.stdout


def test_whole_steps_of_the_host_s_study_depend_on_all_their_forms():
    job = JOBS["host_step"]["host--steps--small"]
    found = of_job("host_step", job)
    assert {
        "tnp.bench.host_steps:measure_host_steps",
        "tnp.train.step:TrainingStep",
    } <= found.keys()
    assert any(name.startswith("tnp.ops.rms_norm.triton_rms_norm:") for name in found)
    plain = job | {"forms": [form for form in job["forms"] if form["variant"] == "sdpa_flash"]}
    theirs = of_job("host_step", plain)
    assert not any(name.startswith("tnp.ops.rms_norm.triton_rms_norm:") for name in theirs)


def test_a_profile_depends_on_the_launch_and_on_the_kernels_that_it_runs():
    jobs = JOBS["profile"]
    ours = of_job("profile", jobs["profiles--rms_norm--llama3_8b-train--fused"])
    assert "tnp.bench.profile_launch:launch" in ours and "tnp.bench.ncu:profile" in ours
    assert any(name.startswith("tnp.ops.rms_norm.triton_rms_norm:") for name in ours)
    theirs = of_job("profile", jobs["profiles--rms_norm--llama3_8b-train--torch"])
    assert not any(name.startswith("tnp.ops.rms_norm.triton_rms_norm:") for name in theirs)


def test_a_form_of_a_language_model_has_no_code_of_the_others():
    study = kinds()["generation"]
    job = study.completed(JOBS["generation"]["language_models--gpt2--b1_p512_bf16"])
    found = job["definitions"]
    assert list(found) == job["forms"]
    everywhere = set.intersection(*map(set, found.values()))
    assert {"tnp.bench.language:measure_language", "tnp.llm.decoder:Decoder"} <= everywhere
    of_one = {
        "hf_static": "tnp.bench.language_hf:static",
        "compiled_decoder": "tnp.bench.compiled_decoder:compiled",
        "ours": "tnp.bench.language:ours",
    }
    for name, definition in of_one.items():
        assert [form for form in found if definition in found[form]] == [name]
    assert study.code(job).keys() == set().union(*found.values())
