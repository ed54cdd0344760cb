"""What was ended from outside is tried again, what is named is measured again; no row is lost."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest

from tests.workflow.conftest import configuration, wait_for
from tnp.experiment.failures import TRANSIENT
from tnp.store.files import write_table
from tnp.store.schemas import STATUSES, TABLES
from workflow.attempts import ATTEMPTS, Attempts, is_of, keep, named, note_state

ROOT = Path(__file__).parents[2]
SEPARATE = "cpu--tiny--separate"


def outcomes(checkout, table="steps") -> list[tuple[str, int, str]]:
    rows = checkout.rows(table)
    return sorted((row["config_id"], row["replicate"], row["status"]) for row in rows)


def of(config_id, *statuses) -> list[tuple[str, int, str]]:
    return sorted((config_id, replicate, status) for replicate, status in statuses)


def passed(checkout, gate) -> bool | None:
    with duckdb.connect(str(checkout.folder / "data/results.duckdb"), read_only=True) as store:
        ((status,),) = store.sql(f"select passed from gate_status where gate = '{gate}'").fetchall()
        return status


def test_what_was_killed_is_tried_again_and_every_row_stays(checkout):
    checkout.config["steps"]["cpu"]["replicates"] = 2
    for attempt in (1, 2):
        checkout.forget_calls()
        status, output = checkout.run("measurements", FAKE_KILLED=f"{SEPARATE},attention--tiny")
        assert status == 0, output
        mine = [row for row in outcomes(checkout) if row[0] == SEPARATE]
        assert mine == of(SEPARATE, *[(1, "killed"), (2, "killed")] * attempt)
    checkout.forget_calls()
    status, output = checkout.run("measurements")
    assert status == 0, output
    assert sorted(checkout.measured()) == ["attention--tiny 1", f"{SEPARATE} 1", f"{SEPARATE} 2"]
    mine = [row for row in outcomes(checkout) if row[0] == SEPARATE]
    each = [(replicate, status) for replicate in (1, 2) for status in ("killed", "killed", "ok")]
    assert mine == of(SEPARATE, *each)
    checkout.forget_calls()
    assert checkout.run("all")[0] == 0 and not checkout.calls()


def test_a_gate_that_is_not_finished_is_not_red_and_goes_on_with_what_waits_for_it(checkout):
    checkout.config["steps"]["cpu"]["checkpoint"] = [False, True]
    waiting = {f"cpu--tiny--{name}--ckpt" for name in ("separate", "sdpa_flash")}
    status, output = checkout.run("all", FAKE_KILLED="checkpointing")
    assert status == 0 and " is red" not in output, output
    assert output.rstrip().splitlines()[-4:-1] == [  # Snakemake's own word is the last
        "Not finished: gate checkpointing: no progress in 120 s, 1 of 2 cases.",
        "Jobs that wait for gates which are not finished: 2.",
        "Nothing is wrong with it. It goes on with: snakemake --cores 1 all",
    ]
    assert not waiting & {call.split()[0] for call in checkout.measured()}
    stopped = {row["config_id"]: row for row in checkout.rows("steps") if row["status"] != "ok"}
    assert set(stopped) == waiting
    for row in stopped.values():
        assert row["status"] == "timeout"
        assert row["reason"].startswith("gate checkpointing is not finished: no progress in 120 s")
    assert passed(checkout, "checkpointing") is None
    checkout.forget_calls()
    status, output = checkout.run("all")
    assert status == 0 and "Not finished" not in output, output
    assert [call for call in checkout.calls() if "gate" in call] == ["gate checkpointing"]
    assert {call.split()[0] for call in checkout.measured()} == waiting
    gates = [row for row in checkout.rows("gates") if row["gate"] == "checkpointing"]
    assert {row["status"] for row in gates} == {"timeout", "ok"}
    assert passed(checkout, "checkpointing") is True


def test_again_measures_what_is_named_beside_what_is_there(finished):
    """All that a name begins, and an operator's job by one of its implementations."""
    before = outcomes(finished)
    measured = {f"{SEPARATE} 3", f"{SEPARATE}--ckpt 3", "attention--tiny 2"}
    names = f"{SEPARATE},attention--tiny--sdpa_flash"
    status, output = finished.run("again", "--config", f"again={names}")
    assert status == 0, output
    assert set(finished.calls()) == {f"{at} {job}" for job in measured for at in ("start", "end")}
    after = outcomes(finished)
    assert [row for row in after if row[1] <= 2] == before
    finished.forget_calls()
    status, output = finished.run("measurements")
    assert status == 0 and not finished.calls(), output
    assert outcomes(finished) == after


