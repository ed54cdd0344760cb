"""What the compile gate compiles: every launch that could be chosen, on the meta device.

Attention: the default of every kernel that serves a problem, and the entries of the tuned table.
The other operators: their launchers at the model's sizes, K = 10 components, one dimension of x and
of y, each with every switch it has; of an operator of the contract every kernel and configuration
that can serve. What of a kernel depends on rows is the same at any number.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch

from tnp import targets
from tnp.contract import Call, Case, Operation, Operator
from tnp.ops import (
    mixture_heads,
    mlp,
    triton_embedding,
    triton_mixture_nll,
    triton_rms_norm,
    tuning,
)
from tnp.ops.attention.kernels import KERNELS, Problem
from tnp.plans import build, describe, kernels_of
from tnp.values import Random

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


def _of_contract(
    operator: Operator, name: str, sizes: dict[str, int], capability: int, dtype: torch.dtype
) -> Calls:
    """Every kernel and configuration that can serve a problem, with gradients and without."""
    target = targets.of_capability(capability)
    case = Case(operator.problem(str(dtype).removeprefix("torch."), **sizes))
    inputs = tuple(operator.draw(case, Random(case, torch.device("meta"))).values())
    (found,) = (one for one in operator.implementations if one.name == name)
    options = operator.call_options(case.problem)
    for wanted in ((), operator.differentiated):
        what = describe(operator, inputs, options, wanted, target)
        if found.refuses(what) is not None:
            continue
        for kernel, config in _candidates(found.forward, what):
            forced = {found.forward.name: (kernel.name, config)}
            yield partial(
                _launch, operator, name, inputs, options, wanted, target, forced, found.backward
            )


def _candidates(operation: Operation, what: Call, saves: str | None = None) -> Iterator[tuple]:
    for kernel in kernels_of(operation, saves).values():
        if kernel.refuses(what) is None:
            yield from ((kernel, config) for config in kernel.configs(what))


def _launch(operator, name, inputs, options, wanted, target, forced, backward) -> None:
    """A forward pass, and every backward pass that reads what it saves."""
    plan = build(operator, name, inputs, options, wanted, target, forced)
    outputs, saved = plan.forward(inputs, operator.numbers)
    if not wanted:
        return
    gradients = tuple(torch.empty_like(y) for y in outputs)
    given = gradients, tuple(plan.kept(inputs, outputs)), saved
    for kernel, config in _candidates(backward, plan.what, plan.kernel.saves):
        kernel.prepare(plan.what, config, given)(given, operator.numbers)


def _mlp(name: str, capability: int, dtype: torch.dtype, every: bool) -> Calls:
    for d_model in (D_MODEL, RAGGED) if every and name == "fused" else (D_MODEL,):
        sizes = {"rows": N_ROWS, "d_model": d_model, "d_ff": D_FF}
        yield from _of_contract(mlp.OPERATOR, name, sizes, capability, dtype)


def _mixture_heads(capability: int, dtype: torch.dtype, every: bool) -> Calls:
    for d_model in (D_MODEL, RAGGED) if every else (D_MODEL,):
        sizes = {"rows": N_ROWS, "d_model": d_model, "d_ff": D_FF}
        sizes |= {"n_components": N_COMPONENTS, "n_outputs": N_OUT}
        yield from _of_contract(mixture_heads.OPERATOR, "fused", sizes, capability, dtype)


PORTABLE = (
    (_rms_norm, ("rms_norm", "fused")),
    (_embedding, ("embedding", "fused")),
    (_mixture_nll, ("mixture_nll", "fused")),
)
# Operators of the contract, whose kernels say where they run.
CONTRACT = (
    (partial(_mlp, "single"), ("mlp", "single")),
    (partial(_mlp, "fused"), ("mlp", "fused")),
    (_mixture_heads, ("mixture_heads", "fused")),
)


def _operators(capability: int) -> Iterator[Launch]:
    """Every form in bfloat16; in float32, whose tiles are others, and float16 the largest."""
    dtypes = (torch.bfloat16, torch.float32, torch.float16)
    for dtype in dtypes if capability == 90 else dtypes[:2]:  # float16 needs what bfloat16 needs
        every = dtype == torch.bfloat16
        for calls, user in PORTABLE:
            for call in calls(dtype, every):
                yield Launch(capability, dtype, (user,), call)
        for calls, user in CONTRACT:
            for call in calls(capability, dtype, every):
                yield Launch(capability, dtype, (user,), call)
