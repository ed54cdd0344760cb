"""What the compile gate compiles of operators without a declaration, on the meta device.

Their launchers run at the model's sizes, K = 10 components, one dimension of x and of y, each with
every switch it has. What of a kernel depends on rows is the same at any number.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import ModuleType

import torch

from tnp.ops import (
    hopper_silu,
    triton_embedding,
    triton_matmul,
    triton_mixture_nll,
    triton_rms_norm,
)
from tnp.ops.mixture_heads import hopper as hopper_heads
from tnp.ops.mixture_heads import triton_heads
from tnp.ops.mlp import single

N_ROWS, N_CONTEXT = 1100, 100
D_MODEL, D_FF = 512, 1408
# A width that no tile divides. At no multiple of 16, where loads are narrow, tiles of 16 bits spill
# on sm_80 and sm_90a: slow, and still right.
RAGGED = 528
N_COMPONENTS, N_OUT = 10, 3
EPS = 1e-6

Users = tuple[tuple[str, str], ...]  # implementations, as operator and name
Calls = Iterator[Callable[[], object]]
Widths = tuple[int, ...]  # the model's first


@dataclass(frozen=True)
class Launch:
    """`call` runs a launcher on meta tensors; `users` are the implementations that do so."""

    capability: int
    dtype: torch.dtype
    users: Users
    call: Callable[[], object]


def undeclared(capabilities: Iterable[int]) -> Iterator[Launch]:
    """Every launch that could be chosen on GPUs of these compute capabilities."""
    for capability in capabilities:
        yield from _operators(capability)


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


# Calls of one operator's launchers. Where not `every` form is asked for, the one that a training
# step runs, which needs the most registers.


def _rms_norm(dtype: torch.dtype, every: bool) -> Calls:
    x, weight = _empty(N_ROWS, D_MODEL, dtype=dtype), _empty(D_MODEL)
    for update in (x, None) if every else (x,):
        yield partial(triton_rms_norm.forward, x, update, weight, EPS)
        yield partial(triton_rms_norm.backward, x, update, x, weight, EPS)


def _embedding(dtype: torch.dtype, every: bool) -> Calls:
    """What is not given makes no other kernel: strides and sizes are no part of it."""
    context, target = _empty(1, N_CONTEXT, 1), _empty(1, N_ROWS - N_CONTEXT, 1)
    inputs = context, context, target, _empty(D_MODEL, 3)
    yield partial(triton_embedding.forward, *inputs, dtype)
    yield partial(triton_embedding.backward, _empty(1, N_ROWS, D_MODEL, dtype=dtype), *inputs)


def _mixture_nll(dtype: torch.dtype, every: bool) -> Calls:
    parameters = _empty(N_ROWS, N_COMPONENTS, N_OUT, dtype=dtype)
    y = _empty(N_ROWS, 1)
    gradients = ((True, False), (False, False), (True, True)) if every else ((True, False),)
    for (with_dparameters, with_dy), sigma_min in product(gradients, (0.1, 0.0)[: 1 + every]):
        wanted = sigma_min, with_dparameters, with_dy
        yield partial(triton_mixture_nll.loss_and_gradients, parameters, y, *wanted)
    yield partial(triton_mixture_nll.scaled, parameters, _empty())


def _mlp_single(dtype: torch.dtype, every: bool) -> Calls:
    empty = partial(_empty, dtype=dtype)
    for n_rows in (single.MANY_ROWS, N_ROWS) if every else (single.MANY_ROWS,):
        x, up, down = empty(n_rows, D_MODEL), empty(D_FF, D_MODEL), empty(D_MODEL, D_FF)
        yield partial(single.forward, x, up, down)


def _matmul(kernels: ModuleType, widths: Widths, dtype: torch.dtype, every: bool) -> Calls:
    empty = partial(_empty, dtype=dtype)

    def train(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> None:
        _h, saved = kernels.matmul_silu(x, up, True)
        kernels.matmul_dsilu(x, down, saved)

    for d in widths if every else widths[:1]:
        x, up, down = empty(N_ROWS, d), empty(D_FF, d), empty(d, D_FF)
        yield partial(train, x, up, down)
        if every:
            yield partial(kernels.matmul_silu, x, up, False)


def _mixture_heads(kernels: ModuleType, widths: Widths, dtype: torch.dtype, every: bool) -> Calls:
    empty = partial(_empty, dtype=dtype)
    down, dout = empty(N_COMPONENTS, N_OUT, D_FF), _empty(N_ROWS, N_COMPONENTS, N_OUT)
    for d in widths if every else widths[:1]:
        x, up = empty(N_ROWS, d), empty(N_COMPONENTS, D_FF, d)
        yield partial(kernels.forward, x, up, down)
        yield partial(kernels.backward, dout, x, up, down)


_MLP = (("mlp", "fused"), ("mlp", "single"))  # both have the backward pass of `fused`
_HEADS = (("mixture_heads", "fused"),)
PORTABLE = (
    (_rms_norm, (("rms_norm", "fused"),)),
    (_embedding, (("embedding", "fused"),)),
    (_mixture_nll, (("mixture_nll", "fused"),)),
    (_mlp_single, (("mlp", "single"),)),
    (partial(_matmul, triton_matmul, (D_MODEL, RAGGED)), _MLP),
    (partial(_mixture_heads, triton_heads, (D_MODEL, RAGGED)), _HEADS),
)
# For compute capability 9.0 and 16 bits.
HOPPER = (
    (partial(_matmul, hopper_silu, (D_MODEL,)), _MLP),
    (partial(_mixture_heads, hopper_heads, (D_MODEL,)), _HEADS),
)


def _operators(capability: int) -> Iterator[Launch]:
    """Every form in bfloat16; in float32, whose tiles are others, and float16 the largest."""
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    for dtype in dtypes if capability == 90 else dtypes[:2]:  # float16 needs what bfloat16 needs
        families = PORTABLE
        if capability == 90 and dtype != torch.float32:
            families += HOPPER
        for calls, users in families:
            for call in calls(dtype, dtype == torch.bfloat16):
                yield Launch(capability, dtype, users, call)
