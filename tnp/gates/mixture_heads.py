"""Phase 7: mixture heads against float64 and PyTorch's error; ours repeat, padding exact."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tnp.gates import rounding
from tnp.gates.checks import GRADIENT_BUDGET, OUTPUT_BUDGET, Check, error_ratio, require_ours
from tnp.gates.mlp import columns, padding_check, without_padding
from tnp.gates.row_operators import Results, repeated, within
from tnp.ops import registry
from tnp.ops.mixture_heads import GROUPED_MULTIPLE, mixture_heads

OURS = "fused"
PEERS = ("loop", "bmm", "grouped_mm")
BUDGETS = {
    "out": OUTPUT_BUDGET,
    "dx": GRADIENT_BUDGET,
    "dup": GRADIENT_BUDGET,
    "ddown": GRADIENT_BUDGET,
}


@dataclass(frozen=True)
class Case:
    """One comparison; of the d_ff hidden units `d_ff_real` are not zero padding."""

    n_rows: int
    d: int = 512
    d_ff: int = 1408
    d_ff_real: int = 1365
    n_heads: int = 10
    n_out: int = 3
    dtype: torch.dtype = torch.bfloat16
    # x is columns `start` to `start + d` of a tensor this wide; None: it is contiguous.
    wide: int | None = None
    start: int = 0

    def __str__(self) -> str:
        sizes = f"T={self.n_rows} D={self.d} F={self.d_ff_real} stored {self.d_ff}"
        heads = f"K={self.n_heads} O={self.n_out}"
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{sizes} {heads} {dtype}{columns(self.start, self.wide)}"


GPU_CASES = (
    *(Case(n_rows) for n_rows in (1, 63, 65, 564, 777, 11_000, 44_000)),
    *(Case(n_rows, n_heads=3) for n_rows in (777, 11_000)),
    Case(777, d_ff=128, d_ff_real=100),  # one tile wide
    Case(777, wide=576),
    Case(777, wide=576, start=1),  # no row starts at a multiple of 16 bytes
    Case(777, dtype=torch.float16),
    Case(564, dtype=torch.float32),
    Case(300, d_ff=1365),  # what a kernel multiplies is padded, what comes back is not
    Case(4097, d=64, d_ff=96, d_ff_real=96, n_heads=3, n_out=16),
)
CPU_CASES = (
    Case(70, 32, 48, 42, 3),
    Case(70, 32, 48, 42, 3, dtype=torch.float16),
    Case(1, 32, 42, 42, 2, dtype=torch.float32),
    Case(130, 42, 200, 170, 2, 16, torch.float32),
    Case(70, 32, 48, 42, 3, wide=40),
    Case(70, 32, 48, 42, 3, wide=40, start=1),
)


def cases(device: torch.device) -> tuple[Case, ...]:
    return GPU_CASES if device.type == "cuda" else CPU_CASES


def draw(case: Case, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """x, up and down, zero-padded as the model stores them, and dout in float32."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    x = normal(case.n_rows, case.wide or case.d).to(case.dtype)
    x = x[:, case.start : case.start + case.d]
    dout = normal(case.n_rows, case.n_heads, case.n_out)
    up = normal(case.n_heads, case.d_ff, case.d) * case.d**-0.5
    down = normal(case.n_heads, case.n_out, case.d_ff) * case.d_ff**-0.5
    up[:, case.d_ff_real :] = 0.0
    down[..., case.d_ff_real :] = 0.0
    return [t.requires_grad_() for t in (x, up, down)], dout


def run(
    inputs: list[torch.Tensor], dout: torch.Tensor, implementation: str
) -> tuple[torch.Tensor, ...]:
    """out, dx, dup, ddown through the public function and autograd."""
    out = mixture_heads(*inputs, implementation=implementation)
    return (out.detach(), *torch.autograd.grad(out, inputs, dout.to(out.dtype)))


def reference(
    inputs: list[torch.Tensor], dout: torch.Tensor, max_rows: int = 4096
) -> tuple[torch.Tensor, ...]:
    """out, dx, dup, ddown in float64, some rows at a time to bound the memory."""
    x, up, down = (t.detach().double() for t in inputs)
    outs, dxs, dup, ddown = [], [], torch.zeros_like(up), torch.zeros_like(down)
    for rows, dout_rows in zip(x.split(max_rows), dout.split(max_rows), strict=True):
        part = [t.requires_grad_() for t in (rows.clone(), up.detach(), down.detach())]
        out, dx, dup_part, ddown_part = run(part, dout_rows, "torch")
        outs.append(out)
        dxs.append(dx)
        dup += dup_part
        ddown += ddown_part
    return torch.cat(outs), torch.cat(dxs), dup, ddown


def floors(inputs: list[torch.Tensor], dout: torch.Tensor) -> rounding.Floors:
    """What float32 must be expected to lose in out, dx, dup and ddown; empty for 16 bits."""
    if inputs[0].dtype != torch.float32:
        return {}
    return dict(zip(BUDGETS, rounding.silu_layers(*inputs, dout), strict=True))


def named(results: tuple[torch.Tensor, ...]) -> Results:
    return dict(zip(BUDGETS, results, strict=True))


def peers(case: Case, device: torch.device) -> Iterator[str]:
    """PyTorch's other forms that can compute the case."""
    for name in PEERS:
        sizes = case.d, case.d_ff, case.wide or case.d, case.start
        aligned = all(size % GROUPED_MULTIPLE == 0 for size in sizes)
        refused = registry.get("mixture_heads", name).unsupported(device, case.dtype)
        if refused is None and (aligned or name != "grouped_mm"):
            yield name


def checks(device: torch.device) -> Iterator[Check]:
    require_ours(device)
    for case in cases(device):
        inputs, dout = draw(case, device)
        own, exact = run(inputs, dout, "torch"), reference(inputs, dout)
        expected = floors(inputs, dout)
        for name in (OURS, *peers(case, device)):
            first = run(inputs, dout, name)
            yield from within(case, named(first), named(own), named(exact), BUDGETS, name, expected)
            if name == OURS:
                yield from _ours(case, inputs, dout, first, exact[0])


def _ours(case: Case, inputs, dout, first, exact) -> Iterator[Check]:
    """Equal from run to run; zero padding gets no gradient, and the result is as good without it.

    Not equal bit by bit: another width may run another kernel.
    """
    yield repeated(case, lambda: named(run(inputs, dout, OURS)), named(first), OURS)
    if case.d_ff_real == case.d_ff:
        return
    yield padding_check(case, first, OURS)
    unpadded = run(without_padding(case, inputs), dout, OURS)[0]
    yield Check(f"out without the padding over out with it, {case}", "error_ratio",
                error_ratio(unpadded, first[0], exact, floors(inputs, dout).get("out", 0.0)),
                BUDGETS["out"], OURS)  # fmt: skip
