"""What a correctness gate is made of: one `Check` a comparison, and the error budgets they use."""

import math
from dataclasses import dataclass

import torch

from tnp.ops import registry


@dataclass(frozen=True)
class Check:
    """One comparison: `value` measured, `bound` allowed.

    `implementation` names the one implementation the check is about ("" where it is about all), of
    operator `op` ("" for the gate's): a red check stops only what uses it. `larger_is_better` turns
    the comparison round (cosines).
    """

    check: str
    metric: str
    value: float
    bound: float
    implementation: str = ""
    larger_is_better: bool = False
    op: str = ""

    @property
    def passed(self) -> bool:
        """NaN and infinity never pass."""
        if not math.isfinite(self.value):
            return False
        return self.value >= self.bound if self.larger_is_better else self.value <= self.bound


class Unsupported(Exception):
    """Raised by a gate's `checks` where the device cannot run it; recorded with the reason."""


def require_ours(device: torch.device) -> None:
    """Raises Unsupported with the reason where our attention kernels cannot run."""
    try:
        registry.check("attention", "separate", device, torch.bfloat16)
    except RuntimeError as error:
        raise Unsupported(str(error)) from error


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in float64; infinite where `out` is not finite."""
    out, reference = out.detach().double(), reference.detach().double()
    if not torch.isfinite(out).all():
        return math.inf
    return ((out - reference).norm() / reference.norm().clamp_min(1e-300)).item()


def max_abs_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """max |out − reference| in float64; infinite where `out` is not finite, 0 for empty tensors."""
    out, reference = out.detach().double(), reference.detach().double()
    if not torch.isfinite(out).all():
        return math.inf
    return (out - reference).abs().max().item() if out.numel() else 0.0


def error_ratio(out: torch.Tensor, pytorch: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error of `out` over that of PyTorch's own result in the same dtype.

    `reference` is computed in float64. PyTorch's error is floored at about one rounding of the
    output's dtype, so that a result PyTorch happens to hit exactly does not make every other one
    infinite. Where PyTorch's is not finite, nothing can be said, and the ratio is infinite.
    """
    own = relative_error(pytorch, reference)
    if math.isinf(own):
        return math.inf
    return relative_error(out, reference) / max(own, torch.finfo(out.dtype).eps / 4)
