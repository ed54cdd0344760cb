"""Every committed configuration compiles for its targets; a spill or a failure would show."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tnp.ops import compilation


def test_every_kernel_compiles_for_every_target_without_spills():
    rows = compilation.compile_all()
    compiled = {(row["kernel"], row["target"], row["dtype"], row["launch_config"]) for row in rows}
    assert len(compiled) == len(rows)
    assert {row["target"] for row in rows} == {"sm_80", "sm_90a", "sm_100a"}
    assert {row["dtype"] for row in rows} == {"bfloat16", "float16", "float32"}
    for row in rows:
        assert row["spill_bytes"] == 0, row
        assert 0 < row["shared_bytes"] <= row["shared_limit_bytes"], row
        assert row["registers"] > 0


def test_a_spill_is_seen():
    """The control: float32 tiles of 64 × 64 are far too large for the registers, of 16 × 16 not."""
    program = """
from tnp.ops import compilation
from tnp.ops.attention.primitives import LaunchConfig
name, kernel = next(job[:2] for job in compilation._jobs() if job[0] == "attention_bwd_dkdv")
for tile in (16, 64):
    config = LaunchConfig(tile, tile, 4, 1)
    print(compilation._row(name, kernel, config, "float32", 64, 90)["spill_bytes"])
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    root = str(Path(compilation.__file__).parents[2])
    child = subprocess.run(
        [sys.executable, "-c", program],
        env=environment | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=True,
    )
    small, large = map(int, child.stdout.split())
    assert small == 0 < large


def test_a_configuration_that_does_not_compile_is_named(monkeypatch):
    monkeypatch.setattr(compilation.sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="a kernel does not compile"):
        compilation._compile_in_child(0, 1)
