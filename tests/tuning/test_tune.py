"""Tests what `python -m tnp.tuning` times, enters, and says without a GPU."""

import json

import pytest
import torch

from tnp.bench import child, isolate
from tnp.bench.outcome import failure_rows
from tnp.dispatch import devices, tuned_tables
from tnp.dispatch.registry import catalog
from tnp.tuning import tune

SIZES = ["--batch", "8", "--n-context", "2000", "--n-target", "300"]
pytestmark = pytest.mark.usefixtures("users_tables")
H200 = devices.named("nvidia-h200")
IN_STEPS = {"attention", "embedding", "mixture_heads", "mixture_nll", "mlp", "linear",
            "project_qkv", "rms_norm", "add_rms_norm", "transformer_block"}  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """Collects jobs, on a GPU where all takes 1 ms, ours half of that and `single` no time."""
    jobs = []

    def run_isolated(kind, parameters, timeout_s):
        jobs.append(parameters)
        rows = failure_rows(kind, parameters, "ok", "")["ops"]
        for row in rows:
            own = catalog().role(row["op"], row["implementation"]) == "own"
            row["time_ms_p50"] = 0.5 if own else 1.0
            if row["implementation"] == "single":
                row["time_ms_p50"] = 0.1
                if row["pass"] == "backward":
                    row |= {"status": "oom", "reason": "out of memory"}
        return {"ops": rows}

    monkeypatch.setattr(isolate, "run_isolated", run_isolated)
    monkeypatch.setattr(child, "require_gpu", lambda: H200)
    return jobs


def test_the_fastest_of_each_operator_is_entered(asked, users_tables, capsys):
    assert tune.main([*SIZES, "--dtype", "float16"]) == 0
    assert {job["op"] for job in asked} == IN_STEPS
    of_mlp = next(job for job in asked if job["op"] == "mlp")
    assert list(of_mlp["implementations"]) == catalog().candidates("mlp", "auto")
    assert of_mlp["draw"] == {"d_ff_real": 1365}
    entries = {
        (one["of"], one["mode"]): one
        for one in tuned_tables.table(users_tables / "nvidia-h200.json")
    }
    assert entries["mlp", "training"] == {
        "of": "mlp",
        "mode": "training",
        "gpu": "nvidia-h200",
        "capability": 90,
        "problem": {
            "op": "mlp",
            "dtype": "float16",
            "sizes": {"rows": 8 * 2300, "d_model": 512, "d_ff": 1408},
        },
        "choice": "fused",
    }
    assert entries["mlp", "inference"]["choice"] == "single"
    assert entries["attention", "training"]["choice"] == "separate"  # as fast as fused, before it
    assert entries["mixture_heads", "training"]["problem"]["sizes"]["rows"] == 8 * 300
    assert entries["mixture_nll", "training"]["problem"]["dtype"] == "float32"
    printed = capsys.readouterr().out
    assert f"{len(entries)} entries for nvidia-h200: {users_tables / 'nvidia-h200.json'}" in printed
    lines = [line.split(maxsplit=4) for line in printed.splitlines()]
    assert ["mlp", "fused", "0.5", "0.5", "chosen for training"] in lines
    assert ["mlp", "single", "0.1", "chosen", "for inference; oom: out of memory"] in lines
    # From then on it is what "auto" takes, before what is installed.
    assert any(one["of"] == "mlp" for one in tuned_tables.of_target(H200)[: len(entries)])


def test_an_operator_is_tuned_at_one_size(asked, users_tables, monkeypatch, capsys):
    """Each operation's kernels are timed before the implementations, which run with the winners."""
    right, before = isolate.run_isolated, []

    def run_isolated(kind, parameters, timeout_s):
        rows = right(kind, parameters, timeout_s)["ops"]
        if "forced" in parameters:  # as a child does, which lists the trials
            of = {"forward": "softmax.forward", "backward": "softmax.backward"}
            (pass_,) = parameters["passes"]
            for row in rows:
                row["forced"] = json.dumps({of[pass_]: ["blocks", {"block": 1024}]})
        else:
            before.extend(tuned_tables.table(users_tables / "nvidia-h200.json"))
        return {"ops": rows}

    monkeypatch.setattr(isolate, "run_isolated", run_isolated)
    assert tune.main(["softmax", "--rows", "32", "--width", "5000"]) == 0
    *trials, whole = asked
    assert [(job["passes"], job["forced"]) for job in trials] == [
        (["forward"], {"triton": {}}), (["backward"], {"triton": {}})
    ]  # fmt: skip
    assert {one["of"] for one in before} == {"softmax.forward", "softmax.backward"}
    assert list(whole["implementations"]) == catalog().candidates("softmax", "auto")
    problem = catalog().operator("softmax").problem("bfloat16", rows=32, width=5000)
    assert {job["problem"] for job in asked} == {problem.json}
    chosen = {(one["of"], one["mode"]): one["choice"]
              for one in tuned_tables.table(users_tables / "nvidia-h200.json")}  # fmt: skip
    assert chosen["softmax", "training"] == chosen["softmax", "inference"] == "triton"
    assert chosen["softmax.forward", ""] == "blocks"
    assert "4 entries for nvidia-h200" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["softmacks", "--rows", "3"], "unknown operator 'softmacks': choose from "),
        (["softmax", "--rows", "3"], "the following arguments are required: --width"),
        (["softmax", "--batch", "3"], "unknown option --batch"),
        (["swiglu", "--rows", "3", "--width", "x"], "'x' must be a whole number, at least 1"),
    ],
)
def test_a_mistake_about_an_operator_is_one_sentence(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        tune.main(arguments)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_sizes_of_the_model_are_asked_for(asked):
    assert tune.main([*SIZES, "--d-model", "64", "--n-heads", "4", "--d-ff", "128"]) == 0
    problems = {job["op"]: json.loads(job["problem"])["sizes"] for job in asked}
    assert problems["attention"]["head_dim"] == 16
    assert problems["mlp"]["d_model"] == 64 and problems["mlp"]["d_ff"] == 128


def test_an_operator_without_a_time_has_no_entry(asked, users_tables, monkeypatch, capsys):
    def fail(kind, parameters, timeout_s):
        return failure_rows(kind, parameters, "timeout", "not finished after 900 s")

    monkeypatch.setattr(isolate, "run_isolated", fail)
    assert tune.main(SIZES) == 1
    assert not users_tables.exists()
    printed = capsys.readouterr()
    assert "timeout: not finished after 900 s" in printed.out
    assert "nothing could be timed of attention" in printed.err


def test_without_a_gpu_it_says_so(users_tables, capsys):
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    assert tune.main(SIZES) == 2
    assert capsys.readouterr().err.startswith("python -m tnp.tuning needs an NVIDIA GPU: none is")
    assert not users_tables.exists()


@pytest.mark.parametrize("batch", ["0", "-1", "many"])
def test_bad_sizes_are_named(batch, capsys):
    with pytest.raises(SystemExit) as ended:
        tune.main(["--batch", batch, *SIZES[2:]])
    assert ended.value.code == 2
    assert f"{batch!r} must be a whole number" in capsys.readouterr().err