def run_ids(checkout) -> dict[str, set[str]]:
    """Table → the runs that the store has rows of."""
    tables = [name for name, schema in TABLES.items() if "run_id" in schema.names]
    query = "select distinct run_id from {} where run_id is not null"
    return {table: {run for (run,) in checkout.store(query.format(table))} for table in tables}


def test_what_an_edit_voids_and_nothing_else_is_measured_beside_what_is_there(finished):
    before, rows = run_ids(finished), outcomes(finished)
    finished.edit("tnp/ops/attention/triton_forward.py", "_fwd_tile")
    status, output = finished.run("all")
    assert status == 0, output
    gates = {call for call in finished.calls() if call.startswith("gate")}
    assert gates == {"gate op--attention--separate"}  # nothing waits for the others
    again = finished.measured()
    assert {call.split()[0] for call in again} == {SEPARATE, f"{SEPARATE}--ckpt"}
    after = run_ids(finished)
    assert all(before[table] < after[table] for table in ("steps", "gates")), output
    assert all(before[table] <= after[table] for table in before)
    twice = [row for row in rows if f"{row[0]} {row[1]}" in again]
    assert outcomes(finished) == sorted(rows + twice)
    # Also where nothing but the user's word voids it, and where nothing has changed since.
    finished.run("-R", "step", "--until", "step")
    assert outcomes(finished) == sorted(2 * rows + twice)
    finished.forget_calls()
    assert finished.run("all")[0] == 0 and not finished.calls()


def test_a_kill_amid_what_is_measured_anew_loses_nothing(finished):
    before, rows = run_ids(finished), outcomes(finished)
    text = (finished.folder / "tnp/model/network.py").read_text()
    finished.edit("tnp/model/network.py", "TransformerNP")
    workflow = finished.start("all", FAKE_SECONDS="60")
    wait_for(lambda: any(call.startswith("start") for call in finished.calls()))
    workflow.kill()
    workflow.end()
    (finished.folder / "tnp/model/network.py").write_text(text)
    finished.forget_calls()
    status, output = finished.run("all")
    assert status == 0, output
    # Gates were run anew, and what had begun; the rest is of the code that is there again.
    after = run_ids(finished)
    assert all(before[table] <= after[table] for table in before)
    assert len([call for call in finished.measured() if call.startswith("cpu--")]) == 1
    # What was not begun has a second name of the same file.
    measured = {(row["config_id"], row["replicate"], row["run_id"])
                for row in finished.rows("steps")}  # fmt: skip
    assert len(measured) == len(rows) + 1


def test_what_cannot_be_kept_is_not_measured_anew(tmp_path, monkeypatch):
    file = tmp_path / "a.parquet"
    file.write_bytes(b"measured")

    def refused(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    keep([str(tmp_path / "never measured.parquet")])
    with pytest.raises(ValueError, match=r"a.parquet is to be measured anew .*Operation not perm"):
        keep([str(file)])


def test_two_files_written_at_one_moment_keep_a_second_name_each(tmp_path):
    file = tmp_path / "a.parquet"
    for content in (b"first", b"second", b"third"):
        file.unlink(missing_ok=True)
        file.write_bytes(content)
        os.utime(file, (1e9, 1e9))
        for _ in range(2):  # a run that was killed before it deleted the first name
            keep([str(file)])
    kept = sorted(other.read_bytes() for other in tmp_path.glob("a--of-*.parquet"))
    assert kept == [b"first", b"second", b"third"]


def test_again_is_tried_again_where_it_was_killed(finished):
    finished.run("again", "--config", f"again={SEPARATE}--ckpt", FAKE_KILLED=f"{SEPARATE}--ckpt")
    finished.forget_calls()
    assert finished.run("measurements")[0] == 0
    assert finished.measured() == [f"{SEPARATE}--ckpt 3"]


def test_again_trains_and_gates_anew(finished):
    status, output = finished.run("again", "--config", "again=gp_tiny,gates--op--mlp--single")
    assert status == 0, output
    assert finished.calls() == ["gate op--mlp--single"]
    assert len(finished.rows("training")) == 2
    assert len([row for row in finished.rows("gates") if row["gate"] == "op--mlp--single"]) == 2


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["again=zzz"], "named 'zzz': choose from attention, cpu, gates, gp_tiny, or a config_id"),
        ([], "say what: snakemake again --config again=NAME"),
    ],
)  # fmt: skip
def test_what_again_does_not_know_is_one_sentence(finished, arguments, sentence):
    status, output = finished.run("again", *(["--config", *arguments] if arguments else []))
    assert status != 0 and sentence in output
    assert "Traceback" not in output and not finished.calls()


