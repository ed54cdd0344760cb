"""Every committed configuration compiles for its targets; what is wrong with one would show."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gates.covering import covering
from tnp import choice, cuda
from tnp.catalog import catalog
from tnp.gates import blocking_reason, kernels, run_gate
from tnp.gates import compile as compilation
from tnp.ops.attention import FUSED, OPERATOR, SEPARATE
from tnp.schemas import PROVENANCE, RUN, TABLES

ROOT = str(Path(compilation.__file__).parents[2])
TABLE = choice.COMMITTED / "nvidia-h200.json"
# After a decorator, which may end in a line of its own.
KERNEL = re.compile(r"^[@)].*\ndef _?(\w+)_kernel\(", re.MULTILINE)

# Of CUDA C++, the kernel of each implementation.
IN_CUDA = {
    ("softmax", "three_passes"): "softmax_three_passes",
    ("softmax", "one_pass"): "softmax_one_pass",
    ("row_sum", "tree"): "row_sum_block",
    ("row_sum", "shuffles"): "row_sum_block",
    ("attention", "wmma"): "attention_wmma",
    ("attention", "cute"): "attention_cute",
}

# What a test adds: `rows` of launches of `attention` with 200 queries and 500 keys, where config
# None is the default.
PREAMBLE = """
import json, torch
from tnp import targets
from tnp.choice import as_json
from tnp.contract import Call
from tnp.gates import compile
from tnp.ops.attention import FORWARD, OPERATOR
from tnp.ops.attention.primitives import LaunchConfig

def attention(name, dtype, head_dim, capability, config=None):
    sizes = dict(batch=2, n_heads=2, n_q=200, n_k=500, head_dim=head_dim)
    problem, target = OPERATOR.problem(dtype, **sizes), targets.of_capability(capability)
    own = next(one for one in OPERATOR.implementations if one.name == name)
    if config is None:
        return list(compile.launches(OPERATOR, problem, target, own))
    forced = {FORWARD.name: ("triton", config)}
    def call():
        compile._launch(OPERATOR, own, problem, target, (), forced)
    return [compile.Launch(capability, dtype, ((OPERATOR.name, name),), call)]

def rows(*launches):
    jobs = compile.collect(launch for each in launches for launch in each)
    print(json.dumps([compile.compiled(job) for job in jobs]))
