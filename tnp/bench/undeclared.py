"""Benchmarks of operators whose problem is not declared: jobs without a "problem".

The ceilings, and operators that `tnp.ops.registry` knows and `tnp.catalog` does not yet.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tnp.bench.contenders import Counted
from tnp.bench.outcome import implementation_of, require_supported
from tnp.bench.sizes import CEILINGS
from tnp.bench.workloads import WORKLOADS, Output
from tnp.ops import auto, registry


def packages(op: str, name: str) -> list[str]:
    """Distributions whose versions stand in rows of an implementation."""
    return ["torch" if op in CEILINGS else registry.get(op, name).provider]


class Undeclared:
    """As `tnp.bench.contenders.Contenders`, of a workload."""

    def __init__(self, parameters: dict, pass_: str, device: torch.device) -> None:
        self.parameters, self.device = parameters, device
        self.workload = WORKLOADS[parameters["op"]](parameters, pass_, device)

    def require_supported(self, contender: str) -> None:
        """Raises Unsupported with the reason where it cannot run here."""
        op, dtype = self.parameters["op"], getattr(torch, self.parameters["dtype"])
        if op not in CEILINGS:
            require_supported(op, implementation_of(contender), self.device, dtype)

    def calls(self, contender: str) -> list[Callable[[], Output]]:
        """Launches on each set of inputs."""
        return self.workload.calls(implementation_of(contender))

    def counted(self, contender: str) -> Counted:
        """What it must do at least."""
        flops = self.workload.flops
        is_tensor = self.parameters["dtype"] in ("bfloat16", "float16")
        return Counted(flops, self.workload.bytes, flops if is_tensor else None)

    def launch_config(self, contender: str) -> str | None:
        """JSON of what a kernel of our own was launched with, or of what was chosen."""
        if contender != "auto":
            return self.workload.launch_config(implementation_of(contender))
        choice = auto.of_row(self.parameters, self.device)
        return choice.describe(self.workload.launch_config(choice.implementation))

    def precision(self, contender: str) -> str:
        """All compute in the problem's dtype."""
        return ""

    def check(self, contender: str, output: Output) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (measured, reference) of the output for the first set of inputs."""
        return self.workload.check(output)


def of(parameters: dict, pass_: str, device: torch.device) -> Undeclared:
    """Of a job; ValueError for an operator that does not exist."""
    if parameters["op"] not in WORKLOADS:
        raise ValueError(f"unknown op {parameters['op']!r}: choose from {', '.join(WORKLOADS)}")
    return Undeclared(parameters, pass_, device)
