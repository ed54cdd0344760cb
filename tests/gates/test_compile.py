"""Tests that every committed configuration compiles for its targets, and that faults show."""

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from tnp.dispatch import devices, tuned_tables
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Call, Case
from tnp.gates import blocked, kept, kernels, launches, run_gate
from tnp.gates import compile as compilation
from tnp.gates.compile_job import TARGETS
from tnp.gates.results import wanted_of
from tnp.gates.step_launches import USERS
from tnp.ops.attention import FUSED, OPERATOR, SEPARATE
from tnp.store.schemas import PROVENANCE, RUN, TABLES
from tnp_lab import nvrtc

ROOT = str(Path(compilation.__file__).parents[2])
TABLE = tuned_tables.COMMITTED / "nvidia-h200.json"
# After a decorator, which may end in a line of its own.
KERNEL = re.compile(r"^[@)].*\ndef _?(\w+)_kernel\(", re.MULTILINE)

# The forward kernel of each implementation in CUDA C++.
IN_CUDA = {
    ("softmax", "three_passes"): "softmax_three_passes",
    ("softmax", "one_pass"): "softmax_one_pass",
    ("row_sum", "tree"): "row_sum_block",
    ("row_sum", "shuffles"): "row_sum_block",
    ("layer_norm", "one_pass"): "layer_norm_one_pass",
    ("cross_entropy", "online"): "cross_entropy_online",
    ("gelu_linear", "wmma"): "gelu_linear_wmma",
    ("attention", "wmma"): "attention_wmma",
    ("attention", "wmma_step_1"): "attention_wmma_steps",
    ("attention", "wmma_step_2"): "attention_wmma_steps",
    ("attention", "wmma_step_3"): "attention_wmma_steps",
    ("attention", "cute"): "attention_cute",
}
# Their other kernels: the mean of the losses, and the backward pass of both forms of attention.
OTHERS_IN_CUDA = {"cross_entropy_mean", "attention_delta", "attention_dkdv", "attention_dq"}

# Launches of `attention` with 200 queries and 500 keys. Config None is the default.
PREAMBLE = """
import json, torch
from tnp.dispatch import devices as targets
from tnp.dispatch.tuned_tables import as_json
from tnp.dispatch.spec import Call
from tnp.gates import compile, launches
from tnp.ops.attention import FORWARD, OPERATOR
from tnp.ops.attention.primitives import LaunchConfig

def attention(name, dtype, head_dim, capability, config=None):
    sizes = dict(batch=2, n_heads=2, n_q=200, n_k=500, head_dim=head_dim)
    problem, target = OPERATOR.problem(dtype, **sizes), targets.of_capability(capability)
    own = next(one for one in OPERATOR.implementations if one.name == name)
    if config is None:
        return list(launches.launches(OPERATOR, problem, target, own))
    forced = {FORWARD.name: ("triton", config)}
    def call():
        launches._launch(OPERATOR, own, problem, target, (), forced)
    return [launches.Launch(capability, dtype, ((OPERATOR.name, name),), call)]
"""

# Codes of a kernel's jobs as it is, and with what is changed of it; and how many are kept of each.
CODES = """
import tnp.experiment.code_hash
from pathlib import Path
from tnp.experiment.kernel_code import kernel_hash
from tnp.gates import kept

twice = [attention(name, "bfloat16", 64, 80) for name in ("separate", "separate", "fused")]
known = [job.known() for job in compile.collect(launch for each in twice for launch in each)]
jobs = compile.collect(iter(attention("fused", "bfloat16", 64, 90)))

def codes():
    return {job.name: kept.code(job) for job in jobs}

def again(change):
    reader = tnp.experiment.code_hash
    for cached in (kernel_hash, reader._reached, reader._source):
        cached.cache_clear()
    change()
    return codes()

FILE = Path("tnp/ops/attention/portable/forward.py").resolve()
read_text, found = Path.read_text, [codes(), again(lambda: None)]

def reads(old, new):
    def read(path, *arguments):
        text = read_text(path, *arguments)
        if path != FILE:
            return text
        assert old in text
        return text.replace(old, new)
    Path.read_text = read
"""


