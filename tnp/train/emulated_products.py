"""Rounds the operands of PyTorch's products to 8 bits: controls of training in 8 bits.

A control trains with PyTorch's own operators. Inside `emulated`, each product of 16-bit matrices
takes rounded operands, forward and backward. Attention stays in 16 bits, as in variant `fp8`;
projections are rounded, unlike there. With a scale, a power of two for each block of 128 rows
brings the block's largest value into the format's range. Operators of ours are not emulated.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

ROWS = 128  # of a block
# Name → format, and whether operands are scaled (`tnp.store.schemas.EMULATED` lists the names).
FORMATS = {
    "e4m3": (torch.float8_e4m3fn, True),
    "e5m2": (torch.float8_e5m2, True),
    "e4m3_unscaled": (torch.float8_e4m3fn, False),
}
# Product → {operand: its dimension that is not summed over}.
PRODUCTS = {"aten::mm": {0: 0, 1: 1}, "aten::addmm": {1: 0, 2: 1}, "aten::bmm": {0: 1, 1: 2}}


@contextmanager
def emulated(name: str) -> Iterator[Callable[[Callable], Callable]]:
    """Emulates the format `name` of `FORMATS`; "" emulates nothing.

    It yields a decorator that switches rounding off in a function, for predictions in 16 bits.
    """
    if not name:
        yield lambda function: function
        return
    with _Rounding(*FORMATS[name]) as rounding:
        yield rounding.without


class _Rounding(TorchDispatchMode):
    def __init__(self, format_: torch.dtype, scaled: bool) -> None:
        super().__init__()
        self.format, self.scaled, self.paused = format_, scaled, False

    def without(self, function: Callable) -> Callable:
        @wraps(function)
        def unrounded(*args, **kwargs):
            self.paused = True
            try:
                return function(*args, **kwargs)
            finally:
                self.paused = False

        return unrounded

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        args = list(args)
        operands = {} if self.paused else PRODUCTS.get(func.name().partition(".")[0], {})
        for at, dim in operands.items():
            if args[at].dtype in (torch.bfloat16, torch.float16):
                args[at] = rounded(args[at], dim, self.format, self.scaled)
        return func(*args, **(kwargs or {}))


def rounded(x: torch.Tensor, dim: int, format_: torch.dtype, scaled: bool) -> torch.Tensor:
    """Returns x rounded to an 8-bit format, with a scale for each block of rows of `dim` or none.

    Without a scale, values beyond the format's range become its largest. With a scale, a NaN or an
    infinity makes its whole block NaN.
    """
    most = torch.finfo(format_).max
    moved = x.movedim(dim, 0).float()
    rows = moved.flatten(1)
    scale = torch.ones(len(rows), 1, device=x.device)
    if scaled:
        blocks = F.pad(rows, (0, 0, 0, -len(rows) % ROWS)).reshape(-1, ROWS * rows.shape[1])
        largest = blocks.abs().amax(1, keepdim=True).clamp(min=1e-30)
        scale = torch.exp2(torch.floor(torch.log2(most / largest)))
        scale = scale.repeat_interleave(ROWS, 0)[: len(rows)]
    codes = (rows * scale).clamp(-most, most).to(format_)
    return (codes.float() / scale).view_as(moved).movedim(0, dim).to(x.dtype)