def test_a_gpu_that_is_named_and_not_here_is_one_sentence(checkout):
    checkout.config["device"] = "nvidia-none"
    checkout.config["steps"]["cpu"]["devices"] = ["cuda"]
    status, output = checkout.run("all")
    assert status != 0 and not checkout.calls()
    (line,) = [line for line in output.splitlines() if "nvidia-none" in line]
    assert line.startswith("config.yaml: device 'nvidia-none' is not here: ")
    assert "Traceback" not in output
    assert not list((checkout.folder / "data/runs").rglob("*.parquet"))
    # Its plan can be looked at.
    assert checkout.run("-n", "all")[0] == 0


def test_a_clusters_job_that_does_not_find_its_gpu_fails_and_writes_no_row(checkout):
    """The workflow believes that its jobs run elsewhere; the gates' processes are real."""
    checkout.config["device"] = "nvidia-none"
    checkout.config["steps"]["cpu"]["devices"] = ["cuda"]
    common = checkout.folder / "workflow/rules/common.smk"
    text = common.read_text()
    assert "workflow.local_exec" in text
    common.write_text(text.replace("workflow.local_exec", "False"))
    real = checkout.folder / "workflow/gate_process.py"
    text = real.read_text()
    before, fake = text.rsplit("\ndef run(", 1)
    real.write_text(f"{before}\ndef fake({fake}")
    status, output = checkout.run("measurements")
    assert status != 0
    assert "gate baseline: DeviceMissing: device 'nvidia-none' is not here: " in output
    assert not list((checkout.folder / "data/runs").rglob("*.parquet"))


