"""Which files the jobs of a plan write, which gates they wait for, and what voids a result."""

from pathlib import Path

import pytest

from tests.workflow.conftest import changed, configuration, small
from tnp.store.files import write_table
from workflow.attempts import Attempts, named, note_state
from workflow.files import Files
from workflow.plan import Plan
from workflow.validation import validate

STEP, OP = "cpu--tiny--separate", "attention--tiny"
CONFIG = changed(small(), "ops.attention.implementations", ["sdpa_flash", "separate"])
CONFIG["steps"]["cpu"] |= {"checkpoint": [False, True], "replicates": 2}
CONFIG["training"] = configuration()["training"]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return "data/runs/cpu"


def files(runs: str, config: dict = CONFIG, again: str = "", device: str = "cpu") -> Files:
    """The files of a new run of the workflow."""
    plan = Plan(validate(config), device, device)
    names = named(again, plan.names(), {}) if again else ()
    return Files(plan, runs, Attempts(runs), names)


def stems(found: list[str], table: str) -> set[str]:
    return {Path(file).stem for file in found if Path(file).parent.name == table}


def made(runs: str, table: str, stem: str, status: str = "ok") -> Path:
    file = Path(runs, table, f"{stem}.parquet")
    write_table(file, table, [{"status": status}] if table != "training" else [{"run": stem}])
    return file


def test_every_job_of_the_plan_and_each_gate_that_one_waits_for_is_asked_for(runs):
    found = files(runs).of_plan()
    each = [f"cpu--tiny--{name}{mark}--r{r}" for name in ("sdpa_flash", "separate")
            for mark in ("", "--ckpt") for r in (1, 2)]  # fmt: skip
    assert stems(found, "steps") == stems(found, "stages") == set(each)
    assert stems(found, "ops") == {f"{OP}--r1"} and stems(found, "training") == {"gp_tiny"}
    assert stems(found, "samples") == {*each, f"{OP}--r1"}
    # In the order of config.yaml; `kernels` stands in it and nothing waits for it.
    gates = ["baseline", "checkpointing", "op--attention--separate"]
    assert files(runs).gates_waited_for() == gates and stems(found, "gates") == set(gates)
    fewer = CONFIG | {"training": {}, "steps": {}}
    assert files(runs, fewer).gates_waited_for() == ["op--attention--separate"]


@pytest.mark.parametrize(
    "kind, config_id, gates",
    [
        ("step", STEP, {"baseline", "op--attention--separate"}),
        ("step", f"{STEP}--ckpt", {"baseline", "op--attention--separate", "checkpointing"}),
        ("step", "cpu--tiny--sdpa_flash", {"baseline"}),
        ("op", OP, {"op--attention--separate"}),
        ("train", "gp_tiny", {"baseline"}),
    ],
)
def test_a_job_waits_for_its_gates_until_its_result_is_there_and_of_now(
    kind, config_id, gates, runs
):
    now, replicate = files(runs), None if kind == "train" else "1"
    job = (kind, config_id, replicate)
    assert stems(now.awaited(*job, ""), "gates") == gates
    stem = config_id if replicate is None else f"{config_id}--r1"
    own = made(runs, {"step": "steps", "op": "ops", "train": "training"}[kind], stem)
    assert stems(now.awaited(*job, ""), "gates") == gates  # nothing says of which code it is
    note_state(own, now.state(*job), refused=False)
    assert now.awaited(*job, "") == []
    assert now.awaited(*job, "--a2")  # which is another file
    # Of a gate that runs again, it does not run again; of other parameters or gates it does.
    other = changed(CONFIG, "model.d_ff", 64)
    for key, value in {"timeout_s": 7, "latency": CONFIG["timing"]["latency"]}.items():
        other = changed(other, f"timing.{key}", value)
    assert files(runs, other).awaited(*job, "")
    note_state(own, now.state(*job), refused=True)
    assert now.awaited(*job, "")


def test_a_red_gates_contenders_are_known_by_their_gates(runs):
    assert files(runs).gates("op", OP) == {
        "sdpa_flash": [], "separate": ["op--attention--separate"],
        "separate--twin1": ["op--attention--separate"],
    }  # fmt: skip
    assert files(runs).gates("step", STEP) == ["baseline", "op--attention--separate"]


def test_what_a_job_is_told_is_its_code_its_parameters_and_its_gates(runs):
    told = files(runs).params("step", STEP, "2")
    assert told.keys() == {"code", "parameters", "gates", "state"}
    assert told["parameters"]["replicate"] == 2
    others = [
        files(runs, config).params("step", STEP, "2")
        for config in (changed(CONFIG, "model.d_ff", 64), changed(CONFIG, "steps.cpu.priority", 9),
                       changed(CONFIG, "gates", [*CONFIG["gates"], "ragged"]))
    ]  # fmt: skip
    assert [other["state"] == told["state"] for other in others] == [False, True, True]
    assert others[1]["parameters"] == told["parameters"]  # what only orders the jobs voids none
    first = files(runs).params("step", STEP, "1")
    assert first["code"] == told["code"] and first["state"] != told["state"]
    plain = files(runs).params("step", "cpu--tiny--sdpa_flash", "1")
    assert plain["code"] != told["code"]


def test_profiles_and_the_hosts_calls_wait_for_no_gate(runs):
    small = {"shapes": ["tiny"], "implementations": ["single"]}
    config = CONFIG | {
        "profiles": {"priority": 1, "sections": "quick", "ops": {"mlp": small}},
        "gates": [*CONFIG["gates"], "op--mlp--single"],
    }
    of_gpu = files(runs, config, device="cuda")
    job = ("profile", "profiles--mlp--tiny--single", "1")
    assert of_gpu.awaited(*job, "") == [] and of_gpu.params(*job).keys() == {"code", "parameters"}


def test_what_was_ended_is_tried_again_as_another_file(runs):
    made(runs, "steps", f"{STEP}--r1", "killed")
    made(runs, "steps", f"{STEP}--r2")
    made(runs, "gates", "baseline", "timeout")
    found = files(runs).of_plan()
    assert {f"{STEP}--r1--a2", f"{STEP}--r2"} <= stems(found, "steps")
    assert "baseline--a2" in stems(found, "gates")
    assert "baseline--a2" in stems(files(runs).awaited("step", STEP, "1", ""), "gates")
    # A replicate past the planned ones, that was asked for once and did not come about.
    made(runs, "steps", f"{STEP}--r3", "killed")
    made(runs, "steps", f"{STEP}--r4")
    new = stems(files(runs).of_plan(), "steps")
    assert f"{STEP}--r3--a2" in new and not {f"{STEP}--r3", f"{STEP}--r4"} & new


def test_again_adds_a_replicate_of_a_benchmark_and_an_attempt_of_others(runs):
    for table, stem in (("steps", f"{STEP}--r1"), ("steps", f"{STEP}--r2"), ("ops", f"{OP}--r1"),
                        ("training", "gp_tiny"), ("gates", "baseline")):  # fmt: skip
        made(runs, table, stem)
    found = files(runs, again=f"{STEP},{OP}--sdpa_flash,gp_tiny,gates--baseline").of_again()
    assert stems(found, "steps") == {f"{STEP}--r3", f"{STEP}--ckpt--r1"}
    assert stems(found, "ops") == {f"{OP}--r2"}
    assert stems(found, "training") == {"gp_tiny--a2"} and stems(found, "gates") == {"baseline--a2"}
    assert files(runs).of_again() == []
