"""Runs of the workflow from end to end. Measuring itself is faked (conftest), all else is real."""

import os
import re
import shutil
from pathlib import Path

from tests import false_ncu
from tests.workflow.conftest import FAKE_GPU, Checkout
from tnp.store.schemas import TABLES
from workflow.start import take_lock

ROOT = Path(__file__).parents[2]
MATRIX = "figures/matrix.html"
SEPARATE = "cpu--tiny--separate"
GPU = "nvidia-h200"


def planned(checkout: Checkout, *target: str) -> dict[str, int]:
    """Returns rule → jobs of a dry run."""
    status, output = checkout.run("-n", *target)
    assert status == 0 and len(output.splitlines()) < 40, output  # not a block for each job
    return {name: int(n) for name, n in re.findall(r"^(\w+) +(\d+)$", output, re.MULTILINE)}


def outcomes(checkout: Checkout, table: str = "steps") -> list[tuple[str, int, str]]:
    rows = checkout.rows(table)
    return sorted((row["config_id"], row["replicate"], row["status"]) for row in rows)


def run_ids(checkout: Checkout) -> dict[str, set[str]]:
    """Returns table → the runs that the store has rows of."""
    tables = [name for name, schema in TABLES.items() if "run_id" in schema.names]
    query = "select distinct run_id from {} where run_id is not null"
    return {table: {run for (run,) in checkout.store(query.format(table))} for table in tables}


def test_gates_come_first_and_a_red_one_stops_what_depends_on_it(checkout):
    config = checkout.config
    config["variants"]["single"] = {"attention": "sdpa_flash", "mlp": "single"}
    config["steps"]["cpu"] |= {"variants": ["separate", "single"], "checkpoint": [False, True]}
    config["steps"]["cpu"]["replicates"] = 2
    config["gates"].append("op--mlp--single")
    config["ops"]["mlp"] = config["ops"]["attention"] | {"implementations": ["torch", "single"]}
    config["predictions"] = {"devices": ["cpu"], "priority": 3, "shapes": ["tiny"]}
    config["predictions"] |= {"variants": ["sdpa_flash", "single"]}
    before = {path for path in checkout.folder.rglob("*") if "__pycache__" not in path.parts}
    plan = planned(checkout)
    assert (plan["step"], plan["op"], plan["gate"], plan["all"]) == (8, 2, 4, 1)
    after = {path for path in checkout.folder.rglob("*") if "__pycache__" not in path.parts}
    new = {path for path in after - before if ".snakemake" not in path.parts}
    assert new <= {checkout.folder / "config.yaml"}
    # One sentence ends what cannot be.
    status, output = checkout.run("cqu")
    assert status != 0 and "Traceback" not in output and not checkout.calls(), output
    assert output.splitlines()[-1] == "unknown target 'cqu': did you mean 'cpu'?"

    held = take_lock(checkout.folder / ".snakemake/workflow.lock")
    status, output = checkout.run("all")
    assert status != 0 and f"another workflow (process {os.getpid()})" in output
    assert not checkout.calls()
    os.close(held)

    status, output = checkout.run("all", FAKE_RED="checkpointing,op--mlp--single")
    assert status != 0 and "Traceback" not in output, output
    assert "Gate checkpointing is red: fake: error 2, bound 1." in output
    assert output.index(MATRIX) < output.index("Gate checkpointing is red")
    assert "from speedup" in output
    calls, measured = checkout.calls(), checkout.measured()
    # The gates that a job waits for come first, and no other gate runs.
    gates = {"baseline", "checkpointing", "op--attention--separate", "op--mlp--single"}
    assert {call.removeprefix("gate ") for call in calls[:4]} == gates
    assert not any(call.startswith("gate") for call in calls[4:])
    # Then by priority of their study, and within one in rounds.
    rounds = [(not call.startswith("cpu--"), call[-1]) for call in measured]
    assert rounds == sorted(rounds) and len(measured) == 2 + 2 + 1
    bad = "gate_failed"
    assert {(name, status) for name, _, status in outcomes(checkout)} == {
        (SEPARATE, "ok"), (f"{SEPARATE}--ckpt", bad),
        ("cpu--tiny--single", bad), ("cpu--tiny--single--ckpt", bad),
    }  # fmt: skip
    of_mlp = [row for row in checkout.rows("ops") if row["op"] == "mlp"]
    assert {(row["implementation"], row["status"]) for row in of_mlp} == {
        ("torch", "ok"), ("single", bad)}  # fmt: skip
    reasons = {row["reason"] for row in of_mlp if row["status"] == bad}
    assert reasons == {"gate op--mlp--single is red: fake: error 2, bound 1"} and len(of_mlp) == 6
    rows = {(row["variant"], row["status"]) for row in checkout.rows("predictions")}
    assert rows == {("sdpa_flash", "ok"), ("single", bad)}


