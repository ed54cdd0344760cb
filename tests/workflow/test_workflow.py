"""What a run does: plans, order, refusals, faults, reruns. Measuring itself is faked (conftest)."""

import os
import re
import shutil
import time
from pathlib import Path

import pytest

from tests.workflow.conftest import wait_for

MATRIX = "figures/matrix.html"


def test_without_a_target_all_is_meant(checkout):
    plans = [checkout.run("-n", *target)[1] for target in ((), ("all",))]
    counts = [re.findall(r"^(\w+) +(\d+)$", plan, re.MULTILINE) for plan in plans]
    assert counts[0] == counts[1] and ("step", "2") in counts[0]


def test_dry_run_plans_and_changes_nothing(checkout):
    before = {path for path in checkout.folder.rglob("*") if "__pycache__" not in path.parts}
    status, output = checkout.run("-n", "all")
    assert status == 0, output
    assert re.search(r"^step +2$", output, re.MULTILINE), output
    assert len(output.splitlines()) < 40  # not a block for each job
    after = {path for path in checkout.folder.rglob("*") if "__pycache__" not in path.parts}
    new = {path for path in after - before if ".snakemake" not in path.parts}
    assert new <= {checkout.folder / "config.yaml"}


def test_bad_configuration_ends_before_any_work(checkout):
    checkout.config["steps"]["cpu"]["variants"] = ["sdpa_flsh"]
    status, output = checkout.run("all")
    assert status != 0
    assert "steps.cpu.variants: unknown variant 'sdpa_flsh'" in output
    assert "Traceback" not in output and not checkout.calls()


def test_replicates_run_in_rounds_after_the_gates(checkout):
    checkout.config["steps"]["cpu"]["replicates"] = 2
    status, output = checkout.run("all")
    assert status == 0, output
    calls = checkout.calls()
    # The gates that a job waits for come first, and no other gate runs.
    gates = {"gate baseline", "gate op--attention--separate"}
    assert set(calls[:2]) == gates and not any(call.startswith("gate") for call in calls[2:])
    # By priority of their study, and within one in rounds.
    steps = [call.split()[-1] for call in checkout.measured() if "cpu--" in call]
    operators = [call.split()[-1] for call in checkout.measured() if "attention--" in call]
    assert steps and operators
    assert [call.split()[-1] for call in checkout.measured()] == sorted(steps) + sorted(operators)
    assert "figures/speedup.html" in output and "from speedup" in output


def test_a_study_is_a_target_where_its_device_is(checkout):
    status, output = checkout.run("cpu")
    assert status == 0, output
    assert checkout.measured() and all("cpu--" in call for call in checkout.measured())
    checkout.config["steps"]["cpu"]["devices"] = ["cuda"]
    status, output = checkout.run("cpu")
    assert status != 0
    assert "'cpu' is for cuda alone, and the device is 'cpu': what can be run here is " in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ("cqu", "unknown target 'cqu': did you mean 'cpu'?"),
        ("everything", "unknown target 'everything': choose from again, all, attention, com"),
        ("figures/speedupp.html", "unknown target 'figures/speedupp.html': did you mean 'figu"),
        ("speedup", "unknown target 'speedup': did you mean 'figures/speedup.html'?"),
        ("./figures/speedup.html", "write 'figures/speedup.html' as it stands here"),
        ("figures/headline.svg", "'figures/headline.svg' is drawn from the recorded rows alone"),
        ("data/runs/cpu/steps/a.parquet", "unknown target 'data/runs/cpu/steps/a.parquet': choo"),
    ],
)
def test_a_target_that_is_not_there_is_one_sentence(checkout, target, sentence):
    status, output = checkout.run(target)
    assert status != 0 and output.splitlines()[-1].startswith(sentence), output
    assert "Exception" not in output and not checkout.calls()


def test_second_run_does_nothing_again(finished):
    status, output = finished.run("all", MATRIX)
    assert status == 0, output
    assert not finished.calls()
    assert "figures/speedup.html" in output


