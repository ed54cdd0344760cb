"""The first embedding layer against float64 and within PyTorch's error."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tnp.gates.checks import GRADIENT_BUDGET, OUTPUT_BUDGET, Check, require_ours
from tnp.gates.row_operators import Results, compared
from tnp.ops.embedding import embed_rows

BUDGETS = {"out": OUTPUT_BUDGET, "dweight": GRADIENT_BUDGET}


@dataclass(frozen=True)
class Case:
    """Points of context and targets, None for not given; `scale` of the weight."""

    batch: int
    n_context: int | None
    n_target: int | None
    d_x: int = 1
    d_y: int = 1
    d_model: int = 512
    dtype: torch.dtype = torch.bfloat16
    scale: float = 1.0

    def __str__(self) -> str:
        text = f"B={self.batch} M={self.n_context} N={self.n_target} d_x={self.d_x} "
        text += f"d_y={self.d_y} d_model={self.d_model} {str(self.dtype).removeprefix('torch.')}"
        return text if self.scale == 1 else f"{text} scale {self.scale:g}"


# Scale 50: pre-activations where e^−a overflows float32.
GPU_CASES = (
    Case(64, 64, 500),
    Case(4, 10_000, 1000),
    Case(4, 10_000, None),
    Case(3, None, 777),
    Case(2, 0, 33),
    Case(2, 33, 0),
    Case(3, 100, 77, d_x=2, d_y=3, d_model=384),
    Case(3, 100, 77, d_x=3, d_y=4, d_model=1000),
    Case(2, 100, 77, dtype=torch.float16),
    Case(2, 100, 77, dtype=torch.float32),
    Case(2, 100, 77, dtype=torch.float32, scale=50.0),
)
CPU_CASES = (
    Case(2, 5, 9, d_model=48),
    Case(3, 2, 3, d_x=2, d_y=3, d_model=40, dtype=torch.float32),
    Case(1, None, 7, d_model=33, dtype=torch.float32),
    Case(1, 7, None, d_model=33, dtype=torch.float16),
    Case(2, 0, 3, d_model=16),
    Case(2, 3, 0, d_model=16),
    Case(1, 9, 2, d_model=64, dtype=torch.float32, scale=50.0),
)


def checks(device: torch.device) -> Iterator[Check]:
    require_ours(device)
    for case in cases(device):
        inputs = draw(case, device)
        own = differentiated(case, inputs, "torch")
        run = partial(differentiated, case, inputs, "fused")
        yield from compared(case, run, own, reference(case, inputs), BUDGETS)


def cases(device: torch.device) -> tuple[Case, ...]:
    return GPU_CASES if device.type == "cuda" else CPU_CASES


def draw(case: Case, device: torch.device) -> dict[str, torch.Tensor | None]:
    """x and y, views of one tensor [B, M + N, d_x + d_y] as tasks may be; weight; dout."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    m, n = case.n_context or 0, case.n_target or 0
    points = normal(case.batch, m + n, case.d_x + case.d_y)
    width = case.d_x + case.d_y + 1
    return {
        "x_context": None if case.n_context is None else points[:, :m, : case.d_x],
        "y_context": None if case.n_context is None else points[:, :m, case.d_x :],
        "x_target": None if case.n_target is None else points[:, m:, : case.d_x],
        "weight": normal(case.d_model, width) * (case.scale / width**0.5),
        "dout": normal(case.batch, m + n, case.d_model).to(case.dtype),
    }


def differentiated(
    case: Case, inputs: dict[str, torch.Tensor | None], implementation: str
) -> Results:
    """The output and dweight through the public function and autograd."""
    points = [inputs[name] for name in ("x_context", "y_context", "x_target")]
    weight, dout = inputs["weight"].detach().requires_grad_(), inputs["dout"]
    dtype = torch.float64 if weight.dtype == torch.float64 else case.dtype
    out = embed_rows(*points, weight, dtype, implementation=implementation)
    (dweight,) = torch.autograd.grad(out, weight, dout.to(dtype))
    return {"out": out.detach(), "dweight": dweight}


def reference(case: Case, inputs: dict[str, torch.Tensor | None]) -> Results:
    exact = {name: None if x is None else x.double() for name, x in inputs.items()}
    return differentiated(case, exact, "torch")