def test_what_was_ended_is_tried_again_and_what_is_named_is_measured_again(checkout):
    checkout.config["steps"]["cpu"]["checkpoint"] = [False, True]
    waiting = {f"cpu--tiny--{name}--ckpt" for name in ("separate", "sdpa_flash")}
    status, output = checkout.run("all", FAKE_KILLED=f"{SEPARATE},attention--tiny,checkpointing")
    assert status == 0 and " is red" not in output, output
    said = output[output.index("Not finished") :].rstrip().splitlines()[:-1]
    assert "Not finished: gate checkpointing: no progress in 120 s, 1 of 2 cases." in said
    assert said[-2:] == [
        "Jobs that wait for gates which are not finished: 2.",
        "Nothing is wrong with it. It goes on with: snakemake --cores 1 all",
    ]
    assert not waiting & {call.split()[0] for call in checkout.measured()}
    stopped = {row["config_id"]: row for row in checkout.rows("steps") if row["status"] != "ok"}
    assert stopped.keys() == waiting | {SEPARATE}
    for name in waiting:
        assert stopped[name]["status"] == "timeout"
        assert stopped[name]["reason"].startswith("gate checkpointing is not finished: no progres")
    passed = "select passed from gate_status where gate = 'checkpointing'"
    assert checkout.store(passed) == [(None,)]
    before = outcomes(checkout)
    checkout.forget_calls()
    status, output = checkout.run("all")
    assert status == 0 and "Not finished" not in output, output
    gates = [call for call in checkout.calls() if "gate" in call]
    assert gates == ["gate checkpointing"] and checkout.store(passed) == [(True,)]
    assert set(checkout.measured()) == {f"{name} 1" for name in (*waiting, SEPARATE,
                                                                 "attention--tiny")}  # fmt: skip
    after = outcomes(checkout)
    assert set(before) < set(after) and len(after) == 7  # every row stays
    # All that a name begins, an operator's job by an implementation, and a gate.
    checkout.forget_calls()
    names = f"{SEPARATE},attention--tiny--sdpa_flash,gates--baseline"
    status, output = checkout.run("again", "--config", f"again={names}", FAKE_KILLED=SEPARATE)
    assert status == 0, output
    measured = {f"{SEPARATE} 2", f"{SEPARATE}--ckpt 2", "attention--tiny 2"}
    assert set(checkout.measured()) == measured and "gate baseline" in checkout.calls()
    assert set(after) <= set(outcomes(checkout))
    checkout.forget_calls()
    assert checkout.run("all")[0] == 0 and checkout.measured() == [f"{SEPARATE} 2"]
    checkout.forget_calls()
    assert checkout.run("all")[0] == 0 and not checkout.calls()
    # No result is overwritten, also where Snakemake is told to run it.
    status, output = checkout.run("all", "--forcerun", "step")
    assert status != 0 and not checkout.calls(), output
    assert "no result is overwritten: measure it once more with `snakemake again" in output


def test_an_edit_voids_what_runs_it_and_nothing_that_was_measured_is_lost(finished):
    before, rows = run_ids(finished), outcomes(finished)
    # A comment, another docstring and a touched file void nothing.
    files = ("tnp/model/network.py", "workflow/scripts/benchmark.py", "tnp/train/recorded_runs.py")
    for file in files:
        finished.append(file, "\n# A comment.\n")
    kernel = finished.folder / "tnp/ops/attention/portable/forward.py"
    docstring, rest = kernel.read_text().split('"""', 2)[1:]
    kernel.write_text(f'"""Not {docstring}"""\n\n{rest}')
    # A gate that runs again takes no benchmark of the same code with it.
    finished.edit("tnp/gates/checkpointing.py", "checks")
    status, output = finished.run("gates", "all")
    assert status == 0 and finished.calls() == ["gate checkpointing"], output

    finished.forget_calls()
    finished.edit("tnp/ops/attention/portable/forward.py", "_fwd_tile")
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


