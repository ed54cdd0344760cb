"""Phase 11: every committed kernel configuration compiles for its targets without spilling.

Needs no GPU. What the compiler reports goes into table `kernels`.
"""

import json
from collections.abc import Iterator

import torch

from tnp.gates.checks import Check
from tnp.ops.compilation import compile_all


def kernel_rows() -> list[dict]:
    """Rows of table `kernels`, without provenance."""
    return compile_all()


def checks(device: torch.device) -> Iterator[Check]:
    for row in kernel_rows():
        head_dim = json.loads(row["launch_config"])["HEAD_DIM"]
        what = f"{row['kernel']} {row['dtype']} D={head_dim} for {row['target']}"
        yield Check(f"{what}: registers spilled", "bytes", row["spill_bytes"], 0, "separate")
        yield Check(
            f"{what}: shared memory", "bytes", row["shared_bytes"], row["shared_limit_bytes"],
            "separate",
        )  # fmt: skip
