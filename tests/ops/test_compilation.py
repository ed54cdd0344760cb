"""Every committed configuration compiles for its targets; what is wrong with one would show."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tnp.gates import kernels
from tnp.ops import compilation

ROOT = str(Path(compilation.__file__).parents[2])

# What a test adds: `rows(*launches)` of (operation, kernel, dtype, head_dim, capability, config),
# with 200 queries and 500 keys; config None is the default.
PREAMBLE = """
import json, torch
from tnp.ops import compilation
from tnp.ops.attention.kernels import KERNELS, Problem
from tnp.ops.attention.primitives import LaunchConfig

def rows(*launches):
    def full(operation, kernel, dtype, head_dim, capability, config):
        problem = Problem(operation, dtype, 2, 2, 200, 500, head_dim, capability)
        return problem, kernel, config or KERNELS[operation, kernel].configs(problem)[0], False
    jobs = compilation.collect(full(*launch) for launch in launches)
    print(json.dumps([compilation.compiled(job) for job in jobs]))
"""


def rows(*launches: str) -> list[dict]:
    """`compilation.compiled` of the launches, in a process that can compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    logging = {"TRITON_ALWAYS_COMPILE": "1", "TRITON_DUMP_PTXAS_LOG": "1"}
    child = subprocess.run(
        [sys.executable, "-c", f"{PREAMBLE}\nrows({', '.join(launches)})"],
        env=environment | logging | {"PYTHONPATH": ROOT},
        capture_output=True,
        text=True,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def test_every_kernel_compiles_for_every_target_as_it_should():
    rows = compilation.compile_all()
    assert {row["target"] for row in rows} == {"sm_80", "sm_90a", "sm_100a"}
    assert {row["dtype"] for row in rows} == {"bfloat16", "float16", "float32"}
    assert {operation for row in rows for operation in row["operations"]} == {
        "forward",
        "separate",
        "fused",
    }
    hopper = {row["target"] for row in rows if "hopper" in row["kernel"]}
    assert hopper == {"sm_90a"}
    bad = [
        row
        for row in rows
        if row["spill_bytes"] or row["warnings"] or row["shared_bytes"] > row["shared_limit_bytes"]
    ]
    assert not bad, "\n".join(map(str, bad))
    assert all(row["registers"] > 0 for row in rows)


def test_a_spill_is_seen():
    """The control: float32 tiles of 128 × 64 are far too large for the registers."""
    small, large = rows(
        '("forward", "triton", torch.float32, 64, 90, LaunchConfig(16, 16, 4, 1))',
        '("forward", "triton", torch.float32, 64, 90, LaunchConfig(128, 64, 4, 1))',
    )
    assert small["spill_bytes"] == 0 < large["spill_bytes"]
    assert json.loads(large["launch_config"])["BLOCK_M"] == 128


def test_a_serialized_matmul_and_an_overrun_are_seen():
    serialized, overrun = rows(
        '("forward", "triton", torch.bfloat16, 128, 90, LaunchConfig(128, 256, 4, 1))',
        '("forward", "triton", torch.bfloat16, 128, 90, LaunchConfig(64, 128, 4, 6))',
    )
    assert "wgmma.mma_async instructions are serialized" in serialized["warnings"]
    assert overrun["shared_bytes"] > overrun["shared_limit_bytes"]


def test_equal_launches_compile_once_and_know_who_launches_them():
    separate = '("separate", "triton", torch.bfloat16, 64, 80, None)'
    fused = '("fused", "triton", torch.bfloat16, 64, 80, None)'
    compiled = rows(separate, separate, fused)
    operations = {row["kernel"]: row["operations"] for row in compiled}
    assert len(operations) == len(compiled)
    assert operations["delta"] == ["fused", "separate"]
    assert operations["attention_bwd_dq"] == ["separate"]
    assert operations["attention_bwd_fused"] == ["fused"]


def test_each_defect_is_a_red_check_of_the_implementation_it_is_in(monkeypatch):
    good = {
        "kernel": "k",
        "dtype": "bfloat16",
        "target": "sm_80",
        "launch_config": '{"BLOCK_M": 64}',
        "spill_bytes": 0,
        "shared_bytes": 5,
        "shared_limit_bytes": 5,
        "warnings": "",
        "operations": ["fused", "separate"],
    }
    defects = [{"spill_bytes": 8}, {"shared_bytes": 6}, {"warnings": "ptxas info : (C7510) slow"}]
    bad = [good | defect | {"operations": ["fused"]} for defect in defects]
    monkeypatch.setattr(kernels, "compile_all", lambda: [good, *bad])
    checks = list(kernels.checks(None))
    assert [check.metric for check in checks if not check.passed] == [
        "spilled bytes",
        "shared memory bytes",
        "ptxas warnings",
    ]
    assert {check.implementation for check in checks[:3]} == {""}
    assert {check.implementation for check in checks[3:]} == {"fused"}
    assert checks[0].check == "k bfloat16 BLOCK_M=64 for sm_80"
    assert not any("operations" in row for row in kernels.kernel_rows())


def test_a_configuration_that_does_not_compile_is_named(monkeypatch):
    monkeypatch.setattr(compilation.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="a kernel does not compile"):
        compilation._compile_in_child(0, 1)