def test_second_workflow_at_once_is_refused(checkout):
    first = checkout.start("all", FAKE_SECONDS="2")
    try:
        wait_for(lambda: any(call.startswith("start") for call in checkout.calls()))
        files = sorted(checkout.folder.rglob("data/**/*.parquet"))
        status, output = checkout.run("all")
        assert status != 0
        assert output.count("another workflow") == 1 and "Traceback" not in output
        assert len(checkout.calls()) <= len(files) + 5
    finally:
        first.kill()
        first.end()


def test_killed_run_continues_where_it_was(checkout):
    checkout.config["steps"]["cpu"]["replicates"] = 2
    first = checkout.start("all", FAKE_SECONDS="0.5")
    wait_for(lambda: len(checkout.measured()) >= 2)
    wait_for(lambda: checkout.calls()[-1].startswith("start"))
    first.kill()
    first.end()
    time.sleep(0.7)
    done = checkout.measured()
    assert checkout.calls()[-1].startswith("start"), "the job outlived its workflow"
    assert [file.name for file in checkout.temporary.iterdir()] == ["tnp-cpu.lock"]
    status, output = checkout.run("all")
    assert status == 0, output
    again = checkout.measured()[len(done) :]
    assert not set(done) & set(again)
    assert len(done) + len(again) == 5


def test_red_gate_stops_what_depends_on_it_and_nothing_else(checkout):
    checkout.config["steps"]["cpu"]["checkpoint"] = [False, True]
    status, output = checkout.run("all", FAKE_RED="checkpointing")
    assert status != 0
    assert "Gate checkpointing is red: fake: error 2, bound 1." in output
    assert "Traceback" not in output
    assert output.index("figures/matrix.html") < output.index("Gate checkpointing is red")
    outcomes = {row["config_id"]: row["status"] for row in checkout.rows("steps")}
    assert outcomes == {
        "cpu--tiny--sdpa_flash": "ok",
        "cpu--tiny--sdpa_flash--ckpt": "gate_failed",
        "cpu--tiny--separate": "ok",
        "cpu--tiny--separate--ckpt": "gate_failed",
    }
    assert not any("ckpt" in call for call in checkout.measured())


def test_predictions_wait_for_their_gates_and_a_red_one_stops_them(checkout):
    checkout.config["predictions"] = {
        "devices": ["cpu"],
        "priority": 1,
        "shapes": ["tiny"],
        "variants": ["sdpa_flash", "separate"],
        "replicates": 1,
    }
    status, output = checkout.run("predictions", FAKE_RED="op--attention--separate")
    assert status == 1 and "Gate op--attention--separate is red" in output
    rows = checkout.rows("predictions")
    found = {(row["variant"], row["status"]) for row in rows}
    assert found == {("sdpa_flash", "ok"), ("separate", "gate_failed")} and len(rows) == 10
    assert checkout.measured() == ["predictions--tiny--sdpa_flash 1"]


def test_red_gate_of_one_implementation_leaves_the_others_of_the_job(checkout):
    checkout.config["ops"]["attention"]["implementations"] = ["sdpa_flash", "separate"]
    status, output = checkout.run("attention", FAKE_RED="op--attention--separate")
    assert status != 0
    outcomes = {(row["config_id"], row["pass"]): row["status"] for row in checkout.rows("ops")}
    assert outcomes == {
        ("attention--tiny--sdpa_flash", "forward"): "ok",
        ("attention--tiny--sdpa_flash", "backward"): "ok",
        ("attention--tiny--separate", "forward"): "gate_failed",
        ("attention--tiny--separate", "backward"): "gate_failed",
        ("attention--tiny--separate--twin1", "forward"): "gate_failed",
        ("attention--tiny--separate--twin1", "backward"): "gate_failed",
    }
    reasons = {row["reason"] for row in checkout.rows("ops") if row["status"] == "gate_failed"}
    assert reasons == {"gate op--attention--separate is red: fake: error 2, bound 1"}


