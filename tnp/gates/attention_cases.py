"""Inputs, references and PyTorch's own results that the attention gates and tests compare with."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tnp import plans
from tnp.contract import Call, Operation
from tnp.gates import rounding
from tnp.gates.checks import GRADIENT_BUDGET, OUTPUT_BUDGET
from tnp.ops import registry
from tnp.ops.attention import FORWARD, OPERATOR, attention
from tnp.ops.attention.torch_forms import reference as formula

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BUDGETS = {"o": OUTPUT_BUDGET} | dict.fromkeys(("dq", "dk", "dv"), GRADIENT_BUDGET)


@dataclass(frozen=True)
class Case:
    """One comparison: sizes, dtype, the factor that q and k are scaled up by, and n_keys."""

    batch: int
    n_heads: int
    n_q: int
    n_k: int
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    magnitude: float = 1.0
    n_keys: tuple[int, ...] | None = None

    def __str__(self) -> str:
        text = f"B={self.batch} H={self.n_heads} n_q={self.n_q} n_k={self.n_k} D={self.head_dim}"
        text += f" {str(self.dtype).removeprefix('torch.')}"
        if self.n_keys is not None:
            text += f" n_keys {', '.join(map(str, self.n_keys))}"
        return text if self.magnitude == 1 else f"{text} magnitude {self.magnitude:g}"


# On both sides of every tile's edge, in turn for queries and keys; at magnitude 40 scores go past
# where 2^s overflows float32, from 8 on no tile of Hopper's keeps its reference, at 0 all keys are
# equal. Of few keys at magnitude 12 and more one has all the weight, and dq and dk are differences
# of equals.
SIZES = (1, 63, 64, 65, 127, 564, 777, 10_000, 11_000, 205_000)
GPU_CASES = (
    *(Case(1, 1, n, 200) for n in SIZES),
    *(Case(1, 1, 200, n) for n in SIZES),
    Case(2, 3, 127, 65),
    Case(4, 8, 564, 64),
    Case(64, 8, 564, 64),
    Case(3, 8, 1100, 1000),
    Case(1, 2, 777, 564, dtype=torch.float16),
    Case(2, 3, 300, 100, dtype=torch.float16),
    Case(1, 2, 200, 130, dtype=torch.float32),
    Case(1, 2, 300, 200, head_dim=32),
    Case(1, 2, 300, 200, head_dim=128),
    *(Case(1, 2, 777, 564, magnitude=magnitude) for magnitude in (0.0, 2.5, 8.0, 40.0)),
    *(Case(1, 2, 300, 200, dtype=torch.float32, magnitude=size) for size in (8.0, 12.0, 30.0)),
    *(Case(2, 3, 300, 11, dtype=dtype, magnitude=12.0) for dtype in DTYPES),
    *(Case(2, 3, 300, 3, dtype=dtype, magnitude=30.0) for dtype in DTYPES),
    Case(2, 3, 300, 100, magnitude=8.0),
    Case(4, 2, 1500, 1000, n_keys=(1, 64, 777, 1000)),
    Case(3, 2, 300, 128, n_keys=(1, 65, 128)),
    Case(2, 2, 700, 600, magnitude=8.0, n_keys=(65, 600)),
    Case(1, 1, 11_000, 10_000),
    # More tiles than multiprocessors: whole ones and then parts, some done again; by sample.
    Case(1, 8, 3300, 3000, magnitude=4.0),
    Case(1, 8, 3300, 3000, dtype=torch.float16, magnitude=2.0),
    Case(4, 8, 2000, 1000, n_keys=(1, 64, 777, 1000)),
)
CPU_CASES = (
    Case(1, 2, 1, 65, dtype=torch.float32),
    Case(2, 2, 67, 65, dtype=torch.float32),
    Case(1, 2, 130, 63),
    Case(1, 2, 130, 63, dtype=torch.float16),
    *(Case(1, 1, 70, 40, dtype=torch.float32, magnitude=magnitude) for magnitude in (8.0, 30.0)),
    *(Case(1, 2, 40, 5, dtype=dtype, magnitude=12.0) for dtype in DTYPES),
    Case(2, 1, 70, 40, dtype=torch.float32, n_keys=(7, 40)),
    Case(2, 1, 70, 140, n_keys=(7, 140)),
)


def cases(device: torch.device) -> tuple[Case, ...]:
    return GPU_CASES if device.type == "cuda" else CPU_CASES


def draw(case: Case, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v, views of one projection [B, L, 3, H, D] as in the model, and dO."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator)

    n_rows = max(case.n_q, case.n_k)
    projection = normal(case.batch, n_rows, 3, case.n_heads, case.head_dim)
    projection[:, :, :2] *= case.magnitude
    q, k, v = projection.to(case.dtype).permute(2, 0, 3, 1, 4)
    inputs = [q[:, :, : case.n_q], k[:, :, : case.n_k], v[:, :, : case.n_k]]
    do = normal(case.batch, case.n_q, case.n_heads, case.head_dim).to(case.dtype)
    return [x.requires_grad_() for x in inputs], do.transpose(1, 2)


def n_keys(case: Case, device: torch.device) -> torch.Tensor | None:
    if case.n_keys is None:
        return None
    return torch.tensor(case.n_keys, dtype=torch.int32, device=device)


def called(inputs: list[torch.Tensor], lengths: torch.Tensor | None = None) -> Call:
    """What a training step asks of these inputs."""
    return plans.describe(OPERATOR, (*inputs, lengths), wanted=OPERATOR.differentiated)


def launches(
    operation: Operation, case: Case, inputs: list[torch.Tensor]
) -> Iterator[tuple[str, Any]]:
    """(kernel, configuration) of every kernel that can serve the operation on these inputs.

    Of each its default, and the tuned choice, which is what `attention` runs.
    """
    what = called(inputs, n_keys(case, inputs[0].device))
    choice = plans.choose_kernel(operation, OPERATOR, what)[1]
    for name, kernel in plans.kernels_of(operation).items():
        if kernel.refuses(what) is None:
            default = kernel.configs(what)[0]
            yield name, default
            if name == choice.name and choice.config != default:
                yield name, choice.config


def forward(
    case: Case, inputs: list[torch.Tensor], kernel: str | None = None, config: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse by one kernel, or by the tuned choice."""
    tensors = (*(x.detach() for x in inputs), n_keys(case, inputs[0].device))
    return run_forward(tensors, case.head_dim**-0.5, kernel and (kernel, config))


