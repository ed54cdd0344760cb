"""Measures what the device can reach through PyTorch: large matmuls, a copy and a read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tnp.dispatch.spec import Work
from tnp.experiment.failures import Unsupported

MATMUL_SIZE = 8192
COPY_BYTES = 2**30
READ_BYTES, READ_COLUMNS = 2**30, 4096
CHECKED_ROWS = 64


@dataclass(frozen=True)
class Ceiling:
    """Has the methods of `tnp.bench.contenders.Contenders`, so that it is timed like an operator.

    It has one call, whose inputs are larger than any cache.
    """

    call: Callable[[], torch.Tensor]
    least: Work
    pairs: Callable[[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]

    def require_supported(self, contender: str) -> None:
        pass  # `of` has already refused

    def calls(self, contender: str) -> list[Callable[[], torch.Tensor]]:
        return [self.call]

    def work(self, contender: str) -> Work:
        return self.least

    def launch_config(self, contender: str) -> None:
        return None

    def precision(self, contender: str) -> str:
        return ""

    def plan_ms(self, contender: str) -> None:
        return None

    def check(self, contender: str, output: torch.Tensor) -> list[tuple]:
        return self.pairs(output)


def of(parameters: dict, pass_: str, device: torch.device) -> Ceiling:
    """Returns the ceiling that a job names as its operator, one of `tnp.store.schemas.CEILINGS`.

    Raises Unsupported for a number format that the device does not multiply.
    """
    generator = torch.Generator(device).manual_seed(parameters["replicate"])
    making = {"ceiling_matmul": _matmul, "ceiling_copy": _copy, "ceiling_read": _read}
    return making[parameters["op"]](parameters, device, generator)


def _matmul(parameters: dict, device: torch.device, generator: torch.Generator) -> Ceiling:
    """Makes a product [n, n] @ [n, n] through PyTorch. n is the job's `n_q`, or 8192.

    The job's `dtype` is a dtype of PyTorch, or "tf32", "int8" or "e4m3".
    """
    n, kind = parameters.get("n_q") or MATMUL_SIZE, parameters["dtype"]
    dtype = {"tf32": torch.float32, "e4m3": torch.float8_e4m3fn}.get(kind) or getattr(torch, kind)
    on_cuda = device.type == "cuda"
    if kind == "e4m3" and on_cuda and torch.cuda.get_device_capability(device) < (8, 9):
        raise Unsupported("e4m3 is multiplied from compute capability 8.9 on")
    drawn = (torch.randn(n, n, device=device, generator=generator) for _ in "ab")
    # int8 takes whole numbers; few lie outside its range.
    a, b = ((x * 32).clamp(-127, 127).to(dtype) if kind == "int8" else x.to(dtype) for x in drawn)
    rows = slice(n - min(n, CHECKED_ROWS), n)
    size = 1.0 * n**2 * dtype.itemsize
    written = 1.0 * n**2 * {"int8": 4, "e4m3": 2}.get(kind, dtype.itemsize)
    return Ceiling(
        _product(kind, a, b),
        Work({kind: 2.0 * n**3}, 2 * size, written),
        lambda product: [(product[rows], a[rows].double() @ b.double())],
    )


def _product(kind: str, a: torch.Tensor, b: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Returns a function for a @ b. For 8 bits it lays b out by columns, as cuBLAS requires."""
    if kind == "int8":
        columns = b.t().contiguous().t()
        return lambda: torch._int_mm(a, columns)
    if kind == "e4m3":
        columns, one = b.t().contiguous().t(), torch.ones((), device=a.device)
        return lambda: torch._scaled_mm(
            a, columns, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    if kind == "tf32":  # sets the whole process, which measures nothing else
        torch.set_float32_matmul_precision("high")
    return lambda: a @ b


def _read(parameters: dict, device: torch.device, generator: torch.Generator) -> Ceiling:
    """Reads 1 GiB of bfloat16 and writes little: the sums of rows of 4,096 numbers."""
    rows = READ_BYTES // (2 * READ_COLUMNS)
    shape, dtype = (rows, READ_COLUMNS), torch.bfloat16
    source = torch.randn(shape, dtype=dtype, device=device, generator=generator)
    checked = slice(0, CHECKED_ROWS)
    return Ceiling(
        lambda: torch.sum(source, dim=1, dtype=torch.float32),
        Work({}, READ_BYTES, 4.0 * rows),
        lambda sums: [(sums[checked], source[checked].double().sum(1))],
    )


def _copy(parameters: dict, device: torch.device, generator: torch.Generator) -> Ceiling:
    """Reads 1 GiB and writes 1 GiB with a kernel.

    A CUDA graph runs `copy_` on a copy engine, which reached 2.7 TB/s on an H200. Kernels reach
    4.2.
    """
    source = torch.randn(COPY_BYTES // 4, device=device, generator=generator)
    target = torch.empty_like(source)
    return Ceiling(
        lambda: torch.neg(source, out=target),
        Work({}, COPY_BYTES, COPY_BYTES),
        lambda copied: [(copied, -source)],
    )
