"""Emulates the number format of the mixture heads in 8 bits (e4m3).

`composed_8bit` says what is rounded. The same is computed here in PyTorch, for the gate, as in
`tnp.ops.mlp.eight_bit`. Functions import torch when they run, because planning reads this module
without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from tnp.dispatch.spec import Case
from tnp.ops._shared import e4m3
from tnp.ops._shared.e4m3 import LEAST

if TYPE_CHECKING:
    from torch import Tensor

# Rounding to e4m3 changes a normal number by at most a sixteenth, so a product of two grows by at
# most the factor 1.13.
Z_FACTOR = 1.15
# |silu'(z)| < 1.1; the other factors of dz are float32.
DZ_FACTOR = 1.11


def held(case: Case, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns x and up in float64 as the product of the forward pass reads them."""
    return {"x": e4m3.blocks(inputs["x"].float()), "up": e4m3.rows(inputs["up"])}


def rounded(
    case: Case, inputs: Mapping[str, Tensor], upstream: Callable[[str, Tensor], Tensor]
) -> dict[str, Tensor]:
    """Returns results in float64, with z, dz and all operands of large products rounded."""
    import torch

    x, up, down = (inputs[name].detach() for name in ("x", "up", "down"))
    x8, up8, down = e4m3.blocks(x.float()), e4m3.rows(up), down.double()
    z = torch.einsum("td,kfd->tkf", x8, up8)
    out = torch.einsum("tkf,kof->tko", z * torch.sigmoid(z), down)
    dout = upstream("out", out.float()).double()
    of_x = e4m3.over_blocks(x.double().norm(dim=1, keepdim=True))
    z = e4m3.known(z, (Z_FACTOR * of_x * up.double().norm(dim=-1).max())[..., None])
    sigmoid = torch.sigmoid(z)
    slope = sigmoid * (1.0 + z * (1.0 - sigmoid))
    of_dout = e4m3.over_blocks(dout.norm(dim=-1).amax(1, keepdim=True))
    dz = torch.einsum("tko,kof->tkf", dout, down) * slope
    dz = e4m3.known(dz, (DZ_FACTOR * of_dout * down.norm(dim=1).max())[..., None])
    # The gradient of x sums over heads and hidden units: a column of up has one scale.
    by_columns = e4m3.scaled(up.float(), (0, 1), LEAST)
    return {
        "out": out,
        "dx": torch.einsum("tkf,kfd->td", dz, by_columns),
        "dup": torch.einsum("tkf,td->kfd", dz, x8),
        "ddown": torch.einsum("tko,tkf->kof", dout, z * sigmoid),
    }
