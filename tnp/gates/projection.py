"""Projections and their gradients against float64, within their error budgets."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tnp.gates import rounding
from tnp.gates.checks import GRADIENT_BUDGET, OUTPUT_BUDGET, Check
from tnp.gates.row_operators import Results, compared
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
    """[B, L, width]: keys of the first `n_k` rows, queries from `first` on; None: `linear`."""

    batch: int
    length: int
    width: int
    n_k: int | None
    first: int = 0
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        text = f"B={self.batch} L={self.length} D={self.width}"
        text += f" {str(self.dtype).removeprefix('torch.')}"
        return f"{text} linear" if self.n_k is None else f"{text} {self.n_k}, {self.first}"


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
        own = run(case, device, case.dtype, "torch")
        exact = run(case, device, torch.float64, "torch")
        ours = partial(run, case, device, case.dtype, "fused")
        yield from compared(case, ours, own, exact, BUDGETS, floors=floors(case, device))


def _rows(case: Case) -> dict[str, slice]:
    """The rows of x that each output is of."""
    if case.n_k is None:
        return {"y": slice(None)}
    keys = slice(0, case.n_k)
    return {"q": slice(case.first, None), "k": keys, "v": keys}


def draw(case: Case, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, Results]:
    """x [B, L, D], weight, gradients of outputs [B, rows, D], all rounded to the case's dtype."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, device=device, generator=generator)
        return drawn.to(case.dtype)

    x = normal(case.batch, case.length, case.width)
    weight = normal(len(_rows(case)) * case.width, case.width) * case.width**-0.5
    upstream = {name: normal(*x[:, rows].shape) for name, rows in _rows(case).items()}
    return x, weight.float(), upstream


def run(case: Case, device: torch.device, dtype: torch.dtype, implementation: str) -> Results:
    """Outputs [B, rows, D] and gradients in `dtype`, of inputs rounded to the case's."""
    x, weight, upstream = draw(case, device)
    x, weight = x.to(dtype), weight.double() if dtype == torch.float64 else weight
    leaves = x.requires_grad_(), weight.requires_grad_()
    if case.n_k is None:
        outputs = [linear(*leaves, implementation=implementation)]
    else:
        rows = {"n_k": case.n_k, "first": case.first}
        qkv = project_qkv(*leaves, 2, **rows, implementation=implementation)
        outputs = [y.transpose(1, 2).flatten(2) for y in qkv]
    dx, dweight = torch.autograd.grad(outputs, leaves, [dy.to(dtype) for dy in upstream.values()])
    results = {name: y.detach() for name, y in zip(upstream, outputs, strict=True)}
    return results | {"dx": dx, "dweight": dweight}


def floors(case: Case, device: torch.device) -> rounding.Floors:
    """What float32 must be expected to lose in each result; empty for 16 bits."""
    if case.dtype != torch.float32:
        return {}
    x, weight, upstream = draw(case, device)
    x, weight = x.double(), weight.double()
    dy = x.new_zeros(*x.shape[:2], len(weight))  # rows that nobody reads have no gradient
    variances = {}
    columns = dy.chunk(len(upstream), dim=-1)
    for part, (name, rows), out in zip(
        weight.chunk(len(upstream)), _rows(case).items(), columns, strict=True
    ):
        variances[name] = rounding.of_product(x[:, rows], part.mT)
        out[:, rows] = upstream[name]
    variances["dx"] = rounding.of_product(dy, weight)
    variances["dweight"] = rounding.of_product(dy.flatten(0, 1).mT, x.flatten(0, 1))
    return {name: variance.sum().sqrt().item() for name, variance in variances.items()}
