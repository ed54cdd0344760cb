"""Tests which files the jobs of a plan write, their gates, and what voids a result."""

import os
from pathlib import Path

import pytest

from tests.workflow.conftest import changed, configuration, small
from workflow.attempts import attempt, named
from workflow.files import Files
from workflow.jobs import write
from workflow.plan import Plan
from workflow.validation import validate

STEP, OP = "cpu--tiny--separate", "attention--tiny"
GATE = "op--attention--separate"
CONFIG = changed(small(), "ops.attention.implementations", ["sdpa_flash", "separate"])
CONFIG["steps"]["cpu"] |= {"checkpoint": [False, True], "replicates": 2}
CONFIG["training"] = configuration()["training"]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    return "data/runs/cpu"


def files(runs: str, config: dict = CONFIG, again: str = "", device: str = "cpu") -> Files:
    """Returns the files of a new run of the workflow."""
    plan = Plan(validate(config), device, device)
    return Files(plan, runs, named(again, plan.names(), {}) if again else ())


def stems(found: list[str], table: str) -> set[str]:
    """Returns "<stem> <number>" of those results that are of `table`."""
    of = [attempt(Path(file)) for file in found if Path(file).parent.name == table]
    return {f"{one.stem} {one.number}" for one in of}


def made(planned: dict[str, str], status: str = "ok", reason: str | None = None) -> Path:
    """Writes the files of a job; a training's rows have no status."""
    own = next(iter(planned))
    write(
        planned,
        {own: [{"run": "a"} if own == "training" else {"status": status, "reason": reason}]},
    )
    return Path(planned[own])


def test_every_job_of_the_plan_and_each_gate_that_one_waits_for_is_asked_for(runs):
    found = files(runs).of_plan()
    each = [f"cpu--tiny--{name}{mark}--r{r}" for name in ("sdpa_flash", "separate")
            for mark in ("", "--ckpt") for r in ("1 1", "2 1")]  # fmt: skip
    assert stems(found, "steps") == stems(found, "stages") == set(each)
    assert stems(found, "ops") == {f"{OP}--r1 1"} and stems(found, "training") == {"gp_tiny 1"}
    assert stems(found, "samples") == {*each, f"{OP}--r1 1"}
    # Gates have the order of config.yaml; `kernels` stands in it and nothing waits for it.
    gates = ["baseline", "checkpointing", "op--attention--separate"]
    assert files(runs).gates_waited_for() == gates
    assert stems(found, "gates") == {f"{gate} 1" for gate in gates}
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
def test_a_job_waits_for_its_gates_until_its_result_is_there(kind, config_id, gates, runs):
    job = (kind, config_id, None if kind == "train" else 1)

    def awaited(now: Files) -> set[str]:
        return stems(now.awaited(kind, config_id, Path(_own(now.planned(*job))).stem), "gates")

    assert awaited(files(runs)) == {f"{gate} 1" for gate in gates}
    own = made(files(runs).planned(*job))
    assert files(runs).planned(*job)[own.parent.name] == str(own) and not awaited(files(runs))
    # Results of other code or parameters are other files, and stay where they are.
    other = changed(CONFIG, "model.d_ff", 64)
    for key, value in {"timeout_s": 7, "latency": CONFIG["timing"]["latency"]}.items():
        other = changed(other, f"timing.{key}", value)
    assert awaited(files(runs, other)) and own.exists()
    assert attempt(Path(_own(files(runs, other).planned(*job)))).number == 2


def _own(planned: dict[str, str]) -> str:
    return next(iter(planned.values()))


def test_the_newest_result_counts_also_where_an_edit_is_taken_back(runs):
    other = changed(CONFIG, "model.d_ff", 64)
    for number, config in enumerate((CONFIG, other, CONFIG), 1):
        planned = files(runs, config).planned("step", STEP, 1)
        assert attempt(Path(_own(planned))).number == number
        made(planned)
    states = [attempt(file).state for file in Path(runs, "steps").iterdir()]
    assert len(states) == 3 and len(set(states)) == 2


def test_a_result_that_gates_refused_waits_for_a_newer_one_of_theirs(runs):
    gates = [made(files(runs).planned("gate", name)) for name in ("baseline", GATE)]
    own = made(files(runs).planned("step", STEP, 1), "gate_failed", "gate baseline is red")
    assert _own(files(runs).planned("step", STEP, 1)) == str(own)
    later = own.stat().st_mtime_ns + 1
    os.utime(gates[1], ns=(later, later))
    again = Path(_own(files(runs).planned("step", STEP, 1)))
    assert attempt(again).number == 2 and files(runs).awaited("step", STEP, again.stem)


