"""Defines `Check`, one comparison of a gate, and functions that measure errors."""

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Check:
    """Records one comparison: the measured `value`, and the `bound` allowed.

    A red check stops only jobs that use `implementation` of `op`. An empty `implementation` means
    all implementations, an empty `op` the gate's operator. With `larger_is_better` values above
    `bound` pass, as for cosines. `problem` is the JSON of the computed problem. `kernel` names the
    kernels, in checks of kernels.
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
        """Returns whether the check passed. NaN and infinity never pass."""
        if not math.isfinite(self.value):
            return False
        return self.value >= self.bound if self.larger_is_better else self.value <= self.bound


@dataclass(frozen=True)
class Finished:
    """Says that all checks of one part are made; a part is, for example, a case of an operator.

    `of` is the number of parts. `found` names what a resumed run must know of this part.
    """

    part: str
    of: int
    found: tuple[str, ...] = ()


@dataclass(frozen=True)
class LeftOut:
    """Says why a case is not checked here. `problem` is its problem's JSON."""

    case: str
    problem: str
    reason: str


class Unsupported(Exception):
    """Says why the device cannot run a gate, which is then recorded as unsupported."""


def distance(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Returns ‖out − reference‖ in float64; infinite if `out` is not finite."""
    out, reference = out.detach().double(), reference.detach().double()
    return (out - reference).norm().item() if torch.isfinite(out).all() else math.inf


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Returns ‖out − reference‖ / ‖reference‖ in float64; infinite if `out` is not finite."""
    return distance(out, reference) / max(reference.detach().double().norm().item(), 1e-300)


def max_abs_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Returns max |out − reference| in float64; infinite if `out` is not finite, 0 if empty."""
    out, reference = out.detach().double(), reference.detach().double()
    if not torch.isfinite(out).all():
        return math.inf
    return (out - reference).abs().max().item() if out.numel() else 0.0


def error_ratio(
    out: torch.Tensor, pytorch: torch.Tensor, reference: torch.Tensor, floor: float = 0.0
) -> float:
    """Returns the distance of `out` from `reference` (in float64), over `expected_error`."""
    expected = expected_error(out.dtype, pytorch, reference, floor)
    return math.inf if expected is None else distance(out, reference) / expected


def expected_error(
    dtype: torch.dtype, pytorch: torch.Tensor, reference: torch.Tensor, floor: float
) -> float | None:
    """Returns the distance from `reference` (in float64) that a result in `dtype` may well have.

    It is the largest of three: the distance of PyTorch's own result in the same dtype; `floor`, the
    expected loss of float32 in this problem (`tnp.ops._shared.rounding_error`); and about one
    rounding to the output's dtype. It is None if PyTorch's result is not finite.
    """
    own = distance(pytorch, reference)
    rounding = torch.finfo(dtype).eps / 4 * reference.detach().double().norm().item()
    return None if math.isinf(own) else max(own, floor, rounding, 1e-300)
