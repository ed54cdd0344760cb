"""The loss and its gradients against float64, to the extremes that training can reach."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tnp.gates.checks import GRADIENT_BUDGET, Check, relative_error, require_ours
from tnp.gates.row_operators import Results, compared
from tnp.ops.mixture_nll import mixture_nll

# One number, in which errors of single targets cancel: PyTorch's own can be 0 by chance. It is off
# by some roundings of a float32.
LOSS_ERROR = 1e-6
GRADIENTS = {"dparameters": GRADIENT_BUDGET, "dy": GRADIENT_BUDGET}


@dataclass(frozen=True)
class Case:
    """Sizes; the factor of the logits, the scale of every sigma, and the floor under it."""

    batch: int
    n_target: int
    n_components: int = 10
    d_y: int = 1
    dtype: torch.dtype = torch.bfloat16
    logits: float = 1.0
    sigma: float = 1.0
    sigma_min: float = 0.0

    def __str__(self) -> str:
        text = f"B={self.batch} N={self.n_target} K={self.n_components} d_y={self.d_y} "
        text += str(self.dtype).removeprefix("torch.")
        text += f" logits x {self.logits:g}" if self.logits != 1 else ""
        text += f" sigma x {self.sigma:g}" if self.sigma != 1 else ""
        return text + (f" floor {self.sigma_min:g}" if self.sigma_min else "")


EXTREMES = tuple(
    Case(3, 67, dtype=torch.float32, logits=logits, sigma=sigma, sigma_min=sigma_min)
    for logits in (1.0, 1e2, 1e4)
    for sigma in (1e-6, 1.0, 1e6)
    for sigma_min in (0.0, 1e-3)
)
GPU_CASES = (
    Case(64, 500),
    Case(4, 1000),
    Case(4, 10_000, sigma_min=1e-3),
    Case(1, 1),
    *(Case(1, n, dtype=torch.float32) for n in (31, 32, 33, 205_000)),
    Case(3, 77, n_components=1, dtype=torch.float32),
    Case(3, 77, n_components=64, d_y=4, dtype=torch.float32, sigma_min=0.1),
    Case(3, 77, n_components=33, d_y=2),
    Case(2, 100, n_components=3, d_y=3, dtype=torch.float16),
    *EXTREMES,
)
CPU_CASES = (
    Case(2, 67),
    Case(1, 1, n_components=1, dtype=torch.float32),
    Case(1, 7, n_components=64, d_y=4, dtype=torch.float32, sigma_min=0.1),
    Case(2, 17, n_components=3, d_y=2, dtype=torch.float16),
    *EXTREMES,
)


def checks(device: torch.device) -> Iterator[Check]:
    require_ours(device)
    for case in cases(device):
        inputs = draw(case, device)
        own, exact = (
            differentiated(case, x, "torch")
            for x in (inputs, {name: x.double() for name, x in inputs.items()})
        )
        run = partial(differentiated, case, inputs, "fused")
        yield Check(f"loss against float64, {case}", "relative_error",
                    relative_error(run()["loss"], exact["loss"]), LOSS_ERROR, "fused")  # fmt: skip
        yield from compared(case, run, own, exact, GRADIENTS)


def cases(device: torch.device) -> tuple[Case, ...]:
    return GPU_CASES if device.type == "cuda" else CPU_CASES


def draw(case: Case, device: torch.device) -> Results:
    """parameters and y, a view of every second target."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    shape = case.batch, case.n_target, case.n_components, 1 + 2 * case.d_y
    parameters = normal(*shape)
    parameters[..., 0] *= case.logits
    parameters[..., 1 + case.d_y :] += math.log(case.sigma)
    y = normal(case.batch, 2 * case.n_target, case.d_y)[:, ::2]
    return {"parameters": parameters.to(case.dtype), "y": y}


def differentiated(case: Case, inputs: Results, implementation: str) -> Results:
    """The loss and the gradients of 0.7 times it, through the public function and autograd."""
    leaves = [inputs[name].detach().requires_grad_() for name in ("parameters", "y")]
    loss = mixture_nll(*leaves, case.sigma_min, implementation=implementation)
    dparameters, dy = torch.autograd.grad(0.7 * loss, leaves)
    return {"loss": loss.detach(), "dparameters": dparameters, "dy": dy}
