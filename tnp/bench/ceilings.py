"""The device's own limits: large matmuls, a memory copy and a read, through PyTorch."""

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
    """What is timed, as `tnp.bench.contenders.Contenders` says it of an operator."""

    call: Callable[[], torch.Tensor]
    least: Work
    pairs: Callable[[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]

    def require_supported(self, contender: str) -> None:
        """Of what the device cannot do there is no ceiling: `of` has refused it."""

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

    def plan_ms(self, contender: str) -> float | None:
        """Nothing is planned."""
        return None

    def check(
        self, contender: str, output: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs (measured, reference)."""
        return self.pairs(output)


def of(parameters: dict, pass_: str, device: torch.device) -> Ceiling:
    """Of a job whose operator is one of `tnp.store.schemas.CEILINGS`.

    Raises Unsupported for a number format that the device does not multiply in.
    """
    generator = torch.Generator(device).manual_seed(parameters["replicate"])
    making = {"ceiling_matmul": _matmul, "ceiling_copy": _copy, "ceiling_read": _read}
    return making[parameters["op"]](parameters, device, generator)


def _matmul(parameters: dict, device: torch.device, generator: torch.Generator) -> Ceiling:
    """[n, n] @ [n, n] through PyTorch, n = 8192 unless `n_q` says.

    The job's `dtype` is a number format: a dtype of PyTorch, or one of "tf32", "int8" and "e4m3".
    """
    n, kind = parameters.get("n_q") or MATMUL_SIZE, parameters["dtype"]
    dtype = {"tf32": torch.float32, "e4m3": torch.float8_e4m3fn}.get(kind) or getattr(torch, kind)
    if (
        kind == "e4m3"
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) < (8, 9)
    ):
        raise Unsupported("e4m3 is multiplied from compute capability 8.9 on")
    drawn = (torch.randn(n, n, device=device, generator=generator) for _ in "ab")
    # Whole numbers of 8 bits, of which few lie outside their range.
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
    """a @ b. In 8 bits the second operand lies column by column, as cuBLAS wants it."""
    if kind == "int8":
        columns = b.t().contiguous().t()
        return lambda: torch._int_mm(a, columns)
    if kind == "e4m3":
        columns, one = b.t().contiguous().t(), torch.ones((), device=a.device)
        return lambda: torch._scaled_mm(
            a, columns, one, one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    if kind == "tf32":  # a setting of the process, which measures nothing else
        torch.set_float32_matmul_precision("high")
    return lambda: a @ b


def _read(parameters: dict, device: torch.device, generator: torch.Generator) -> Ceiling:
    """1 GiB read and nearly nothing written: sums of rows of bfloat16, 4,096 numbers each."""
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