def test_a_job_is_done_when_its_own_table_is_there_which_is_written_last(runs):
    planned = files(runs).planned("step", STEP, 1)
    with pytest.raises(ValueError, match="no column 'nope'"):
        write(planned, {"steps": [{"status": "ok"}], "samples": [{"nope": 1}]})
    assert not Path(_own(planned)).exists()
    # It goes on under the same name, and finds its checkpoints again.
    assert files(runs).planned("step", STEP, 1) == planned
    write(planned, {"steps": [{"status": "ok"}]})
    Path(planned["samples"]).unlink()
    assert attempt(Path(_own(files(runs).planned("step", STEP, 1)))).number == 2


def test_a_jobs_own_process_finds_what_was_planned_before(runs):
    planned = files(runs).planned("step", STEP, 1)
    made(planned, "killed")
    plan = Plan(validate(changed(CONFIG, "model.d_ff", 64)), "cpu", "cpu")
    assert Files(plan, runs, planning=False).planned("step", STEP, 1) == planned


def test_a_red_gates_contenders_are_known_by_their_gates(runs):
    assert files(runs).gates("op", OP) == {
        "sdpa_flash": [], "separate": ["op--attention--separate"],
        "separate--twin1": ["op--attention--separate"],
    }  # fmt: skip
    assert files(runs).gates("step", STEP) == ["baseline", "op--attention--separate"]


def test_the_state_is_that_of_code_parameters_and_gates(runs):
    def state(config: dict = CONFIG, replicate: int = 2, name: str = STEP) -> str:
        return files(runs, config).state("step", name, replicate)

    others = changed(CONFIG, "gates", [*CONFIG["gates"], "ragged"])
    # The order of jobs voids none, nor do gates that it does not wait for.
    assert state(changed(CONFIG, "steps.cpu.priority", 9)) == state(others) == state()
    assert len({state(), state(replicate=1), state(changed(CONFIG, "model.d_ff", 64)),
                state(name="cpu--tiny--sdpa_flash")}) == 4  # fmt: skip
    fewer = changed(CONFIG, "gates", ["baseline", GATE])
    assert state(name=f"{STEP}--ckpt") != state(fewer, name=f"{STEP}--ckpt")
    assert files(runs).state("gate", "baseline") != files(runs).state("gate", "checkpointing")


def test_profiles_and_the_hosts_calls_wait_for_no_gate(runs):
    small = {"shapes": ["tiny"], "implementations": ["single"]}
    config = CONFIG | {
        "profiles": {"priority": 1, "sections": "quick", "ops": {"mlp": small}},
        "gates": [*CONFIG["gates"], "op--mlp--single"],
    }
    of_gpu = files(runs, config, device="cuda")
    assert of_gpu.gates("profile", "profiles--mlp--tiny--single") == []


def test_what_was_ended_is_tried_again_as_another_file(runs):
    first = files(runs)
    made(first.planned("step", STEP, 1), "killed")
    made(first.planned("step", STEP, 2))
    made(first.planned("gate", "baseline"), "timeout")
    found = files(runs).of_plan()
    assert {f"{STEP}--r1 2", f"{STEP}--r2 1"} <= stems(found, "steps")
    assert "baseline 2" in stems(found, "gates")
    # A replicate past the planned ones, that was asked for once and did not come about.
    made(first.planned("step", STEP, 3), "killed")
    made(first.planned("step", STEP, 4))
    new = stems(files(runs).of_plan(), "steps")
    assert f"{STEP}--r3 2" in new and not any(f"{STEP}--r4" in stem for stem in new)


def test_again_adds_a_replicate_of_a_benchmark_and_a_result_of_others(runs):
    jobs = ("step", STEP, 1), ("step", STEP, 2), ("op", OP, 1), ("train", "gp_tiny")
    for job in (*jobs, ("gate", "baseline")):
        made(files(runs).planned(*job))
    found = files(runs, again=f"{STEP},{OP}--sdpa_flash,gp_tiny,gates--baseline").of_again()
    assert stems(found, "steps") == {f"{STEP}--r3 1", f"{STEP}--ckpt--r1 1"}
    assert stems(found, "ops") == {f"{OP}--r2 1"}
    assert stems(found, "training") == {"gp_tiny 2"} and stems(found, "gates") == {"baseline 2"}
    assert files(runs).of_again() == []