def test_red_gate_of_one_operator_stops_only_steps_that_use_it(checkout):
    checkout.config["variants"]["separate_mlp"] = {"attention": "separate", "mlp": "single"}
    checkout.config["steps"]["cpu"]["variants"] = ["separate", "separate_mlp"]
    checkout.config["gates"].append("op--mlp--single")
    status, _ = checkout.run("cpu", FAKE_RED="op--mlp--single")
    assert status != 0
    rows = {row["variant"]: row for row in checkout.rows("steps")}
    assert {name: row["status"] for name, row in rows.items()} == {
        "separate": "ok",
        "separate_mlp": "gate_failed",
    }
    assert "op--mlp--single" in rows["separate_mlp"]["gates"].split("|")


def planned(checkout) -> dict[str, int]:
    """{rule: jobs} of a dry run."""
    status, output = checkout.run("-n", "measurements")
    assert status == 0, output
    return {name: int(n) for name, n in re.findall(r"^(\w+) +(\d+)$", output, re.MULTILINE)}


def test_a_gate_that_runs_again_takes_no_benchmark_of_the_same_code_with_it(finished):
    finished.edit("tnp/gates/checkpointing.py", "checks")
    plan = planned(finished)
    assert plan["gate"] == 1 and not {"step", "op", "train"} & plan.keys()
    # What a red gate refused waits for it: nothing says of which code it is.
    (finished.folder / "data/runs/cpu/steps/cpu--tiny--separate--ckpt--r1.state").unlink()
    assert planned(finished)["step"] == 1
    status, output = finished.run("gates")
    assert status == 0 and finished.calls() == ["gate checkpointing"], output
    assert planned(finished)["step"] == 1


def test_touched_or_commented_source_reruns_nothing(finished):
    for file in (
        "tnp/model/network.py",
        "tnp/train/recorded_runs.py",
        "workflow/scripts/benchmark.py",
    ):
        finished.append(file, "\n# A comment.\n")
    kernel = finished.folder / "tnp/ops/attention/triton_forward.py"
    docstring, rest = kernel.read_text().split('"""', 2)[1:]
    kernel.write_text(f'"""Not {docstring}"""\n\n{rest}')
    for script in finished.folder.glob("workflow/scripts/*.py"):
        script.touch()
    status, output = finished.run("all")
    assert status == 0, output
    assert not finished.calls()


def test_recorded_rows_are_inputs_of_the_store(finished):
    recorded = finished.folder / "data/recorded/cpu/steps"
    recorded.mkdir(parents=True)
    source = finished.folder / "data/runs/cpu/steps/cpu--tiny--separate--r1.parquet"
    shutil.copy(source, recorded / "stamp.parquet")
    status, output = finished.run("all")
    assert status == 0, output
    assert not finished.calls()
    origins = finished.store("select origin, count(*) from steps group by all order by all")
    assert origins == [("recorded", 1), ("runs", 7)]


def test_truncated_recorded_file_ends_before_any_work(checkout):
    bad = checkout.folder / "data/recorded/cpu/steps/stamp.parquet"
    bad.parent.mkdir(parents=True)
    bad.write_bytes(b"PAR1 half a file")
    status, output = checkout.run("all")
    assert status != 0
    assert "data/recorded/cpu/steps/stamp.parquet" in output
    assert "Traceback" not in output and not checkout.calls()


@pytest.mark.parametrize("folder", ["data", "figures"])
def test_unwritable_folder_is_named(checkout, folder):
    (checkout.folder / folder).write_text("a file where the folder should be")
    status, output = checkout.run("all")
    assert status != 0
    assert f"cannot write to {folder}" in output
    assert "Traceback" not in output and not checkout.calls()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_folder_is_named(checkout):
    (checkout.folder / "figures").mkdir(mode=0o500)
    status, output = checkout.run("all")
    assert status != 0 and "cannot write to figures/ (Permission denied)" in output