def in_child(script: str) -> list[dict]:
    """Returns the JSON that `script` prints in a process that can compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    logging = {"TRITON_ALWAYS_COMPILE": "1", "TRITON_DUMP_PTXAS_LOG": "1"}
    child = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | logging | {"PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def in_cuda_that_compiles() -> set[str]:
    """Returns the kernels in CUDA C++ that compile here. Others are refused with the reason."""
    if nvrtc.missing():
        return set()
    refused = {"attention_cute"} if nvrtc.missing_for_cute() else set()
    return {*IN_CUDA.values(), *OTHERS_IN_CUDA} - refused


@pytest.mark.first
def test_every_kernel_compiles_for_every_target_as_it_should():
    """Kept results are not compiled again. Every kernel that changed since is compiled."""
    rows = list(compilation.compile_all())
    columns = {*dict(PROVENANCE), *rows[0].keys() - {"users", "package", "code"}, *dict(RUN)}
    assert columns == set(TABLES["kernels"].names)
    in_cuda = in_cuda_that_compiles()
    of_triton = [row for row in rows if row["kernel"] not in in_cuda]
    assert {row["target"] for row in of_triton} == {*TARGETS.values()}
    built = {(row["kernel"], row["target"]) for row in rows if row["kernel"] in in_cuda}
    everywhere = {(name, to) for name in in_cuda for to in nvrtc.ARCHITECTURES.values()}
    assert built == everywhere - {("attention_cute", "sm_75")}
    assert {row["dtype"] for row in rows} == {"bfloat16", "float16", "float32"}
    users = {tuple(user) for row in rows for user in row["users"]}
    declared = {
        (operator.name, own.name)
        for operator in catalog().operators.values()
        for own in catalog().ours(operator.name)
    }
    refused = {user for user, kernel in IN_CUDA.items() if kernel not in in_cuda}
    assert declared - users == refused
    assert users - declared == {*USERS}  # no operator declares a step of decoding
    newest = {tuple(user) for row in rows if row["target"] == "sm_100a" for user in row["users"]}
    assert {op for op, _ in newest} == {op for op, _ in users}
    hopper = {(row["target"], row["dtype"]) for row in rows if "hopper" in row["kernel"]}
    assert hopper == {("sm_90a", "bfloat16"), ("sm_90a", "float16")}
    # The kernel of `kv_cache` is no operator's: drawing compiles it on its first launch.
    folders = Path(ROOT, "tnp/ops"), Path(ROOT, "tnp/llm"), Path(nvrtc.__file__).parent
    files = (path for folder in folders for path in folder.rglob("*.py"))
    files = (path for path in files if path.parent.name != "kv_cache")
    sources = (path.read_text() for path in files)
    written = {name for source in sources for name in KERNEL.findall(source)}
    assert {row["kernel"] for row in rows} == written | in_cuda
    bad = [row for row in rows if any(value > most for _, value, most in compilation.faults(row))]
    assert not bad, "\n".join(map(str, bad))
    assert all(row["registers"] > 0 for row in rows)


FEW_KEYS = {"batch": 2, "n_heads": 2, "n_q": 40, "n_k": 100, "head_dim": 128}
NARROW = {"rows": 4, "width": 1024, "n_out": 64}


@pytest.mark.parametrize(
    ("op", "name", "sizes", "wanted", "needed"),
    [
        ("attention", "fused", FEW_KEYS, ("q",), "108 KB"),
        ("attention", "fused", FEW_KEYS, (), None),
        ("attention", "fused", FEW_KEYS | {"causal": True}, ("q",), None),
        ("attention", "fused", FEW_KEYS | {"n_k": 200}, ("q",), None),
        ("attention", "portable", FEW_KEYS, ("q",), None),
        ("mlp", "single", {"rows": 4, "d_model": 512, "d_ff": 64}, (), "132 KB"),
        ("mlp", "single", {"rows": 4, "d_model": 256, "d_ff": 64}, (), None),
        ("rms_norm_linear", "triton", NARROW, (), None),
        ("rms_norm_linear", "triton", NARROW | {"width": 2049}, (), "146 KB"),
        ("rms_norm_linear", "triton", NARROW | {"width": 512, "rows": 17}, (), "146 KB"),
    ],
)
def test_what_needs_more_shared_memory_than_8_6_has_is_refused(op, name, sizes, wanted, needed):
    operator = catalog().operator(op)
    problem = operator.problem("bfloat16", **sizes)
    found = next(one for one in operator.implementations if one.name == name)
    small, large = (
        found.refuses(Call(problem, devices.of_capability(each), wanted)) for each in (86, 80)
    )
    assert large is None
    assert small is None if needed is None else needed in small and "this GPU has 99 KB" in small


@pytest.fixture(scope="module")
def compiled() -> list[dict]:
    """Returns rows of forward kernels with good and bad tiles, and one with its kept result.

    One process compiles all of them.
    """
    sizes = (
        ("bfloat16", 64, "64, 32, 4, 1"),
        ("float32", 128, "64, 16, 4, 1"),
        ("bfloat16", 32, "128, 256, 4, 1"),
        ("bfloat16", 128, "64, 64, 4, 8"),
    )
    launched = (
        f'attention("fused", "{dtype}", {head_dim}, 90, LaunchConfig({config}))'
        for dtype, head_dim, config in sizes
    )
    lines = """
    from tnp.gates import kept
    committed = launches.committed_launches()
    launched.append([next(one for one in committed if one.users[0] == ("layer_norm", "triton"))])
    jobs = compile.collect(launch for each in launched for launch in each)
    rows = [job.known() | job.compiled() for job in jobs[:5]]
    rows[-1]["kept"] = kept.results(kept.FILE).get(kept.code(jobs[4]))
    print(json.dumps(rows))
    """
    return in_child(f"{PREAMBLE}\nlaunched = [{', '.join(launched)}]\n{dedent(lines)}")


def test_a_spill_is_seen(compiled):
    """The control: float32 tiles of 64 × 128 are too large for the registers."""
    small, large, *_ = compiled
    assert small["spill_bytes"] == 0 < large["spill_bytes"]
    assert small["users"] == [["attention", "fused"]]
    assert json.loads(large["launch_config"])["BLOCK_M"] == 64


def test_a_serialized_matmul_and_an_overrun_are_seen(compiled):
    *_, serialized, overrun, _ = compiled
    assert "wgmma.mma_async instructions are serialized" in serialized["warnings"]
    assert overrun["shared_bytes"] > overrun["shared_limit_bytes"]


GOOD = {
    "kernel": "k",
    "dtype": "bfloat16",
    "target": "sm_80",
    "launch_config": '{"BLOCK_M": 64}',
    "spill_bytes": 0,
    "shared_bytes": 5,
    "shared_limit_bytes": 5,
    "warnings": "",
    "users": [["attention", "fused"], ["attention", "separate"]],
}


def test_each_defect_is_a_red_check_of_the_implementation_it_is_in(monkeypatch):
    defects = [{"spill_bytes": 8}, {"shared_bytes": 6}, {"warnings": "ptxas info : (C7510) slow"}]
    bad = [GOOD | defect | {"users": [["mlp", "fused"]]} for defect in defects]
    monkeypatch.setattr(kernels, "compile_all", lambda: [GOOD, *bad])
    checks = list(kernels.checks(None))
    assert [check.metric for check in checks if not check.passed] == [
        "spilled bytes",
        "shared memory bytes",
        "ptxas warnings",
    ]
    users = [(check.op, check.implementation) for check in checks[::3]]
    assert users == [("attention", "fused"), ("attention", "separate"), *[("mlp", "fused")] * 3]
    assert checks[0].check == "k bfloat16 BLOCK_M=64 for sm_80"
    assert not any({"users", "package", "code"} & row.keys() for row in kernels.kernel_rows())


def test_a_few_bytes_are_spilled_only_by_kernels_that_may():
    def red(kernel: str, target: str) -> bool:
        row = GOOD | {"kernel": kernel, "target": target, "spill_bytes": 8}
        return any(value > bound for _, value, bound in compilation.faults(row))

    assert not red("centred_keys", "sm_86") and not red("centred_keys", "sm_89")
    assert red("attention_fwd", "sm_86") and red("few_keys_bwd", "sm_89")
    assert red("centred_keys", "sm_90a")


# Implementations that are refused where shared memory lacks. The kernel that needs it is compiled
# for a capability whose blocks have enough.
NEEDS = {
    "few_keys_bwd": (
        ("attention", "separate", "float32", 90),
        {"batch": 1, "n_heads": 8, "n_q": 64, "n_k": 128, "head_dim": 32},
    ),
    "buffered_attention_fwd": (
        ("buffered_attention", "triton", "float32", 90),
        {"batch": 1, "n_heads": 4, "n_q": 256, "n_k": 128, "n_buffer": 64, "head_dim": 32},
    ),
    "mlp": (("mlp", "single", "bfloat16", 80), {"rows": 64, "d_model": 512, "d_ff": 1408}),
    "rms_norm_linear": (
        ("rms_norm_linear", "triton", "bfloat16", 80),
        {"rows": 40, "width": 512, "n_out": 1536},
    ),
}


@pytest.mark.parametrize("kernel", NEEDS)
def test_a_declared_need_of_shared_memory_is_the_compilers(kernel):
    """An implementation serves a GPU with as many bytes as its kernel takes, and no other."""
    (op, name, dtype, capability), sizes = NEEDS[kernel]
    with kept.FILE.open(newline="") as file:
        needed = max(
            int(line["shared_bytes"])
            for line in csv.DictReader(file)
            if (line["kernel"], line["dtype"], line["target"])
            == (kernel, dtype, TARGETS[capability])
        )
    operator, own = catalog().operator(op), catalog().load(op, name)
    enough = replace(devices.of_capability(capability), shared_bytes=needed)
    problem = operator.problem(dtype, **sizes)
    call = Call(problem, enough, wanted_of(operator, own, Case(problem)))
    assert own.supported(call) is None
    lacking = replace(call, target=replace(enough, shared_bytes=needed - 1))
    assert f"needs {needed / 1024:.0f} KB of shared memory" in own.supported(lacking)


def test_a_defect_stops_only_what_launches_the_kernel(monkeypatch):
    bad = GOOD | {"spill_bytes": 8, "users": [["mlp", "fused"]]}
    monkeypatch.setattr(kernels, "compile_all", lambda: [GOOD, bad])
    rows = run_gate("kernels", "cpu")["gates"]
    assert {row["op"] for row in rows} == {"attention", "mlp"}
    assert "spilled bytes 8" in blocked(rows, {"attention": "fused", "mlp": "fused"}).reason
    for mlp in ("single", "torch"):
        assert blocked(rows, {"attention": "fused", "mlp": mlp}) is None


@pytest.fixture(scope="module")
def collected() -> tuple[list[dict], list[dict]]:
    """Returns jobs that are launched twice, and codes of jobs after each change."""
    lines = """
