"""What a correctness gate is made of: one `Check` a comparison, and the distances it measures."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Check:
    """One comparison: `value` measured, `bound` allowed.

    `implementation` names the one implementation the check is about ("" where it is about all), of
    operator `op` ("" for the gate's): a red check stops only what uses it. `larger_is_better` turns
    the comparison round (cosines). `problem` is the JSON of what was computed and `kernel` the
    kernels that computed it, where the check is of those.
    """

    check: str
    metric: str
    value: float
    bound: float
    implementation: str = ""
    larger_is_better: bool = False
    op: str = ""
    problem: str = ""
    kernel: str = ""

    @property
    def passed(self) -> bool:
        """NaN and infinity never pass."""
        if not math.isfinite(self.value):
            return False
        return self.value >= self.bound if self.larger_is_better else self.value <= self.bound


@dataclass(frozen=True)
class Finished:
    """Says that all checks of a part are made, such as a case of an operator: one of `of` parts.

    `found` names what else the part has shown, for the run that goes on after it.
    """

    part: str
    of: int
    found: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeftOut:
    """Says that a case, whose problem's JSON is `problem`, is not checked here, and why."""

    case: str
    problem: str
    reason: str


class Unsupported(Exception):
    """Raised by a gate's `checks` where the device cannot run it; recorded with the reason."""


def distance(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ in float64; infinite where `out` is not finite."""
    out, reference = out.detach().double(), reference.detach().double()
    return (out - reference).norm().item() if torch.isfinite(out).all() else math.inf


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in float64; infinite where `out` is not finite."""
    return distance(out, reference) / max(reference.detach().double().norm().item(), 1e-300)


def max_abs_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """max |out − reference| in float64; infinite where `out` is not finite, 0 for empty tensors."""
    out, reference = out.detach().double(), reference.detach().double()
    if not torch.isfinite(out).all():
        return math.inf
    return (out - reference).abs().max().item() if out.numel() else 0.0


def error_ratio(
    out: torch.Tensor, pytorch: torch.Tensor, reference: torch.Tensor, floor: float = 0.0
) -> float:
    """How far `out` is from `reference`, over how far it must be expected to be.

    `reference` is computed in float64. Expected is the largest of three: the distance of PyTorch's
    own result in the same dtype; `floor`, what float32 must be expected to lose in this problem
    (`tnp.ops._shared.rounding_error`); about one rounding to the output's dtype. Where PyTorch's
    result is not finite, nothing can be said, and the ratio is infinite.
    """
    own = distance(pytorch, reference)
    if math.isinf(own):
        return math.inf
    rounding = torch.finfo(out.dtype).eps / 4 * reference.detach().double().norm().item()
    return distance(out, reference) / max(own, floor, rounding, 1e-300)
