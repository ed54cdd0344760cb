"""Emulates the number format of the feed-forward layer in 8 bits (e4m3).

`composed_8bit` says what is rounded. The same is computed here in PyTorch, for the gate. `held`
returns the rounded operands of the forward pass in float64. `rounded` returns the results in
float64, with all roundings to 8 bits, and of h, silu'(z) and dz to 16 bits. Functions import torch
when they run, because planning reads this module without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tnp.dispatch.spec import Case, Work
from tnp.ops._shared import e4m3
from tnp.ops._shared.e4m3 import LEAST

if TYPE_CHECKING:
    from torch import Tensor

# |silu(z)| ≤ |z| and |silu'(z)| < 1.1. Rounding to e4m3 changes no number by more than a sixteenth,
# so a product of two grows by at most the factor 1.13.
H_FACTOR = 1.15
DZ_FACTOR = 1.1 * H_FACTOR


def work(least: Work, pass_: str) -> Work:
    """Counts the work of the layer in e4m3, except for the weights' gradients."""
    ((dtype, flops),) = least.flops.items()
    share = {"forward": 1.0, "backward": 0.5}[pass_]
    split = {"e4m3": share * flops, dtype: (1.0 - share) * flops}
    return Work({name: n for name, n in split.items() if n}, least.read, least.written)


# -------------------------------------------------------------------------------- the number format


def _rows(x: Tensor) -> Tensor:
    """Returns [R, C], rounded with a scale for each row, in float64."""
    return e4m3.scaled(x.float(), (-1,), LEAST)


def _known(product: Tensor, a: Tensor, w: Tensor, factor: float) -> Tensor:
    """Returns the product [T, N], rounded in units known from rows of a and w."""
    bound = factor * a.double().norm(dim=1, keepdim=True) * w.double().norm(dim=1).max()
    return e4m3.in_units(product, e4m3.exponents(bound.float(), LEAST))


def held(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns x, up and down in float64 as products of the forward pass read them."""
    return {name: _rows(x) for name, x in inputs.items()}


def rounded(
    case: Case, inputs: Mapping[str, Tensor], upstream: Callable[[str, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Returns results in float64, with all operands of products of rows rounded to 8 bits."""
    import torch

    x, up, down = (inputs[name].detach() for name in ("x", "up", "down"))

    def in_16(exact: Tensor) -> Tensor:
        return exact.to(x.dtype).double()

    z = _rows(x) @ _rows(up).T
    sigmoid = torch.sigmoid(z)
    h, slope = z * sigmoid, sigmoid * (1.0 + z * (1.0 - sigmoid))
    y = _known(h, x, up, H_FACTOR) @ _rows(down).T
    dy = upstream("y", y.to(x.dtype))
    dz = _rows(dy) @ _rows(down.T).T * in_16(slope)
    return {
        "y": y,
        "dx": _known(dz, dy, down.T, DZ_FACTOR) @ _rows(up.T).T,
        "dup": in_16(dz).T @ x.double(),
        "ddown": dy.double().T @ in_16(h),
    }