def test_what_is_missing_or_damaged_is_made_again(finished):
    step = finished.folder / "data/runs/cpu/steps/cpu--tiny--separate--r1.parquet"
    store, figure = (finished.folder / file for file in ("data/results.duckdb", MATRIX))
    step.unlink()
    figure.unlink()
    store.write_bytes(store.read_bytes()[:5000])
    Path(f"{store}.wal").write_bytes(b"of another program")
    status, output = finished.run("all")
    assert status == 0, output
    assert finished.measured() == ["cpu--tiny--separate 1"]
    assert step.exists() and figure.exists()
    assert finished.store("select count(*) from steps") == [(8,)]
    store.unlink()
    status, output = finished.run("all")
    assert status == 0, output
    assert finished.store("select count(*) from steps") == [(8,)]


def test_figures_are_drawn_from_what_there_is(finished):
    """As after an interrupted run, and with sources that would void every measurement."""
    shutil.rmtree(finished.folder / "figures")
    (finished.folder / "data/results.duckdb").unlink()
    (finished.folder / "data/runs/cpu/steps/cpu--tiny--separate--r1.parquet").unlink()
    finished.edit("tnp/model/network.py", "TransformerNP")
    status, output = finished.run("figures", MATRIX, FAKE_RED="op--mlp--single")
    assert status == 0, output
    assert not finished.calls()
    assert (finished.folder / MATRIX).exists()
    assert finished.store("select count(*) from steps") == [(7,)]


def test_a_figure_by_its_file_needs_no_measurement_and_outlives_a_failure(checkout):
    figure = checkout.folder / MATRIX
    files = [MATRIX, "figures/memory.svg", "figures/index.html", "data/results.duckdb"]
    status, output = checkout.run(*files, "-n")
    assert status == 0 and MATRIX in output and not figure.exists()
    status, output = checkout.run(*files)
    assert status == 0, output
    assert all((checkout.folder / file).exists() for file in files) and not checkout.calls()
    assert not (checkout.folder / "figures/speedup.html").exists()
    assert "what speedup found" in (checkout.folder / "figures/index.html").read_text()
    figure.write_text("as it was")
    status, output = checkout.run(MATRIX, FAKE_BROKEN="matrix")
    assert status != 0 and "Traceback" not in output
    assert "not drawn: figures/matrix.html (ValueError: nothing to draw)" in output
    assert figure.read_text() == "as it was"
    status, output = checkout.run("figures/matrix.svg")
    assert status == 0 and figure.read_text() == "matrix", output


def test_a_report_holds_the_figures(checkout):
    status, output = checkout.run("--report", "report.html", "figures")
    assert status == 0 and "Adding" not in output  # none is drawn yet
    checkout.run("figures")
    status, output = checkout.run("--report", "report.html", "figures")
    assert status == 0, output
    assert "Adding speedup.svg" in output and "Adding memory.svg" in output
    assert "Is it faster?" in (checkout.folder / "report.html").read_text()


def test_a_figure_that_cannot_be_drawn_stays_as_it_was(finished):
    (finished.folder / "figures/memory.html").write_text("as it was")
    (finished.folder / MATRIX).unlink()
    status, output = finished.run("figures", FAKE_BROKEN="memory")
    assert status != 0
    assert "not drawn: figures/memory.html (ValueError: nothing to draw)" in output
    assert (finished.folder / "figures/memory.html").read_text() == "as it was"
    assert (finished.folder / MATRIX).exists()


@pytest.mark.parametrize("file", ["recorded/cpu/steps/pipe", "runs/cpu/gates/mlp"])
def test_a_pipe_among_the_tables_is_named(checkout, file):
    pipe = checkout.folder / f"data/{file}.parquet"
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)
    status, output = checkout.run("all")
    assert status != 0
    assert f"data/{file}.parquet is no regular file: remove it" in output
    assert not checkout.calls()
