"""Phase 11: every committed kernel configuration compiles for its targets as it should.

Nothing spills, shared memory suffices, and ptxas warns of nothing: a wgmma that waits for the one
before it costs more than any tuning gains. Needs no GPU. What the compiler reports goes into table
`kernels`.
"""

import json
from collections.abc import Iterator

import torch

from tnp.gates.checks import Check
from tnp.gates.compile import compile_all


def kernel_rows() -> list[dict]:
    """Rows of table `kernels`, without provenance."""
    return [
        {name: value for name, value in row.items() if name != "users"} for row in compile_all()
    ]


def checks(device: torch.device) -> Iterator[Check]:
    """One of each kind for every implementation that launches the kernel: those it stops."""
    for row in compile_all():
        config = " ".join(f"{name}={x}" for name, x in json.loads(row["launch_config"]).items())
        what = f"{row['kernel']} {row['dtype']} {config} for {row['target']}"
        for op, implementation in row["users"]:
            for metric, value, bound in (
                ("spilled bytes", row["spill_bytes"], 0),
                ("shared memory bytes", row["shared_bytes"], row["shared_limit_bytes"]),
                ("ptxas warnings", len(row["warnings"].splitlines()), 0),
            ):
                yield Check(what, metric, value, bound, implementation, op=op)
