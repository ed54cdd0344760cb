"""The device's own limits: a large matmul and a memory copy, through PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tnp.contract import Work

MATMUL_SIZE = 8192
COPY_BYTES = 2**30
CHECKED_ROWS = 64


@dataclass(frozen=True)
class Ceiling:
    """What is timed, as `tnp.bench.contenders.Contenders` says it of an operator."""

    call: Callable[[], torch.Tensor]
    least: Work
    pairs: Callable[[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]

    def require_supported(self, contender: str) -> None:
        """Every device has limits."""

    def calls(self, contender: str) -> list[Callable[[], torch.Tensor]]:
        """One, on one set of inputs that no cache holds."""
        return [self.call]

    def work(self, contender: str) -> Work:
        """Operations and bytes."""
        return self.least

    def launch_config(self, contender: str) -> str | None:
        """PyTorch's own."""
        return None

    def precision(self, contender: str) -> str:
        """The dtype's own."""
        return ""

    def check(
        self, contender: str, output: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (measured, reference)."""
        return self.pairs(output)


def of(parameters: dict, pass_: str, device: torch.device) -> Ceiling:
    """Of a job whose operator is one of `tnp.schemas.CEILINGS`."""
    generator = torch.Generator(device).manual_seed(parameters["replicate"])
    making = {"ceiling_matmul": _matmul, "ceiling_copy": _copy}
    return making[parameters["op"]](parameters, device, generator)


def _matmul(parameters: dict, device: torch.device, generator: torch.Generator) -> Ceiling:
    """[n, n] @ [n, n] through PyTorch, n = 8192 unless `n_q` says."""
    n = parameters.get("n_q") or MATMUL_SIZE
    dtype = getattr(torch, parameters["dtype"])
    a, b = (torch.randn(n, n, dtype=dtype, device=device, generator=generator) for _ in "ab")
    rows = slice(n - min(n, CHECKED_ROWS), n)
    size = 1.0 * n**2 * dtype.itemsize
    return Ceiling(
        lambda: a @ b,
        Work({parameters["dtype"]: 2.0 * n**3}, 2 * size, size),
        lambda product: [(product[rows], a[rows].double() @ b.double())],
    )


def _copy(parameters: dict, device: torch.device, generator: torch.Generator) -> Ceiling:
    """1 GiB read and as much written, by a kernel.

    Not by `copy_`: in a CUDA graph that is a copy engine's work, which reached 2.7 TB/s on an H200
    where kernels move 4.2.
    """
    source = torch.randn(COPY_BYTES // 4, device=device, generator=generator)
    target = torch.empty_like(source)
    return Ceiling(
        lambda: torch.neg(source, out=target),
        Work({}, COPY_BYTES, COPY_BYTES),
        lambda copied: [(copied, -source)],
    )