def test_figures_are_drawn_from_what_there_is(finished):
    """As after an interrupted run, and with sources that would void every measurement."""
    recorded = finished.folder / "data/recorded/cpu/steps"
    recorded.mkdir(parents=True)
    (step,) = finished.files("steps", f"{SEPARATE}--r1")
    shutil.copy(step, recorded / "stamp.parquet")
    step.unlink()
    store, figure = (finished.folder / file for file in ("data/results.duckdb", MATRIX))
    shutil.rmtree(finished.folder / "figures")
    store.unlink()
    text = (finished.folder / "tnp/model/network.py").read_text()
    finished.edit("tnp/model/network.py", "Network")
    files = [MATRIX, "figures/memory.svg", "figures/index.html", "data/results.duckdb"]
    status, output = finished.run(*files)
    assert status == 0 and not finished.calls(), output
    assert all((finished.folder / file).exists() for file in files)
    assert not (finished.folder / "figures/speedup.html").exists()
    assert "what speedup found" in (finished.folder / "figures/index.html").read_text()
    origins = finished.store("select origin, count(*) from steps group by all order by all")
    assert origins == [("recorded", 1), ("runs", 3)]
    # One that cannot be drawn stays as it was, and the others are drawn.
    figure.write_text("as it was")
    status, output = finished.run("figures", FAKE_BROKEN="matrix")
    assert status != 0 and "Traceback" not in output
    assert "not drawn: figures/matrix.html (ValueError: nothing to draw)" in output
    assert figure.read_text() == "as it was" and (finished.folder / "figures/speedup.svg").exists()
    status, output = finished.run("--report", "report.html", "figures")
    assert status == 0 and "Adding speedup.svg" in output
    assert "Is it faster?" in (finished.folder / "report.html").read_text()
    # Missing or damaged files are made again.
    (finished.folder / "tnp/model/network.py").write_text(text)
    figure.unlink()
    store.write_bytes(store.read_bytes()[:5000])
    Path(f"{store}.wal").write_bytes(b"of another program")
    status, output = finished.run("all")
    assert status == 0 and finished.measured() == [f"{SEPARATE} 1"], output
    assert step.exists() and figure.exists()
    assert finished.store("select count(*) from steps") == [(5,)]


def test_each_kernel_that_is_profiled_becomes_a_row_and_each_pass_one_of_the_view(checkout):
    """A false GPU and a false `ncu` stand for real ones."""
    mlp = {"problems": {"few": {"rows": 8, "d_model": 32, "d_ff": 48}}}
    checkout.config["device"] = GPU
    checkout.config["gates"].append("op--mlp--single")
    checkout.config["profiles"] = {"priority": 1, "sections": "full"}
    checkout.config["profiles"]["ops"] = {"mlp": mlp | {"implementations": ["torch", "single"]}}
    plan = planned(checkout, "profiles")
    assert plan["profile"] == 2 and "gate" not in plan
    for file, text in FAKE_GPU.items():
        checkout.append(file, text)
    folder = checkout.folder.parent / "bin"
    path = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    # Counters that may not be read are a sentence and no error.
    false_ncu.install(folder, "echo ==ERROR== ERR_NVGPUCTRPERM; exit 1", "")
    status, output = checkout.run("profiles", **path)
    assert status == 0 and "Traceback" not in output, output
    said = "profiles--mlp--few--torch r1: unsupported: the driver keeps performance counters for"
    assert said in output
    rows = checkout.rows("profiles", GPU)
    assert [(row["status"], row["kernel"]) for row in rows] == [("unsupported", None)] * 4
    for made in (checkout.folder / "data/runs", folder):
        shutil.rmtree(made)
    false_ncu.install(folder, 'touch "$report"', false_ncu.table(false_ncu.full()))
    status, output = checkout.run("profiles", "figures", **path)
    assert status == 0 and "profiles--mlp--few--single r1: 4 rows" in output, output
    rows = checkout.rows("profiles", GPU)
    assert len(rows) == 2 * 2 * 2  # implementations, passes, kernels
    assert {row["status"] for row in rows} == {"ok"} and {row["device"] for row in rows} == {GPU}
    reports = checkout.folder.glob(f"data/runs/{GPU}/ncu/*/*.ncu-rep")
    both = [(name, pass_) for name in ("single", "torch") for pass_ in ("backward", "forward")]
    assert {f"{file.parent.name.rpartition('--')[0]} {file.stem}" for file in reports} == {
        f"profiles--mlp--few--{name}--r1 {pass_}" for name, pass_ in both
    }
    view = checkout.store(
        "select implementation, pass, own, n_kernels, duration_us, registers, stall_1, stall_3"
        " from profiled_passes order by all"
    )
    counted = (2, 1234.56 + 2.05, 168, "long scoreboard", "barrier")
    assert view == [(name, of, name == "single", *counted) for name, of in both]