"""


# Of all that the gate compiles, what the tests do.
COVERING = """
import json
from tests.gates.covering import covering
from tnp.gates import compile
jobs = compile.collect(compile.committed_launches())
print(json.dumps([compile.compiled(job) for job in covering(jobs)]))
"""


def rows(*launches: str) -> list[dict]:
    """`gates.compile.compiled` of the launches."""
    return in_child(f"{PREAMBLE}\nrows({', '.join(launches)})")


def in_child(script: str) -> list[dict]:
    """What it prints in a process that can compile."""
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
    """Where there is no compiler, or CUTLASS is missing, these are refused with the reason."""
    if cuda.missing():
        return set()
    return set(IN_CUDA.values()) - ({"attention_cute"} if cuda.missing_for_cute() else set())


@pytest.mark.first
def test_every_kernel_compiles_for_every_target_as_it_should():
    rows = in_child(COVERING)
    in_cuda = in_cuda_that_compiles()
    of_triton = [row for row in rows if row["kernel"] not in in_cuda]
    assert {row["target"] for row in of_triton} == {"sm_80", "sm_90a", "sm_100a"}
    built = {(row["kernel"], row["target"]) for row in rows if row["kernel"] in in_cuda}
    everywhere = {(name, to) for name in in_cuda for to in cuda.ARCHITECTURES.values()}
    assert built == everywhere - {("attention_cute", "sm_75")}
    assert {row["dtype"] for row in rows} == {"bfloat16", "float16", "float32"}
    users = {tuple(user) for row in rows for user in row["users"]}
    declared = {
        (operator.name, own.name)
        for operator in catalog().operators.values()
        for own in operator.implementations
        if own.forward is not None
    }
    refused = {user for user, kernel in IN_CUDA.items() if kernel not in in_cuda}
    assert declared - users == refused
    assert users < declared
    newest = {tuple(user) for row in rows if row["target"] == "sm_100a" for user in row["users"]}
    assert {op for op, _ in newest} == {op for op, _ in users}
    hopper = {(row["target"], row["dtype"]) for row in rows if "hopper" in row["kernel"]}
    assert hopper == {("sm_90a", "bfloat16"), ("sm_90a", "float16")}
    sources = (path.read_text() for path in Path(ROOT, "tnp/ops").rglob("*.py"))
    written = {name for source in sources for name in KERNEL.findall(source)}
    assert {row["kernel"] for row in rows} == written | in_cuda
    bad = [
        row
        for row in rows
        if row["spill_bytes"] or row["warnings"] or row["shared_bytes"] > row["shared_limit_bytes"]
    ]
    assert not bad, "\n".join(map(str, bad))
    assert all(row["registers"] > 0 for row in rows)


def test_a_spill_is_seen():
    """The control: float32 tiles of 128 × 32 are too large for the registers."""
    small, large = rows(
        'attention("fused", "float32", 64, 90, LaunchConfig(16, 16, 4, 1))',
        'attention("fused", "float32", 64, 90, LaunchConfig(128, 32, 4, 1))',
    )
    assert small["spill_bytes"] == 0 < large["spill_bytes"]
    assert small["users"] == [["attention", "fused"]]
    assert json.loads(large["launch_config"])["BLOCK_M"] == 128


def test_a_serialized_matmul_and_an_overrun_are_seen():
    serialized, overrun = rows(
        'attention("fused", "bfloat16", 128, 90, LaunchConfig(128, 256, 4, 1))',
        'attention("fused", "bfloat16", 128, 90, LaunchConfig(64, 128, 4, 6))',
    )
    assert "wgmma.mma_async instructions are serialized" in serialized["warnings"]
    assert overrun["shared_bytes"] > overrun["shared_limit_bytes"]


def test_equal_launches_compile_once_and_know_who_launches_them():
    separate, fused = (f'attention("{name}", "bfloat16", 64, 80)' for name in ("separate", "fused"))
    compiled = rows(separate, separate, fused)
    users = {row["kernel"]: row["users"] for row in compiled}
    assert len(users) == len(compiled)
    assert users["delta"] == [["attention", "fused"], ["attention", "separate"]]
    assert users["attention_fwd"] == users["delta"]
    assert users["attention_bwd_dq"] == [["attention", "separate"]]
    assert users["attention_bwd_fused"] == [["attention", "fused"]]


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
    assert not any("users" in row for row in kernels.kernel_rows())


def test_a_defect_stops_only_what_launches_the_kernel(monkeypatch):
    bad = GOOD | {"spill_bytes": 8, "users": [["mlp", "fused"]]}
    monkeypatch.setattr(kernels, "compile_all", lambda: [GOOD, bad])
    rows = run_gate("kernels", "cpu")["gates"]
    assert {row["op"] for row in rows} == {"attention", "mlp"}
    assert "spilled bytes 8" in blocking_reason(rows, {"attention": "fused", "mlp": "fused"})
    for mlp in ("single", "torch"):
        assert blocking_reason(rows, {"attention": "fused", "mlp": mlp}) is None


def test_every_value_that_a_kernel_is_compiled_with_is_covered_by_few():
    def job(dtype="bfloat16", arch=90, name="a", **constants):
        target = SimpleNamespace(arch=arch)
        users = {("mlp", "fused")}
        return SimpleNamespace(
            name=name, dtype=dtype, target=target, launch_config=constants, users=users
        )

    one, other, both = job(M=1, N=1), job(M=2, N=1), job(M=1, N=2)
    new = job("float16", 100, M=2, N=2)
    assert covering([one, other, both]) == [other, both]  # which have the values of the first
    assert covering([one, other, both, new]) == [one, new]
    assert covering([one, job(name="b", M=1, N=1), one]) == [one, job(name="b", M=1, N=1)]
    of_linear = job(M=1, N=1)
    of_linear.users = {("linear", "fused")}
    assert covering([one, of_linear]) == [one, of_linear]


def test_a_part_is_compiled_in_a_child():
    """Of more parts than there are kernels, the first."""
    (row,) = compilation._compile_in_child(0, 10_000)
    assert row.pop("users")
    assert [*dict(PROVENANCE), *row, *dict(RUN)] == TABLES["kernels"].names


def test_a_configuration_that_does_not_compile_is_named(monkeypatch):
    monkeypatch.setattr(compilation.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="a kernel does not compile"):
        compilation._compile_in_child(0, 1)


def test_every_operation_that_a_table_names_is_compiled_as_it_says():
    """Also where a configuration is no candidate with lengths of samples given."""
    own = {operation.name for operation in (SEPARATE, FUSED)}
    entries = [one for one in choice.table(TABLE) if one["of"] in own]
    forced = [launch.call.args[-1] for launch in compilation._of_tables(OPERATOR)]
    compiled = [
        (of, kernel, choice.as_json(config))
        for one in forced
        for of, (kernel, config) in one.items()
    ]
    assert any("persistent" in json.dumps(one["config"]) for one in entries)
    for entry in entries:
        assert (entry["of"], entry["choice"], entry["config"]) in compiled


def test_what_a_table_names_is_compiled_with_lengths_where_it_can_be():
    problems = [launch.call.args[2] for launch in compilation._of_tables(OPERATOR)]
    counted = [problem for problem in problems if problem["n_keys"]]
    assert counted and len(counted) < len(problems)  # some configurations take none
    assert not any(problem["cu_seqlens_q"] for problem in problems)


@pytest.mark.parametrize("of", ["attention.forward", "attention.fused"])
def test_an_entry_whose_configuration_is_none_of_its_kernels_is_named(of, monkeypatch):
    (entry, *_) = [one for one in choice.table(TABLE) if one["of"] == of and "us" in one]
    monkeypatch.setattr(choice, "table", lambda path: (entry | {"config": {"block_m": 7}},))
    with pytest.raises(ValueError, match="no candidate of its kernel.*block_m"):
        list(compilation._of_tables(OPERATOR))
