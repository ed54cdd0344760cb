"""What an operator benchmark runs: inputs, launches, operations, bytes and the check afterwards.

To add an operator, write a function of (parameters, pass_, device) and enter it in `WORKLOADS`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import torch

from tnp.bench.roofline import attention_bytes
from tnp.ops.attention import attention, describe_launch
from tnp.ops.flops import attention_flops

MATMUL_SIZE = 8192
COPY_BYTES = 2**30
# Elements of a float64 score block in the reference: 1 GiB.
REFERENCE_BLOCK = 2**27

Output = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Workload:
    """One pass of one operator, the same for all its implementations.

    `calls(implementation)` launch it on different inputs, together more than the L2 cache holds;
    each returns its output. `check(output)` compares the output of the first: pairs (measured,
    reference). `launch_config(implementation)` is what a kernel of our own was launched with.
    """

    calls: Callable[[str], list[Callable[[], Output]]]
    flops: float | None
    bytes: float
    check: Callable[[Output], list[tuple[torch.Tensor, torch.Tensor]]]
    launch_config: Callable[[str], str | None] = lambda implementation: None


def input_sets(bytes_touched: float, device: torch.device) -> int:
    """How many sets of inputs in rotation exceed twice the L2 cache; 1 on the CPU."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, math.ceil(2 * cache / bytes_touched))


def attention_workload(parameters: dict, pass_: str, device: torch.device) -> Workload:
    """Attention on normal q, k, v: views of one projection [B, L, 3, H, D], as in the model.

    The backward's output gradient has the layout of the model's, [B, n_q, H, D] transposed.
    """
    names = ("batch", "n_heads", "n_q", "n_k", "head_dim")
    batch, n_heads, n_q, n_k, head_dim = size = [parameters[name] for name in names]
    dtype = getattr(torch, parameters["dtype"])
    generator = torch.Generator(device).manual_seed(parameters["replicate"])
    n_bytes = attention_bytes(*size, dtype.itemsize, pass_)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=dtype, device=device, generator=generator)

    def qkv() -> list[torch.Tensor]:
        projection = normal(batch, max(n_q, n_k), 3, n_heads, head_dim)
        q, k, v = projection.permute(2, 0, 3, 1, 4)
        return [q[:, :, :n_q], k[:, :, :n_k], v[:, :, :n_k]]

    inputs = [qkv() for _ in range(input_sets(n_bytes, device))]
    gradients = []
    if pass_ == "backward":
        inputs = [[x.requires_grad_() for x in qkv] for qkv in inputs]
        gradients = [normal(batch, n_q, n_heads, head_dim).transpose(1, 2) for _ in inputs]

    def calls(implementation: str) -> list[Callable[[], Output]]:
        forward = [partial(attention, *qkv, implementation=implementation) for qkv in inputs]
        if pass_ == "forward":
            return forward
        return [
            partial(torch.autograd.grad, o(), qkv, do, retain_graph=True)
            for o, qkv, do in zip(forward, inputs, gradients, strict=True)
        ]

    @cache
    def reference() -> tuple[torch.Tensor, ...]:
        return _attention_head_reference(*inputs[0], *gradients[:1])

    def check(output: Output) -> list[tuple[torch.Tensor, torch.Tensor]]:
        measured = [output] if pass_ == "forward" else output
        return [(x[-1, -1], y) for x, y in zip(measured, reference(), strict=True)]

    def launch_config(implementation: str) -> str | None:
        q, k, _ = inputs[0]
        return describe_launch(q, k, pass_, implementation)

    flops = float(attention_flops(*size, pass_))
    return Workload(calls, flops, n_bytes, check, launch_config)


def _attention_head_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, do: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    """o, or with `do` dq, dk, dv, of the last head of the last batch, in float64.

    Plain softmax attention over blocks of queries, so that 200,000 keys fit; the last head is
    where a wrong offset shows.
    """
    q, k, v = (x.detach()[-1, -1].double() for x in (q, k, v))
    scale = q.shape[-1] ** -0.5
    o, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for rows in torch.arange(len(q), device=q.device).split(max(1, REFERENCE_BLOCK // len(k))):
        p = torch.softmax(q[rows] @ k.T * scale, dim=-1)
        o[rows] = p @ v
        if do is not None:
            do_rows = do[-1, -1][rows].double()
            delta = (do_rows * o[rows]).sum(-1, keepdim=True)
            ds = p * (do_rows @ v.T - delta) * scale
            dq[rows] = ds @ k
            dk += ds.T @ q[rows]
            dv += p.T @ do_rows
    return (o,) if do is None else (dq, dk, dv)


def matmul_workload(parameters: dict, pass_: str, device: torch.device) -> Workload:
    """The arithmetic ceiling: [n, n] @ [n, n] through PyTorch, n = 8192 unless `n_q` says."""
    n = parameters.get("n_q") or MATMUL_SIZE
    dtype = getattr(torch, parameters["dtype"])
    generator = torch.Generator(device).manual_seed(parameters["replicate"])
    a, b = (torch.randn(n, n, dtype=dtype, device=device, generator=generator) for _ in "ab")
    rows = slice(n - min(n, 64), n)
    return Workload(
        lambda implementation: [lambda: a @ b],
        2.0 * n**3,
        3.0 * n**2 * dtype.itemsize,
        lambda product: [(product[rows], a[rows].double() @ b.double())],
    )


def copy_workload(parameters: dict, pass_: str, device: torch.device) -> Workload:
    """The bandwidth ceiling: 1 GiB read and as much written, by a kernel.

    Not by `copy_`: in a CUDA graph that is a copy engine's work, which reached 2.7 TB/s on an H200
    where kernels move 4.2.
    """
    generator = torch.Generator(device).manual_seed(parameters["replicate"])
    source = torch.randn(COPY_BYTES // 4, device=device, generator=generator)
    target = torch.empty_like(source)
    return Workload(
        lambda implementation: [lambda: torch.neg(source, out=target)],
        None,
        2.0 * COPY_BYTES,
        lambda copied: [(copied, -source)],
    )


WORKLOADS = {
    "attention": attention_workload,
    "matmul": matmul_workload,
    "copy": copy_workload,
}
