"""`python -m tnp.tune`: what is timed, what is entered, and what is said without a GPU."""

import pytest
import torch

from tnp import tune
from tnp.bench.outcome import failure_rows
from tnp.bench.sizes import OPERATOR_SIZES
from tnp.ops import auto, registry

SIZES = ["--batch", "8", "--n-context", "2000", "--n-target", "300"]


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "TABLE", tmp_path / "implementations.json")
    auto.write_table([])
    yield auto.table
    auto.table.cache_clear()
    auto.choose.cache_clear()


@pytest.fixture
def asked(monkeypatch):
    """Jobs, on a GPU on which everything takes 1 ms, ours half of that and `single` no time."""
    jobs = []

    def run_isolated(kind, parameters, timeout_s):
        jobs.append(parameters)
        rows = failure_rows(kind, parameters, "ok", "")["ops"]
        for row in rows:
            row["time_ms_p50"] = (
                0.5 if registry.role(row["op"], row["implementation"]) == "own" else 1.0
            )
            if row["implementation"] == "single" and row["pass"] == "backward":
                row |= {"status": "oom", "reason": "out of memory"}
        return {"ops": rows}

    monkeypatch.setattr(tune, "run_isolated", run_isolated)
    monkeypatch.setattr(tune, "device_slug", lambda: "nvidia-h200")
    monkeypatch.setattr(tune, "require_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return jobs


def test_the_fastest_of_each_operator_is_entered(asked, table, capsys):
    assert tune.main([*SIZES, "--dtype", "float16"]) == 0
    assert [job["op"] for job in asked] == list(OPERATOR_SIZES)
    entries = {entry["op"]: entry for entry in table()}
    assert entries["mlp"] == {
        "op": "mlp",
        "capability": 90,
        "dtype": "float16",
        "sizes": {"rows": 8 * 2300, "d_model": 512, "d_ff": 1408},
        "implementation": "fused",
    }
    assert entries["attention"]["implementation"] == "separate"  # as fast as fused, and before it
    heads = {"rows": 8 * 300, "d_model": 512, "d_ff": 1408, "n_components": 10}
    assert entries["mixture_heads"]["sizes"] == heads
    assert entries["mixture_nll"]["dtype"] == "float32"
    lines = capsys.readouterr().out.splitlines()
    assert "mlp            fused                   0.5          0.5  chosen" in lines
    assert any(line.startswith("mlp            single") and "oom: out of" in line for line in lines)


def test_an_operator_without_a_time_has_no_entry(asked, table, monkeypatch):
    def fail(kind, parameters, timeout_s):
        return failure_rows(kind, parameters, "timeout", "not finished after 900 s")

    monkeypatch.setattr(tune, "run_isolated", fail)
    assert tune.main(SIZES) == 1
    assert table() == ()


def test_without_a_gpu_it_says_so(table, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert tune.main(SIZES) == 2
    assert capsys.readouterr().err.startswith("python -m tnp.tune needs an NVIDIA GPU: none is")
    assert table() == ()


@pytest.mark.parametrize("batch", ["0", "-1", "many"])
def test_bad_sizes_are_named(batch, capsys):
    with pytest.raises(SystemExit) as ended:
        tune.main(["--batch", batch, *SIZES[2:]])
    assert ended.value.code == 2
    assert f"{batch!r} must be a whole number" in capsys.readouterr().err
