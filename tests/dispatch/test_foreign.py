"""Tests `examples/foreign`, installed beside: known without an import, run, gated, optional."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the example, installed without network."""
    folder = tmp_path_factory.mktemp("installed")
    source = tmp_path_factory.mktemp("source") / "foreign"  # pip builds where the sources are
    shutil.copytree(ROOT / "examples/foreign", source)
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
         "--no-build-isolation", "--target", str(folder), str(source)],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


@pytest.fixture
def run(installed: Path, tmp_path: Path):
    """Returns what a program prints where the example is installed; the program must end well."""

    def of(code: str, **environment: str) -> str:
        path = os.pathsep.join((str(installed), str(ROOT)))
        child = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | {"PYTHONPATH": path} | environment,
        )  # fmt: skip
        assert child.returncode == 0, child.stderr
        return child.stdout + child.stderr

    return of


def test_planning_imports_neither_torch_nor_theirs_and_faults_are_sentences(run):
    said = run("""
import sys
import tnp.dispatch.registry
known = tnp.dispatch.registry.catalog()
theirs = known.listed("swiglu", "theirs")
print(theirs.provider, theirs.packages["tnp-example"], known.operators["scale"].sizes)
print(known.listed("swiglu", "absent").missing)
from tnp.experiment import fingerprints
print(*fingerprints.implementation_definitions(theirs))
print(*sorted(fingerprints.operator_definitions("scale")))
assert not {"torch", "triton", "tnp_example.swiglu", "yaml"} & sys.modules.keys()
print(*[fault for fault in known.faults if "tnp-example" in fault], sep="\\n")
print(known.names("swiglu"))
for name in ("raises", "absent"):
    try:
        known.load("swiglu", name)
    except Exception as error:
        print(type(error).__name__, error)
""").splitlines()
    assert said[:4] == [
        "PyYAML 1.2.3 ('n',)",
        "package no-such-package-of-anybody is not installed: pip install "
        "no-such-package-of-anybody",
        "PyYAML: tnp-example:",
        "scale:form scale:values tnp-example:",
    ]
    assert said[4].startswith("entry point swigloo.theirs of tnp-example: it must be operator.impl")
    assert said[5] == "swiglu.triton of tnp-example: tnp has an implementation of that name"
    assert "'theirs'" in said[6] and "'triton'" in said[6]
    assert said[7] == "OSError libfast.so: cannot open shared object file"
    assert said[8].startswith("RuntimeError swiglu implementation 'absent': package no-such-pack")


def test_theirs_runs_and_is_judged_by_the_generic_gate(run):
    pytest.importorskip("tnp.gates.operators")
    said = run("""
import torch
from tnp.gates.checks import Check
from tnp.gates.operators import checks
from tnp.ops.swiglu import swiglu, reference
gate, up = torch.randn(2, 3, 4, requires_grad=True).unbind()
found, wanted = swiglu(gate, up, implementation="theirs"), reference(gate, up)
torch.testing.assert_close(found, wanted)
for one, other in zip(*(torch.autograd.grad(y.sum(), (gate, up)) for y in (found, wanted))):
    torch.testing.assert_close(one, other)
with torch.no_grad():
    swiglu(gate, up, implementation="forward_only")
try:
    swiglu(gate, up, implementation="forward_only")
except RuntimeError as error:
    print(error)
for name in ("theirs", "forward_only", "wrong"):
    told = checks("swiglu", name, torch.device("cpu"))
    found = [one for one in told if isinstance(one, Check)]
    print(any(not check.passed for check in found), len(found) > 3)
""", TRITON_INTERPRET="1").splitlines()  # fmt: skip
    assert said[0].startswith("swiglu implementation 'forward_only' cannot run here: it is forward")
    assert ": choose torch or " in said[0]
    assert said[-3:] == ["False True", "False True", "True True"]


def test_auto_imports_theirs_only_where_a_table_names_it_and_says_why_it_cannot(run, tmp_path):
    problem = {"op": "swiglu", "dtype": "float32", "sizes": {"rows": 3, "width": 4}}
    for choice in ("torch", "theirs", "raises"):
        entry = {"of": "swiglu", "mode": "inference", "problem": problem, "choice": choice}
        table = {"version": 2, "capability": 90, "entries": [entry]}
        (tmp_path / choice).mkdir()
        (tmp_path / choice / "h200.json").write_text(json.dumps(table))
    said = run("""
import os, sys, torch
from tnp.dispatch import devices as targets, selection, tuned_tables
targets._seen[torch.device("cpu")] = targets.named("H200")
from tnp.ops.swiglu import swiglu
for name in ("torch", "theirs", "raises"):
    os.environ["TNP_TABLES"] = name
    tuned_tables.refresh()
    swiglu(torch.randn(3, 4), torch.randn(3, 4), implementation="auto")
    chosen = selection.choices()[-1]
    print("tnp_example.swiglu" in sys.modules, chosen["source"], chosen["refused"], sep=": ")
""").splitlines()  # fmt: skip
    assert [line.split(":")[0] for line in said[-3:]] == ["False", "True", "True"]
    assert said[-1].endswith(
        "default: raises cannot run here: it cannot be loaded: "
        "OSError: libfast.so: cannot open shared object file"
    )


def test_what_aborts_is_a_row(run):
    pytest.importorskip("tnp.gates.operators")
    said = run("""
from pathlib import Path
from workflow.gate_process import run
where = Path("unfinished.jsonl")
(row,) = run("op--swiglu--aborts", "cpu", "cpu", {}, 600, where, print)["gates"]
print(row["gate"], row["status"], row["reason"], sep=": ")
""")
    assert "op--swiglu--aborts: error: crashed by signal SIGABRT" in said.splitlines()
