"""Emulates the number format of the feed-forward layer in 8 bits (e4m3).

`composed_8bit` says what is rounded. The same is computed here in PyTorch, for the gate. `held`
returns the rounded operands of the forward pass in float64. `rounded` returns the results in
float64, with all roundings to 8 bits, and silu'(z) rounded to 16 bits. The codes of `hopper_slope`
are nearly as fine, and left out. Functions import torch when they run, because planning reads this
module without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tnp.dispatch.spec import Case
from tnp.ops._shared import e4m3

if TYPE_CHECKING:
    from torch import Tensor

# |silu(z)| ≤ |z| and |silu'(z)| < 1.1. Rounding to e4m3 changes a normal number by at most a
# sixteenth, so a product of two grows by at most the factor 1.13. Smaller numbers add too little.
H_FACTOR = 1.15
DZ_FACTOR = 1.1 * H_FACTOR


# -------------------------------------------------------------------------------- the number format


def _known(product: Tensor, a: Tensor, w: Tensor, factor: float) -> Tensor:
    """Returns the product [T, N], rounded in units known from the blocks of a and from w."""
    norms = e4m3.over_blocks(a.double().norm(dim=1, keepdim=True))
    return e4m3.known(product, factor * norms * w.double().norm(dim=1).max())


def held(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns x, up and down in float64 as products of the forward pass read them."""
    x, up, down = (inputs[name] for name in ("x", "up", "down"))
    return {"x": e4m3.blocks(x.float()), "up": e4m3.rows(up), "down": e4m3.rows(down)}


def rounded(
    case: Case, inputs: Mapping[str, Tensor], upstream: Callable[[str, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Returns results in float64, with all operands of products rounded to 8 bits."""
    import torch

    x, up, down = (inputs[name].detach() for name in ("x", "up", "down"))
    x8 = e4m3.blocks(x.float())
    z = x8 @ e4m3.rows(up).T
    sigmoid = torch.sigmoid(z)
    slope = (sigmoid * (1.0 + z * (1.0 - sigmoid))).to(x.dtype).double()
    h8 = _known(z * sigmoid, x, up, H_FACTOR)
    y = h8 @ e4m3.rows(down).T
    dy = upstream("y", y.to(x.dtype))
    dy8 = e4m3.blocks(dy.float())
    dz8 = _known(dy8 @ e4m3.rows(down.T).T * slope, dy, down.T, DZ_FACTOR)
    return {"y": y, "dx": dz8 @ e4m3.rows(up.T).T, "dup": dz8.T @ x8, "ddown": dy8.T @ h8}
