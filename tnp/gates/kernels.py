"""Checks phase 11: every committed kernel configuration compiles for its targets.

Nothing spills, shared memory suffices, and ptxas warns of nothing. A wgmma that waits for its
predecessor costs more than any tuning gains. Needs no GPU. The compiler's numbers go into table
`kernels`. No benchmark waits for this gate: a slow kernel is not a wrong one.
"""

from collections.abc import Iterator

import torch

from tnp.gates.checks import Check
from tnp.gates.compile import compile_all, described, faults

_NOT_IN_THE_TABLE = ("users", "package", "code")
_compiled: list[dict] = []  # filled in this process


def kernel_rows() -> list[dict]:
    """Returns the rows of table `kernels` from `checks`, without provenance."""
    return [
        {name: value for name, value in row.items() if name not in _NOT_IN_THE_TABLE}
        for row in _compiled
    ]


def checks(device: torch.device) -> Iterator[Check]:
    """Yields checks of each kernel, for every implementation that launches it."""
    _compiled.clear()
    for row in compile_all():
        _compiled.append(row)
        for op, implementation in row["users"]:
            for metric, value, bound in faults(row):
                yield Check(described(row), metric, value, bound, implementation, op=op)