found.append(again(lambda: reads("BLOCK_M", "BLOCK_M")))
found.append(again(lambda: reads("tl.maximum(", "tl.minimum(")))
Path.read_text = read_text
import triton
triton.__version__ += ".1"
found.append(again(lambda: None))
triton.__version__ = triton.__version__[:-2]
for job in jobs:
    job.options["num_stages"] += 1
found.append(codes())
for job in jobs:
    job.options["num_stages"] -= 1
    job.source.constants[next(iter(job.source.constants))] = 99
found.append(codes())
print(json.dumps([known, found]))
"""
    return in_child(PREAMBLE + CODES + lines)


def test_equal_launches_compile_once_and_know_who_launches_them(collected):
    users = {row["kernel"]: row["users"] for row in collected[0]}
    assert len(users) == len(collected[0])
    assert users["delta"] == [["attention", "fused"], ["attention", "separate"]]
    assert users["attention_fwd"] == users["delta"]
    assert users["attention_bwd_dq"] == [["attention", "separate"]]
    assert users["attention_bwd_fused"] == [["attention", "fused"]]


def test_a_result_is_kept_for_its_own_code_alone(collected):
    """Codes of attention's kernels change with the forward kernel's source."""
    as_it_is, again, unchanged, changed, *others = collected[1]
    assert as_it_is == again == unchanged
    assert changed["attention_fwd"] != as_it_is["attention_fwd"]
    assert changed["delta"] == as_it_is["delta"]
    for other in others:  # of Triton, stages, and a constant
        assert not set(other.values()) & set(as_it_is.values())
    assert len(set(as_it_is.values())) == len(as_it_is)


class FakeJob:
    """Stands for a job of `spill` bytes that a forked process compiles; `asked` is its code."""

    def __init__(self, asked: str, spill: int = 0) -> None:
        self.asked, self.spill = asked, spill

    def known(self) -> dict:
        known = ("kernel", "target", "dtype", "launch_config", "shared_limit_bytes", "users")
        return {name: GOOD[name] for name in known} | {"num_stages": 2}

    def compiled(self) -> dict:
        if self.spill < 0:
            raise RuntimeError("no such register")
        compiled = {name: GOOD[name] for name in ("shared_bytes", "warnings")}
        numbers = {"registers": 40, "num_warps": 4, "compile_s": 1.0, "spill_bytes": self.spill}
        return compiled | numbers


def test_kept_results_are_not_compiled_and_spills_stay_red(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "code", lambda job: job.asked)
    path = tmp_path / "compiled.csv"
    first = list(compilation.rows_of([FakeJob("a"), FakeJob("b", spill=16)], path))
    assert [row["compile_s"] for row in first] == [1.0, 1.0]
    kept.write(first, path)
    kept.results.cache_clear()
    # Compiling again would raise: only what changed is compiled.
    jobs = [FakeJob("a", spill=-1), FakeJob("b", spill=-1), FakeJob("c", spill=8)]
    rows = {row["code"]: row for row in compilation.rows_of(jobs, path)}
    assert [rows[code]["compile_s"] for code in "abc"] == [None, None, 1.0]
    assert [rows[code]["spill_bytes"] for code in "abc"] == [0, 16, 8]
    for row in first:
        assert rows[row["code"]] == row | {"compile_s": None}
    with pytest.raises(RuntimeError, match="^k bfloat16 sm_80: no such register$"):
        list(compilation.rows_of([FakeJob("d", spill=-1)], path))


def test_kept_results_equal_the_compilers(compiled):
    """Compiles one of the fastest kernels anew, and compares with its kept result."""
    row = compiled[-1]
    assert row["kernel"] == "layer_norm_fwd"
    assert row["kept"] is not None, "run `python -m tnp.gates.compile --keep`"
    assert row["kept"] == {name: row[name] for name in row["kept"]}


def test_a_configuration_that_does_not_compile_is_named(monkeypatch):
    monkeypatch.setattr(compilation.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="a kernel does not compile"):
        list(compilation.compile_all())


def test_one_target_alone_is_compiled(monkeypatch, capsys):
    jobs = [FakeJob("a"), FakeJob("b")]
    other = jobs[1].known() | {"target": "sm_89"}
    monkeypatch.setattr(jobs[1], "known", lambda: other)
    monkeypatch.setattr(compilation, "collect", lambda launches: jobs)
    monkeypatch.setattr(compilation, "rows_of", lambda jobs: (job.known() for job in jobs))
    monkeypatch.setattr(sys, "argv", ["compile", "--rows", "--target", "sm_89"])
    compilation._main()
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["target"] == "sm_89"


def test_the_child_that_compiles_is_told_the_target(monkeypatch):
    started = []
    popen = compilation.subprocess.Popen

    def child(command, **options):
        started.extend(command)
        return popen(["true"], **options)

    monkeypatch.setattr(compilation.subprocess, "Popen", child)
    assert list(compilation.compile_all("sm_89")) == []
    assert started[-2:] == ["--target", "sm_89"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--target", "sm_70"], "invalid choice: 'sm_70' (choose from"),
        (["--keep", "--target", "sm_89"], "--keep writes the results of all targets"),
    ],
)
def test_a_target_that_cannot_be_is_refused(arguments, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["compile", *arguments])
    with pytest.raises(SystemExit):
        compilation._main()
    assert sentence in capsys.readouterr().err


def test_every_operation_that_a_table_names_is_compiled_as_it_says():
    """This includes configurations that are no candidates with lengths of samples."""
    own = {operation.name for operation in (SEPARATE, FUSED)}
    entries = [one for one in tuned_tables.table(TABLE) if one["of"] in own]
    forced = [launch.call.args[-1] for launch in launches._of_tables(OPERATOR)]
    compiled = [
        (of, kernel, tuned_tables.as_json(config))
        for one in forced
        for of, (kernel, config) in one.items()
    ]
    assert any("persistent" in json.dumps(one["config"]) for one in entries)
    for entry in entries:
        assert (entry["of"], entry["choice"], entry["config"]) in compiled


def test_configurations_of_a_table_are_compiled_with_lengths_where_possible():
    problems = [launch.call.args[2] for launch in launches._of_tables(OPERATOR)]
    counted = [problem for problem in problems if problem["n_keys"]]
    assert counted and len(counted) < len(problems)  # some configurations take none
    assert not any(problem["cu_seqlens_q"] for problem in problems)


@pytest.mark.parametrize("of", ["attention.forward", "attention.fused"])
def test_an_entry_whose_configuration_is_none_of_its_kernels_is_named(of, monkeypatch):
    (entry, *_) = [one for one in tuned_tables.table(TABLE) if one["of"] == of and "us" in one]
    monkeypatch.setattr(tuned_tables, "table", lambda path: (entry | {"config": {"block_m": 7}},))
    with pytest.raises(ValueError, match="no candidate of its kernel.*block_m"):
        list(launches._of_tables(OPERATOR))
