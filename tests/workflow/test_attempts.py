"""Tests which results there are, which job is tried again, and which jobs a name means."""

from pathlib import Path

import pytest

from tnp.experiment.failures import TRANSIENT
from tnp.store.files import write_table
from tnp.store.schemas import STATUSES
from workflow.attempts import ATTEMPTS, Attempts, named

NOW, BEFORE = "0" * 16, "f" * 16


def made(runs: Path, table: str, stem: str, status: str) -> None:
    write_table(runs / table / f"{stem}.parquet", table, [{"status": "ok"}, {"status": status}])


@pytest.mark.parametrize("status", STATUSES)
def test_which_status_is_tried_again(tmp_path, status):
    made(tmp_path, "ops", f"a--r1--{NOW}-1", status)
    assert Attempts(tmp_path).to_be_tried_again("ops", "a--r1") == (status in TRANSIENT)


def test_attempts_of_a_state_end_but_those_of_a_gate_do_not(tmp_path):
    states = [BEFORE, BEFORE, *[NOW] * ATTEMPTS]
    for number, state in enumerate(states, 1):
        for table in ("steps", "gates"):
            made(tmp_path, table, f"a--{state}-{number}", "timeout")
        is_last = number == len(states)
        assert Attempts(tmp_path).to_be_tried_again("steps", "a") != is_last
        assert Attempts(tmp_path).to_be_tried_again("gates", "a")
    assert not Attempts(tmp_path).to_be_tried_again("steps", "never")


def test_results_are_in_the_order_of_their_numbers_and_earlier_names_are_none(tmp_path):
    for stem in (f"a--r1--{NOW}-10", f"a--r1--{BEFORE}-9", f"a--r3--{NOW}-1",
                 "a--r1", "a--r2--a2", "a--r1--of-20260101T000000000000Z"):  # fmt: skip
        made(tmp_path, "steps", stem, "killed")
    found = Attempts(tmp_path)
    assert [(one.state, one.number) for one in found.of("steps", "a--r1")] == [
        (BEFORE, 9), (NOW, 10),
    ]  # fmt: skip
    assert found.replicates("steps", "a") == [1, 3] and found.of("steps", "a--r2") == []


def test_a_file_that_cannot_be_read_is_neither_tried_again_nor_refused(tmp_path):
    file = tmp_path / f"steps/a--{NOW}-1.parquet"
    file.parent.mkdir()
    file.write_bytes(b"PAR1 half a file")
    found = Attempts(tmp_path)
    assert not found.to_be_tried_again("steps", "a") and not found.refused("steps", "a")


def test_a_result_says_that_gates_refused_it(tmp_path):
    def refused(table: str, rows: list[dict]) -> bool:
        write_table(tmp_path / table / f"a--{NOW}-1.parquet", table, rows)
        return Attempts(tmp_path).refused(table, "a")

    ok, of_gate = {"status": "ok"}, "gate baseline is"
    assert not refused("ops", [ok, {"status": "timeout", "reason": "no progress"}])
    for status in ("gate_failed", "timeout"):  # a red gate, one that is not finished
        assert refused("ops", [ok, {"status": status, "reason": of_gate}])
    assert refused("training", []) and not refused("training", [{"run": "a"}])


def test_names_are_whole_parts_of_ids():
    jobs = {"mlp--small": 1, "mlp--small_b1": 2, "mlp--mid": 3}
    assert named("mlp", jobs, {}) == {1, 2, 3}
    assert named("mlp--small", jobs, {}) == {1}
    assert named(["mlp--mid", "mlp--small_b1"], jobs, {}) == {2, 3}
    with pytest.raises(ValueError, match="again: nothing is named 'mlp--smal': did you mean 'mlp"):
        named("mlp--smal", jobs, {})
    with pytest.raises(ValueError, match="named 'zzz': choose from mlp, or a config_id"):
        named("zzz", jobs, {})


def test_a_typo_is_said_before_the_device_that_it_is_for():
    jobs = {"mlp--small": 1}
    elsewhere = {"attention--small": "'attention' is for cuda alone"}
    for name in ("attention", "attention--small"):
        with pytest.raises(ValueError, match="^again: 'attention' is for cuda alone$"):
            named(name, jobs, elsewhere)
    with pytest.raises(ValueError, match="'attention--smal': did you mean 'attention--small'"):
        named("attention--smal", jobs, elsewhere)
