"""Projections and their gradients against float64, within PyTorch's error."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tnp.gates.checks import Check
from tnp.gates.row_operators import GRADIENT_BUDGET, OUTPUT_BUDGET, Results, compared
from tnp.ops.projection import linear, project_qkv

BUDGETS = {
    "q": OUTPUT_BUDGET,
    "k": OUTPUT_BUDGET,
    "v": OUTPUT_BUDGET,
    "y": OUTPUT_BUDGET,
    "dx": GRADIENT_BUDGET,
    "dweight": GRADIENT_BUDGET,
}


@dataclass(frozen=True)
class Case:
    """[B, L, width]: keys of the first `n_keys` rows, queries from `first` on; None: `linear`."""

    batch: int
    length: int
    width: int
    n_keys: int | None
    first: int = 0
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        text = f"B={self.batch} L={self.length} D={self.width}"
        text += f" {str(self.dtype).removeprefix('torch.')}"
        return f"{text} linear" if self.n_keys is None else f"{text} {self.n_keys}, {self.first}"


GPU_CASES = (
    Case(64, 564, 512, None),
    Case(64, 564, 512, 64),
    Case(4, 11_000, 512, 10_000),
    Case(4, 11_000, 512, 10_000, 10_000),
    Case(1, 777, 512, 777),
    Case(3, 65, 512, 1, 64),
    Case(2, 333, 512, 100, 33, torch.float16),
    Case(2, 333, 512, 100, 33, torch.float32),
)
CPU_CASES = (
    Case(2, 9, 32, None),
    Case(2, 9, 32, 4),
    Case(2, 9, 32, 4, 4),
    Case(1, 9, 32, 9),
    Case(3, 9, 32, 1, 8, torch.float32),
)


def checks(device: torch.device) -> Iterator[Check]:
    for case in GPU_CASES if device.type == "cuda" else CPU_CASES:
        own = _run(case, device, case.dtype, "torch")
        exact = _run(case, device, torch.float64, "torch")
        yield from compared(
            case, lambda case=case: _run(case, device, case.dtype, "fused"), own, exact, BUDGETS
        )


def _run(case: Case, device: torch.device, dtype: torch.dtype, implementation: str) -> Results:
    """Outputs and gradients in `dtype`, of inputs rounded to the case's."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, device=device, generator=generator)
        return drawn.to(case.dtype)

    x = normal(case.batch, case.length, case.width).to(dtype).requires_grad_()
    outputs = 1 if case.n_keys is None else 3
    weight = normal(outputs * case.width, case.width) * case.width**-0.5
    weight = weight.to(torch.float64 if dtype == torch.float64 else torch.float32)
    weight.requires_grad_()
    if case.n_keys is None:
        results = {"y": linear(x, weight, implementation=implementation)}
    else:
        q, k, v = project_qkv(
            x, weight, 2, n_keys=case.n_keys, first=case.first, implementation=implementation
        )
        results = {"q": q, "k": k, "v": v}
    upstream = [normal(*y.shape).to(dtype) for y in results.values()]
    dx, dweight = torch.autograd.grad(list(results.values()), (x, weight), upstream)
    return {name: y.detach() for name, y in results.items()} | {"dx": dx, "dweight": dweight}
