"""RMSNorm, alone and behind the residual addition, against float64 and within PyTorch's error."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tnp.gates.checks import GRADIENT_BUDGET, OUTPUT_BUDGET, Check, require_ours
from tnp.gates.row_operators import Results, compared
from tnp.ops.rms_norm import add_rms_norm, rms_norm

BUDGETS = {
    "sum": OUTPUT_BUDGET,
    "normalized": OUTPUT_BUDGET,
    "dx": GRADIENT_BUDGET,
    "dupdate": GRADIENT_BUDGET,
    "dweight": GRADIENT_BUDGET,
}
EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """[B, L, D] from row `start` on; `uses`: the outputs a loss reads, "" without addition."""

    batch: int
    length: int
    width: int = 512
    dtype: torch.dtype = torch.bfloat16
    start: int = 0
    uses: str = "sum, normalized"
    magnitude: float = 1.0

    def __str__(self) -> str:
        text = f"B={self.batch} L={self.length} D={self.width} "
        text += str(self.dtype).removeprefix("torch.")
        text += f" from row {self.start}" if self.start else ""
        text += f" gradients of {self.uses}" if self.uses else " alone"
        return text if self.magnitude == 1 else f"{text} magnitude {self.magnitude:g}"


_USES = ("", "sum", "normalized", "sum, normalized")
GPU_CASES = (
    *(Case(64, 564, uses=uses) for uses in _USES),
    *(Case(4, 11_000, uses=uses) for uses in ("", "sum, normalized")),
    *(Case(4, 11_000, start=10_000, uses=uses) for uses in ("", "sum, normalized")),
    *(Case(1, length) for length in (1, 3, 4, 5, 33)),
    Case(1, 205_000),
    Case(3, 777, 1024),
    Case(3, 77, 384),
    Case(3, 77, 100, start=5),
    Case(2, 1000, dtype=torch.float16),
    Case(2, 1000, dtype=torch.float32, start=7),
    *(Case(2, 100, dtype=torch.float32, magnitude=magnitude) for magnitude in (1e-4, 1e4)),
)
CPU_CASES = (
    *(Case(2, 7, 48, start=2, uses=uses) for uses in _USES),
    Case(1, 1, 1, torch.float32),
    Case(3, 133, 48, torch.float32, start=1),
    Case(1, 33, 100, torch.float32),
    Case(1, 5, 64, torch.float16, uses=""),
    Case(1, 9, 64, torch.float32, magnitude=1e-4),
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


def draw(case: Case, device: torch.device) -> Results:
    """x and update, views from row `start` on, weight, and the gradients of both outputs."""
    generator = torch.Generator(device).manual_seed(0)

    def rows(length: int) -> torch.Tensor:
        shape = case.batch, length, case.width
        return torch.randn(shape, device=device, generator=generator)

    whole = case.start + case.length
    views = {name: rows(whole) * case.magnitude for name in ("x", "update")}
    inputs = {name: x.to(case.dtype)[:, case.start :] for name, x in views.items()}
    inputs["weight"] = 1 + 0.3 * torch.randn(case.width, device=device, generator=generator)
    for name in ("dsum", "dnormalized"):
        inputs[name] = rows(case.length).to(case.dtype)
    return inputs


def differentiated(case: Case, inputs: Results, implementation: str, eps: float = EPS) -> Results:
    """Outputs and gradients by name through the public functions and autograd."""
    names = ["x", "update", "weight"] if case.uses else ["x", "weight"]
    leaves = {name: inputs[name].detach().requires_grad_() for name in names}
    how = {"eps": eps, "implementation": implementation}
    if case.uses:
        total, normalized = add_rms_norm(*leaves.values(), **how)
        outputs = {"sum": total, "normalized": normalized}
        used = [name for name in outputs if name in case.uses.split(", ")]
    else:
        outputs = {"normalized": rms_norm(*leaves.values(), **how)}
        used = ["normalized"]
    if used == ["sum"]:
        del leaves["weight"]  # which has no gradient
    gradients = torch.autograd.grad(
        [outputs[name] for name in used],
        list(leaves.values()),
        [inputs[f"d{name}"].to(outputs[name].dtype) for name in used],
    )
    results = outputs | dict(zip((f"d{name}" for name in leaves), gradients, strict=True))
    return {name: x.detach() for name, x in results.items()}


def reference(case: Case, inputs: Results) -> Results:
    exact = {name: x.double() for name, x in inputs.items()}
    return differentiated(case, exact, "torch")