def test_waiting_for_the_device_is_said_on_the_terminal(finished):
    lock = finished.temporary / "tnp-cpu.lock"
    holder = subprocess.Popen(
        [sys.executable, "-c",
         "import time\nfrom tnp.bench.process import device_lock\n"
         "with device_lock('cpu'):\n    print('held', flush=True)\n    time.sleep(300)"],
        cwd=finished.folder, env=os.environ | {"TMPDIR": str(finished.temporary)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert holder.stdout.readline() == "held\n"
        workflow = finished.start("again", "--config", f"again={SEPARATE}--ckpt")
        said = next((line for line in workflow.stdout if "waiting for" in line), "")
        assert f"waiting for another job on cpu (process {holder.pid}, lock {lock})" in said
    finally:
        holder.kill()
        holder.wait()
    status, output = workflow.end()
    assert status == 0, output


def rows(status: str) -> list[dict]:
    return [{"config_id": "a", "status": "ok"}, {"config_id": "a", "status": status}]


@pytest.mark.parametrize("status", STATUSES)
def test_which_status_gets_another_attempt(tmp_path, status):
    write_table(tmp_path / "ops/a--r1.parquet", "ops", rows(status))
    ending = Attempts(tmp_path).planned("ops", "a--r1")
    assert ending == ("--a2" if status in TRANSIENT else "")


def test_attempts_end_and_only_the_planner_adds_one(tmp_path):
    endings = []
    for _ in range(ATTEMPTS + 1):
        ending = Attempts(tmp_path).planned("steps", "a--r1")
        endings.append(ending)
        write_table(tmp_path / f"steps/a--r1{ending}.parquet", "steps", rows("timeout"))
        # The process of a job on a cluster, which waits for what was planned before.
        assert Attempts(tmp_path, planning=False).planned("steps", "a--r1") == ending
    assert endings == ["", "--a2", "--a3", "--a3"]
    assert Attempts(tmp_path).planned("steps", "a--r1", again=True) == "--a4"
    assert Attempts(tmp_path).planned("steps", "never") == ""
    # A gate goes on where it stopped, as often as it must.
    write_table(tmp_path / "gates/a--a7.parquet", "gates", [{"gate": "a", "status": "killed"}])
    assert Attempts(tmp_path).planned("gates", "a") == "--a8"


def test_a_plan_stays_as_it_was_made(tmp_path):
    attempts = Attempts(tmp_path)
    assert attempts.planned("steps", "a--r1") == ""
    write_table(tmp_path / "steps/a--r1.parquet", "steps", rows("killed"))
    assert attempts.planned("steps", "a--r1") == ""


def test_a_file_that_cannot_be_read_is_not_tried_again(tmp_path):
    file = tmp_path / "steps/a--r1.parquet"
    file.parent.mkdir()
    file.write_bytes(b"PAR1 half a file")
    assert Attempts(tmp_path).planned("steps", "a--r1") == ""


def test_a_result_is_of_the_state_that_was_noted_where_nothing_refused_it(tmp_path):
    file = tmp_path / "steps/a--r1.parquet"
    note_state(file, "today's", refused=False)
    assert not is_of(file, "today's")  # it is not there
    write_table(file, "steps", rows("ok"))
    assert is_of(file, "today's") and not is_of(file, "tomorrow's")
    note_state(file, "today's", refused=True)
    assert not is_of(file, "today's")


def test_names_are_whole_parts_of_ids():
    jobs = {"mlp--small": 1, "mlp--small_b1": 2, "mlp--mid": 3}
    assert named("mlp", jobs, {}) == {1, 2, 3}
    assert named("mlp--small", jobs, {}) == {1}
    assert named(["mlp--mid", "mlp--small_b1"], jobs, {}) == {2, 3}
    with pytest.raises(ValueError, match="again: nothing is named 'mlp--smal': did you mean 'mlp"):
        named("mlp--smal", jobs, {})


def test_a_typo_is_said_before_the_device_that_it_is_for():
    jobs = {"mlp--small": 1}
    elsewhere = {"attention--small": "'attention' is for cuda alone"}
    for name in ("attention", "attention--small"):
        with pytest.raises(ValueError, match="^again: 'attention' is for cuda alone$"):
            named(name, jobs, elsewhere)
    with pytest.raises(ValueError, match="'attention--smal': did you mean 'attention--small'"):
        named("attention--smal", jobs, elsewhere)


def test_a_kill_after_a_training_said_that_it_was_done_trains_nothing_again(checkout):
    checkout.config["training"] = configuration()["training"]
    shutil.copy(ROOT / "tnp/train/recorded_runs.py", checkout.folder / "tnp/train/recorded_runs.py")
    final = checkout.folder / "data/runs/cpu/checkpoints/gp_tiny/final.pt"
    table = "data/runs/cpu/training/gp_tiny.parquet"
    workflow = checkout.start(table)
    assert any("train gp_tiny: 20 steps, held-out" in line for line in workflow.stdout)
    workflow.kill()
    workflow.end()
    trained = final.stat().st_mtime_ns
    before = checkout.rows("training")
    # As Snakemake does with what it did not hear the end of.
    (checkout.folder / table).unlink()
    status, output = checkout.run(table)
    assert status == 0 and "train gp_tiny: 20 steps, held-out" in output, output
    assert final.stat().st_mtime_ns == trained
    new = ("recorded_at", "run_id")
    rows = [[{k: row[k] for k in row if k not in new} for row in rows]
            for rows in (before, checkout.rows("training"))]  # fmt: skip
    assert rows[0] == rows[1] and len(rows[0]) == 3

    # Another run of the same name is trained.
    checkout.config["training"]["gp_tiny"]["seed"] = 1
    status, output = checkout.run(table)
    assert status == 0 and final.stat().st_mtime_ns > trained, output
