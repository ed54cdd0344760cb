"""Inputs, references and PyTorch's own results that the attention gates and tests compare with."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tnp.ops import registry
from tnp.ops.attention import attention
from tnp.ops.attention.reference import attention_reference


@dataclass(frozen=True)
class Case:
    """One comparison: sizes, dtype, and the factor that q and k are scaled up by."""

    batch: int
    n_heads: int
    n_q: int
    n_k: int
    head_dim: int = 64
    dtype: torch.dtype = torch.bfloat16
    magnitude: float = 1.0

    def __str__(self) -> str:
        text = f"B={self.batch} H={self.n_heads} n_q={self.n_q} n_k={self.n_k} D={self.head_dim}"
        text += f" {str(self.dtype).removeprefix('torch.')}"
        return text if self.magnitude == 1 else f"{text} magnitude {self.magnitude:g}"


# No size but the last two is a multiple of a tile; they are the specification's small and mid.
GPU_CASES = (
    Case(2, 3, 1, 65),
    Case(2, 3, 127, 65),
    Case(4, 8, 564, 64),
    Case(1, 2, 777, 564),
    Case(1, 2, 777, 564, dtype=torch.float16),
    Case(1, 2, 200, 130, dtype=torch.float32),
    Case(1, 2, 300, 200, head_dim=32),
    Case(1, 2, 300, 200, head_dim=128),
    Case(1, 2, 777, 564, magnitude=8.0),
    Case(1, 1, 11_000, 10_000),
)
CPU_CASES = (
    Case(1, 2, 1, 65, dtype=torch.float32),
    Case(2, 2, 67, 65, dtype=torch.float32),
    Case(1, 2, 130, 63),
    Case(1, 2, 130, 63, dtype=torch.float16),
    Case(1, 1, 70, 40, dtype=torch.float32, magnitude=8.0),
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


def run(
    inputs: list[torch.Tensor], do: torch.Tensor, implementation: str
) -> tuple[torch.Tensor, ...]:
    """o, dq, dk, dv."""
    o = attention(*inputs, implementation=implementation)
    return (o.detach(), *torch.autograd.grad(o, inputs, do))


def pytorch_own(inputs: list[torch.Tensor], do: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """o, dq, dk, dv as PyTorch computes them in the inputs' dtype.

    By SDPA's flash backend where it takes that dtype, elsewhere by the plain formula.
    """
    device, dtype = inputs[0].device, inputs[0].dtype
    refused = registry.get("attention", "sdpa_flash").unsupported(device, dtype)
    return run(inputs, do, "reference" if refused else "sdpa_flash")


def exact(inputs: list[torch.Tensor], do: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """o, dq, dk, dv in float64 of each batch's heads, a head at a time to bound the memory."""
    for b in range(do.shape[0]):
        for h in range(do.shape[1]):
            head = [x.detach()[b, h].double().requires_grad_() for x in inputs]
            o = attention_reference(*head)
            yield (o.detach(), *torch.autograd.grad(o, head, do[b, h].double()))


def reference(inputs: list[torch.Tensor], do: torch.Tensor) -> list[torch.Tensor]:
    """o, dq, dk, dv in float64, shaped like the inputs."""
    return [
        torch.stack(heads).unflatten(0, do.shape[:2])
        for heads in zip(*exact(inputs, do), strict=True)
    ]
