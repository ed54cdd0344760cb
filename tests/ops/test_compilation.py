"""Every committed configuration compiles for its targets; a spill would show."""

from tnp.ops import compilation


def test_every_kernel_compiles_for_every_target_without_spills():
    rows = compilation.compile_all()
    assert {row["target"] for row in rows} == {"sm_80", "sm_90a", "sm_100a"}
    assert {row["dtype"] for row in rows} == {"bfloat16", "float16", "float32"}
    assert len({row["kernel"] for row in rows}) * 9 == len(rows)
    for row in rows:
        assert row["spill_bytes"] == 0, row
        assert 0 < row["shared_bytes"] <= row["shared_limit_bytes"], row
        assert row["registers"] > 0


def test_a_spilling_configuration_is_seen(tmp_path):
    """The control: tiles far too large for the registers."""
    import subprocess
    import sys

    program = """
from tnp.ops import compilation
from tnp.ops.attention import primitives
primitives.CONFIGS["dkdv", 4] = primitives.LaunchConfig(64, 64, 4, 1)
rows = compilation._rows(90, "float32")
print(max(row["spill_bytes"] for row in rows))
"""
    environment = {"PATH": "", "HOME": str(tmp_path), "PYTHONPATH": ":".join(sys.path)}
    child = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert int(child.stdout) > 0