def run_forward(
    inputs: tuple, scale: float, forced: tuple[str, Any] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of (q, k, v, n_keys) by this kernel and configuration, or by the tuned choice."""
    what = called(inputs[:3], inputs[3])
    forced = forced and {FORWARD.name: forced}
    kernel, choice = plans.choose_kernel(FORWARD, OPERATOR, what, forced=forced)
    (o,), (lse,) = kernel.prepare(what, choice.config, inputs)(inputs, (scale,))
    return o, lse


def backward(
    case: Case,
    inputs: list[torch.Tensor],
    do: torch.Tensor,
    operation: Operation,
    kernel: str,
    config: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv by one kernel, after the forward pass of the tuned choice."""
    scale = case.head_dim**-0.5
    tensors = (*(x.detach() for x in inputs), n_keys(case, do.device))
    o, lse = run_forward(tensors, scale)
    return run_backward(do, tensors, o, lse, scale, operation, (kernel, config))


def run_backward(
    do: torch.Tensor,
    inputs: tuple,
    o: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
    operation: Operation,
    forced: tuple[str, Any],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk, dv of (q, k, v, n_keys) by this kernel and configuration."""
    what = called(inputs[:3], inputs[3])
    name, config = forced
    tensors = (do,), (*inputs, o), (lse,)
    launch = plans.kernels_of(operation)[name].prepare(what, config, tensors)
    return launch(tensors, (scale,))


def run(
    inputs: list[torch.Tensor],
    do: torch.Tensor,
    implementation: str,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """o, dq, dk, dv through the public function and autograd."""
    o = attention(*inputs, n_keys=lengths, implementation=implementation)
    return (o.detach(), *torch.autograd.grad(o, inputs, do))


def pytorch_own(
    case: Case, inputs: list[torch.Tensor], do: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """o, dq, dk, dv as PyTorch computes them in the inputs' dtype.

    By SDPA's flash backend where it takes that dtype, elsewhere by the plain formula.
    """
    device, dtype = inputs[0].device, inputs[0].dtype
    refused = registry.get("attention", "sdpa_flash").unsupported(device, dtype)
    if refused or case.n_keys is not None:
        return run(inputs, do, "reference", n_keys(case, device))
    return run(inputs, do, "sdpa_flash")


def floors(case: Case, inputs: list[torch.Tensor], do: torch.Tensor) -> rounding.Floors:
    """What float32 must be expected to lose in o, dq, dk, dv and lse."""
    return rounding.attention(*inputs, do, case.head_dim**-0.5, case.n_keys)


def reference(case: Case, inputs: list[torch.Tensor], do: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """o, dq, dk, dv in float64, a head at a time to bound the memory."""
    results = [torch.empty(x.shape, dtype=torch.float64, device=x.device) for x in (do, *inputs)]
    lengths = n_keys(case, do.device)
    for b in range(do.shape[0]):
        for h in range(do.shape[1]):
            head = [x.detach()[b : b + 1, h : h + 1].double().requires_grad_() for x in inputs]
            counted = None if lengths is None else lengths[b : b + 1]
            o = formula(*head, counted, case.head_dim**-0.5)
            gradients = torch.autograd.grad(o, head, do[b : b + 1, h : h + 1].double())
            for result, part in zip(results, (o.detach(), *gradients), strict=True):
                result[b, h] = part[0, 0]
    return tuple(results)
