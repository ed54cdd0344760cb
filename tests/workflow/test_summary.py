"""Tests the last lines of a run."""

from tnp.store.files import write_table
from workflow import summary

END = f"--{'0' * 16}-"


def test_success_names_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert summary.success(drawn=True) == ""
    for file in ("figures/speedup.html", summary.DATABASE):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    said = summary.success(drawn=True)
    assert said == f"Figures: figures/speedup.html\nAsk the results: {summary.QUERY}"
    assert summary.success(drawn=False).endswith("snakemake --cores 1 figures")


def test_what_was_ended_is_named_with_the_command_that_goes_on(tmp_path):
    ok, killed = {"status": "ok"}, {"status": "killed", "reason": "of memory"}
    waiting = {"status": "timeout", "reason": "gate a is not finished: it hung"}
    rows = {f"steps/a--r1{END}1": ok, f"steps/b--r1{END}2": killed, f"steps/c--r1{END}1": waiting}
    for name, row in rows.items():
        write_table(tmp_path / f"{name}.parquet", name.split("/")[0], [row])
    files = [
        tmp_path / f"{name}.parquet" for name in (*rows, "steps/never", f"samples/a--r1{END}1")
    ]
    assert summary.not_finished(files[:1], ["all"]) == []
    goes_on = "Nothing is wrong with it. It goes on with: snakemake --cores 1 all"
    waits = "Jobs that wait for gates which are not finished: 1."
    assert summary.not_finished(files, ["again"]) == [
        "Not finished: b--r1: of memory.",
        waits,
        goes_on,
    ]
    tried = [tmp_path / f"steps/d--r2{END}{number}.parquet" for number in (1, 2, 3)]
    for file in tried:
        write_table(file, "steps", [killed])
    *said, last = summary.not_finished(tried[-1:], ["headline", "gates"])[-2:]
    assert said[0].endswith("It goes on with: snakemake --cores 1 gates headline")
    assert last == "After 3 attempts: snakemake again --config again=d"


def test_a_red_gate_that_is_a_measure_fails_nothing(tmp_path):
    check = {"check": "far", "metric": "error", "value": 2.0, "bound": 1.0, "passed": False}
    files = []
    for gate in ("baseline", "batch_noise"):
        files.append(tmp_path / f"{gate}.parquet")
        write_table(files[-1], "gates", [check | {"gate": gate, "status": "ok", "reason": ""}])
    assert summary.red_gates(files) == ["Gate baseline is red: far: error 2, bound 1."]
