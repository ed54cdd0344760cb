"""What was ended from outside is tried again, what is named is measured again; no row is lost."""

import os

import pytest

from tnp.experiment.failures import TRANSIENT
from tnp.store.files import write_table
from tnp.store.schemas import STATUSES
from workflow.attempts import ATTEMPTS, Attempts, is_of, keep, named, note_state


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
