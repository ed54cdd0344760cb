"""Phase 6: our feed-forward layers against float64 and PyTorch's error; repeats, padding."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from tnp.gates import rounding
from tnp.gates.checks import (
    GRADIENT_BUDGET,
    OUTPUT_BUDGET,
    Check,
    error_ratio,
    max_abs_error,
    require_ours,
)
from tnp.gates.row_operators import Results, repeated, within
from tnp.ops.mlp import mlp

IMPLEMENTATIONS = ("fused", "single")
BUDGETS = {
    "y": OUTPUT_BUDGET,
    "dx": GRADIENT_BUDGET,
    "dup": GRADIENT_BUDGET,
    "ddown": GRADIENT_BUDGET,
}


def columns(start: int, wide: int | None) -> str:
    """What a case says of x's layout."""
    return "" if wide is None else f" x from column {start} of {wide}"


@dataclass(frozen=True)
class Case:
    """One comparison; of the d_ff hidden units `d_ff_real` are not zero padding."""

    n_rows: int
    d: int = 512
    d_ff: int = 1408
    d_ff_real: int = 1365
    dtype: torch.dtype = torch.bfloat16
    # x is columns `start` to `start + d` of a tensor this wide; None: it is contiguous.
    wide: int | None = None
    start: int = 0

    def __str__(self) -> str:
        sizes = f"T={self.n_rows} D={self.d} F={self.d_ff_real} stored {self.d_ff}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{sizes} {dtype}{columns(self.start, self.wide)}"


GPU_CASES = (
    *(Case(n_rows) for n_rows in (1, 63, 65, 564, 777, 11_000, 44_000)),
    Case(70_000),  # more than are saved: computed again, in chunks
    Case(777, d_ff=128, d_ff_real=100),  # one tile wide
    Case(777, wide=576),
    Case(777, wide=576, start=1),  # no row starts at a multiple of 16 bytes
    Case(777, dtype=torch.float16),
    Case(564, dtype=torch.float32),
    Case(300, d_ff=1365),  # what a kernel multiplies is padded, what comes back is not
    Case(300, d=64, d_ff=96, d_ff_real=96),
)
CPU_CASES = (
    Case(70, 32, 48, 42),
    Case(70, 32, 48, 42, torch.float16),
    Case(1, 32, 42, 42, torch.float32),
    Case(130, 64, 200, 170, torch.float32),
    Case(70, 32, 48, 42, wide=40),
    Case(70, 32, 48, 42, wide=40, start=1),
)


def cases(device: torch.device) -> tuple[Case, ...]:
    return GPU_CASES if device.type == "cuda" else CPU_CASES


def draw(case: Case, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """x, up and down, zero-padded as the model stores them, and dy."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    x = normal(case.n_rows, case.wide or case.d).to(case.dtype)
    x = x[:, case.start : case.start + case.d]
    dy = normal(case.n_rows, case.d).to(case.dtype)
    up = normal(case.d_ff, case.d) * case.d**-0.5
    down = normal(case.d, case.d_ff) * case.d_ff**-0.5
    up[case.d_ff_real :] = 0.0
    down[:, case.d_ff_real :] = 0.0
    return [t.requires_grad_() for t in (x, up, down)], dy


def run(
    inputs: list[torch.Tensor], dy: torch.Tensor, implementation: str
) -> tuple[torch.Tensor, ...]:
    """y, dx, dup, ddown through the public function and autograd."""
    y = mlp(*inputs, implementation=implementation)
    return (y.detach(), *torch.autograd.grad(y, inputs, dy))


def reference(inputs: list[torch.Tensor], dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """y, dx, dup, ddown in float64."""
    return run([t.detach().double().requires_grad_() for t in inputs], dy.double(), "torch")


def floors(inputs: list[torch.Tensor], dy: torch.Tensor) -> rounding.Floors:
    """What float32 must be expected to lose in y, dx, dup and ddown.

    Empty for 16 bits, whose own rounding PyTorch cannot escape either.
    """
    x, up, down = inputs
    if x.dtype != torch.float32:
        return {}
    found = rounding.silu_layers(x, up[None], down[None], dy[:, None])
    return dict(zip(BUDGETS, found, strict=True))


def named(results: tuple[torch.Tensor, ...]) -> Results:
    return dict(zip(BUDGETS, results, strict=True))


def without_padding(case: Case, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """Of one layer or of several, as `padding_check`."""
    x, up, down = (t.detach() for t in inputs)
    real = x, up[..., : case.d_ff_real, :], down[..., : case.d_ff_real]
    return [t.clone().requires_grad_() for t in real]


def padding_check(case: Case, results: tuple[torch.Tensor, ...], name: str) -> Check:
    """Zero padding gets no gradient."""
    *_, dup, ddown = results
    real = case.d_ff_real
    gradient = max(dup[..., real:, :].abs().max().item(), ddown[..., real:].abs().max().item())
    return Check(f"gradient of the padding, {case}", "max_abs_error", gradient, 0.0, name)


def checks(device: torch.device) -> Iterator[Check]:
    require_ours(device)
    for case in cases(device):
        inputs, dy = draw(case, device)
        own, exact = run(inputs, dy, "torch"), reference(inputs, dy)
        expected = floors(inputs, dy)
        for name in IMPLEMENTATIONS:
            again = partial(run, inputs, dy, name)
            first = again()
            yield from within(case, named(first), named(own), named(exact), BUDGETS, name, expected)
            yield repeated(case, lambda again=again: named(again()), named(first), name)
            if case.d_ff_real < case.d_ff:
                yield from _padding(case, inputs, dy, name, first, exact)


def _padding(case, inputs, dy, name, stored, exact) -> Iterator[Check]:
    """Zero padding gets no gradient, and does not change what the real units give.

    Bit by bit in one kernel's own sum over the hidden units; cuBLAS may choose another order for
    another width, so there the result without padding keeps to the budget of the one with it.
    """
    yield padding_check(case, stored, name)
    y = run(without_padding(case, inputs), dy, name)[0]
    if name == "single":
        yield Check(f"y without the padding is the same, {case}", "max_abs_difference",
                    max_abs_error(y, stored[0]), 0.0, name)  # fmt: skip
    else:
        yield Check(f"y without the padding over y with it, {case}", "error_ratio",
                    error_ratio(y, stored[0], exact[0], floors(inputs, dy).get("y", 0.0)),
                    BUDGETS["y"], name)  # fmt: skip
