"""What the compile gate compiles: every launch that could be chosen, on the meta device.

Attention: the default of every kernel that serves a problem, and the entries of the tuned table.
The other operators: their launchers at the model's sizes, K = 10 components, one dimension of x and
of y, each with every switch it has. What of a kernel depends on rows is the same at any number.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product
from types import ModuleType

import torch
import triton

from tnp import targets
from tnp.contract import Operator
from tnp.launch import watched
from tnp.ops import hopper_silu, triton_matmul, triton_rms_norm, tuning
from tnp.ops.attention.kernels import KERNELS, Problem
from tnp.ops.embedding import OPERATOR as EMBEDDING
from tnp.ops.mixture_heads import hopper as hopper_heads
from tnp.ops.mixture_heads import triton_heads
from tnp.ops.mixture_nll import OPERATOR as MIXTURE_NLL
from tnp.ops.mlp import single
from tnp.plans import build

# dtype, head_dim, and n_context given or not. Away from the model's own type only the form with
# n_context is compiled, which needs more registers, and float16 needs what bfloat16 needs.
TYPES = (
    *((torch.bfloat16, 64, given) for given in (False, True)),
    (torch.float16, 64, True),
    (torch.float32, 64, True),
    *product((torch.bfloat16, torch.float32), (16, 32), [True]),
    (torch.bfloat16, 128, True),  # float32 spills there in every tile: slow, and still right
)
# Batch, queries and keys: many keys and few; enough programs to fill a GPU, and too few; so many
# keys that the forward pass splits tiles along them.
SIZES = ((1, 1100, 1000), (64, 1100, 1000), (1, 564, 128), (64, 564, 64), (1, 3300, 3000))
N_HEADS = 8

# Of the other operators.
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


def committed_launches(capabilities: Iterable[int]) -> Iterator[Launch]:
    """Every launch that could be chosen on GPUs of these compute capabilities."""
    for capability in capabilities:
        for (dtype, head_dim, given), (batch, n_q, n_k) in product(TYPES, SIZES):
            for (operation, name), kernel in KERNELS.items():
                size = (batch, N_HEADS, n_q, n_k, head_dim)
                problem = Problem(operation, dtype, *size, capability)
                if kernel.unsupported(problem) is None:
                    yield attention(problem, name, kernel.configs(problem)[0], given)
        yield from _operators(capability)
    for entry in tuning.table():
        problem = tuning.problem_of(entry)
        config = tuning.config_of(entry, problem)
        if config is None:
            raise ValueError(f"no candidate of its kernel: {entry} in {tuning.TABLE}")
        for given in (False, True):
            yield attention(problem, entry["kernel"], config, given)


def attention(problem: Problem, name: str, config: object, given: bool) -> Launch:
    """A launch of one kernel of attention; `given` says whether n_context is."""
    both = problem.operation == "forward"
    operations = ("separate", "fused") if both else (problem.operation,)
    users = tuple(("attention", operation) for operation in operations)
    run = KERNELS[problem.operation, name].run
    arguments = (*_attention_arguments(problem, given), problem.head_dim**-0.5, config)
    return Launch(problem.capability, problem.dtype, users, partial(run, *arguments))


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _attention_arguments(problem: Problem, given: bool) -> list:
    """The tensors of an operation and n_context, as the model passes them."""
    empty = partial(_empty, dtype=problem.dtype)
    batch, n_heads, n_q, n_k = problem.batch, problem.n_heads, problem.n_q, problem.n_k
    projection = empty(batch, max(n_q, n_k), 3, n_heads, problem.head_dim)
    q, k, v = projection.permute(2, 0, 3, 1, 4)
    inputs = [q[:, :, :n_q], k[:, :, :n_k], v[:, :, :n_k]]
    n_context = _empty(batch, dtype=torch.int32) if given else None
    if problem.operation == "forward":
        return [*inputs, n_context]
    o, do = (empty(batch, n_q, n_heads, problem.head_dim).transpose(1, 2) for _ in range(2))
    return [do, *inputs, o, _empty(batch, n_heads, n_q), n_context]


def _passes(
    operator: Operator,
    inputs: tuple,
    wanted: tuple[str, ...],
    options: tuple = (),
    scalars: tuple[float, ...] = (),
) -> None:
    """The launches of "fused" on whatever GPU the driver says is there."""
    target = targets.of_capability(triton.runtime.driver.active.get_current_target().arch)
    with watched():
        plan = build(operator, "fused", inputs, options, wanted, target)
        outputs, saved = plan.forward(inputs, scalars)
        if wanted:
            gradients = tuple(torch.empty_like(x) for x in outputs)
            plan.backward(gradients, tuple(plan.kept(inputs, outputs)), saved, scalars)


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
    inputs = context, context, target, _empty(D_MODEL, 3), _empty(0, dtype=dtype)
    yield partial(_passes, EMBEDDING, inputs, ("weight",))


def _mixture_nll(dtype: torch.dtype, every: bool) -> Calls:
    parameters = _empty(N_ROWS, N_COMPONENTS, N_OUT, dtype=dtype)
    y = _empty(N_ROWS, 1)
    trained = ("parameters",)
    gradients = (trained, (), ("parameters", "y")) if every else (trained,)
    for wanted, floor in product(gradients, (True, False)[: 1 + every]):
        options = (("floor", True),) if floor else ()
        yield partial(_passes, MIXTURE_NLL, (parameters, y), wanted, options, (0.1,))


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
