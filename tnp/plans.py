"""Builds plans. A plan is the decision, made once, which function or kernels serve a problem.

A plan owns no tensor and no stream: both come with every call. `tnp.selection` chooses the
implementation and the kernels. `tnp.dispatch` finds a plan again by a key that holds all it depends
on.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch.autograd import forward_ad

from tnp import derivatives
from tnp.catalog import AUTO, catalog
from tnp.choice import Choice
from tnp.contract import Call, Implementation, Kernel, Operator
from tnp.selection import (
    Forced,
    aligned,
    choose_implementation,
    choose_kernel,
    describe,
    kernels_of,
)
from tnp.targets import Target

MAX_PLANS = 4096  # for each operator; when they are full, the older half is dropped


class Plans:
    """An operator's plans by key."""

    def __init__(self) -> None:
        self.by_key: dict[tuple, Any] = {}
        self.lock = threading.RLock()

    def keep(self, key: tuple, plan: Any) -> Any:
        """Stores and returns the plan, and drops the older half where there are too many.

        The caller holds the lock.
        """
        if len(self.by_key) >= MAX_PLANS:
            for old in list(self.by_key)[: MAX_PLANS // 2]:
                del self.by_key[old]
        self.by_key[key] = plan
        return plan


of_operator: dict[str, Plans] = {}


def plans(operator: Operator) -> Plans:
    """Returns this process's plan cache for `operator`."""
    return of_operator.get(operator.name) or of_operator.setdefault(operator.name, Plans())


@contextmanager
def forgotten_after() -> Iterator[None]:
    """Drops the plans that are made inside. Another thread's plans among them are made again."""
    before = {name: set(known.by_key) for name, known in of_operator.items()}
    try:
        yield
    finally:
        for name, known in of_operator.items():
            with known.lock:
                for key in set(known.by_key) - before.get(name, set()):
                    del known.by_key[key]


def launch_configs() -> list[dict[str, Any]]:
    """Returns the kernels and configurations of this process's plans, with problem and mode."""
    described = {
        json.dumps({"problem": plan.what.problem.json, "mode": plan.what.mode} | plan.choices)
        for known in of_operator.values()
        for plan in known.by_key.values()
        if plan.choices
    }
    return [json.loads(one) for one in sorted(described)]


def build(
    operator: Operator,
    implementation: str,
    inputs: tuple,
    options: tuple = (),
    wanted: tuple[str, ...] = (),
    target: Target | None = None,
    forced: Forced | None = None,
    saves: str | None = None,
    apart: bool = False,
) -> PlainPlan | KernelPlan:
    """Returns the plan of a call.

    Args:
        operator, implementation, inputs, options: the arguments of `tnp.dispatch.call`.
        wanted: names of the inputs whose gradients are wanted.
        target: the device to plan for; None stands for the inputs' device.
        forced: operation → kernel and configuration, for gates and tuning.
        saves: the form in which the forward kernel must save its tensors, or None for any.
        apart: True where results must share no memory.
    """
    what = replace(describe(operator, inputs, options, wanted, target), apart=apart)
    if 0 in dict(what.problem.sizes).values():  # nothing to compute
        return _empty_plan(operator, implementation, what, inputs)
    chosen, found = choose_implementation(operator, implementation, what)
    if found.run is not None:
        return PlainPlan(what, found, chosen)
    return KernelPlan(operator, what, found, chosen, inputs, forced or {}, saves)


def _empty_plan(operator: Operator, implementation: str, what: Call, inputs: tuple) -> PlainPlan:
    """Returns a plan that runs the reference, and casts to the implementation's dtypes."""
    run = operator.reference
    if implementation.partition(":")[0] != AUTO:
        found = catalog().load(operator.name, implementation)
        if found.forward is not None:
            kernel = next(iter(kernels_of(found.forward).values()))
            named = operator.of_results(dict(operator.call_options(what.problem)))
            dtypes = [x.dtype for x in kernel.empty(what.wanted, inputs, **named)[0]]

            def run(*arguments: Any, **options: Any) -> Any:
                outputs = operator.reference(*arguments, **options)
                if not isinstance(outputs, tuple):
                    return outputs.to(dtypes[0])
                return tuple(x.to(dtype) for x, dtype in zip(outputs, dtypes, strict=True))

    return PlainPlan(
        what, Implementation(operator.implementations[0].name, run=run), Choice("empty")
    )


class PlainPlan:
    """The plan of a function that PyTorch differentiates."""

    def __init__(self, what: Call, found: Implementation, chosen: Choice) -> None:
        self.what, self.found, self.chosen = what, found, chosen
        self.choices: dict[str, dict] = {}
        operator = catalog().operators[what.problem.op]
        self.function, self.options = found.run, dict(operator.call_options(what.problem))
        if found.compile:
            self.function = compiled(found)

    def run(self, inputs: tuple, scalars: tuple) -> Any:
        """Returns the operator's outputs."""
        return self.function(*inputs, *scalars, **self.options)


def compiled(found: Implementation) -> Any:
    """Returns `found.run` through torch.compile, with a graph for every shape."""
    from torch._functorch import config

    # Benchmarks time many backward passes after one forward pass, so its buffers must stay.
    config.donated_buffer = False
    mode = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}[found.compile]
    return torch.compile(found.run, fullgraph=True, dynamic=False, mode=mode)


class KernelPlan:
    """The plan of our kernels: one forward launch, and a backward launch per gradient layout."""

    def __init__(
        self,
        operator: Operator,
        what: Call,
        found: Implementation,
        chosen: Choice,
        inputs: tuple,
        forced: Forced,
        saves: str | None,
    ) -> None:
        self.operator, self.what, self.found, self.chosen = operator, what, found, chosen
        self.forced = forced
        kernel, picked = choose_kernel(found.forward, operator, what, saves, forced)
        self.kernel = kernel
        self.choices = {found.forward.name: picked.describe()}
        first = next(x for x in inputs if x is not None)
        self.device = first.device.index if first.is_cuda else None
        with _current(self.device):
            self.launch = prepared(kernel, what, picked.config, inputs)
        self.backwards: dict[tuple, Any] = {}
        names = operator.tensors
        everything = (*names, *operator.outputs)
        self.keep = [everything.index(name) for name in operator.kept]
        self.n_kept = len(self.keep)
        # Picks from (*gradients, None): None for the plan, None for the scalars, then each input's
        # gradient.
        order = operator.differentiated
        places = [order.index(name) if name in order else -1 for name in names]
        self.route = itemgetter(-1, -1, *places)
        self.run = self._differentiated if what.wanted else self._plain

    def forward(self, inputs: tuple, scalars: tuple) -> tuple[tuple, tuple]:
        """Returns the outputs, and the tensors saved for the backward pass."""
        return self._launched(self.launch, inputs, scalars)

    def _launched(self, launch: Callable[..., Any], inputs: tuple, scalars: tuple) -> Any:
        if torch._C._is_any_autocast_enabled():  # it would cast in PyTorch's part of a launch
            with torch._C._DisableAutocast():
                return self._launched(launch, inputs, scalars)
        if self.device is None or self.device == torch._C._cuda_getDevice():
            return launch(inputs, scalars)
        with torch.cuda.device(self.device):  # where Triton launches
            return launch(inputs, scalars)

    def _plain(self, inputs: tuple, scalars: tuple) -> Any:
        outputs, _ = self.forward(inputs, scalars)
        return outputs if len(outputs) > 1 else outputs[0]

    def _differentiated(self, inputs: tuple, scalars: tuple) -> Any:
        return _apply(self, scalars, *inputs)

    def kept(self, inputs: tuple, outputs: tuple) -> list:
        """Returns the inputs and outputs that the backward pass reads."""
        everything = (*inputs, *outputs)
        return [everything[at] for at in self.keep]

    def backward(self, gradients: tuple, kept: tuple, saved: tuple, scalars: tuple) -> tuple:
        """Returns gradients in the order of `differentiated`, None where not wanted."""
        if forward_ad._current_level >= 0 and derivatives.has_tangent(gradients):
            raise self.refusal(derivatives.FORWARD_MODE)
        # Gradients may have any strides, and hooks may replace the kept tensors by copies.
        try:
            key = tuple(
                [
                    None if x is None else (x.stride(), x.dtype, x.data_ptr() & 15)
                    for x in (*gradients, *kept, *saved)
                ]
            )
        except RuntimeError:  # a tensor has no memory
            if derivatives.is_batched(gradients):
                raise self.refusal(derivatives.BATCHED) from None
            raise
        launch = self.backwards.get(key)
        if launch is None:
            with self._lock:
                launch = self.backwards.get(key) or self._prepare(key, (gradients, kept, saved))
        return self._launched(launch, (gradients, kept, saved), scalars)

    def refusal(self, what: str) -> RuntimeError:
        """Returns the error that says that this implementation does not give `what`."""
        return derivatives.refusal(self.operator, self.found.name, what)

    def backward_once(self, gradients: tuple, kept: tuple, saved: tuple, scalars: tuple) -> tuple:
        """Does the same as `backward`. Differentiating its results raises an error."""
        run = partial(self.backward, scalars=scalars)
        return derivatives.once(self.refusal(derivatives.SECOND), run, gradients, kept, saved)

    @property
    def _lock(self) -> threading.RLock:
        return plans(self.operator).lock

    def _prepare(self, key: tuple, inputs: tuple[tuple, tuple, tuple]) -> Any:
        gradients, kept, _ = inputs
        what = replace(self.what, aligned=aligned(kept, gradients))
        kernel, picked = choose_kernel(
            self.found.backward, self.operator, what, self.kernel.saves, self.forced
        )
        self.choices[self.found.backward.name] = picked.describe()
        with _current(self.device):
            launch = prepared(kernel, what, picked.config, inputs)
        if len(self.backwards) >= MAX_PLANS:
            self.backwards.clear()
        self.backwards[key] = launch
        return launch


def prepared(kernel: Kernel, what: Call, config: object, inputs: tuple) -> Any:
    """Returns the function that launches a kernel, called with inputs and scalars.

    Kernels read vectors, such as lengths or a weight, without a stride. The function copies vectors
    that are not contiguous.
    """
    groups = inputs if isinstance(inputs[0], tuple | list) else (inputs,)
    if not any(_is_strided(x) for group in groups for x in group):
        return kernel.prepare(what, config, inputs)
    launch = kernel.prepare(what, config, _dense(inputs))
    return lambda inputs, scalars: launch(_dense(inputs), scalars)


def _is_strided(x: torch.Tensor | None) -> bool:
    return x is not None and x.dim() == 1 and not x.is_contiguous()


def _dense(x: Any) -> Any:
    """Returns the tensors, with copies in place of vectors that are not contiguous."""
    if isinstance(x, tuple | list):
        return tuple(map(_dense, x))
    return x.contiguous() if _is_strided(x) else x


def _current(device: int | None) -> Any:
    return torch.cuda.device(-1 if device is None else device)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, scalars, *inputs):
        outputs, saved = plan.forward(inputs, scalars)
        ctx.plan, ctx.scalars = plan, scalars
        ctx.save_for_backward(*plan.kept(inputs, outputs), *saved)
        ctx.set_materialize_grads(False)  # an output that nobody uses gets None, not zeros
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx, *gradients):
        plan = ctx.plan
        if gradients[0] is None and all(gradient is None for gradient in gradients):
            return (None,) * (2 + len(plan.operator.tensors))
        tensors = ctx.saved_tensors
        kept, saved = tensors[: plan.n_kept], tensors[plan.n_kept :]
        # Autograd turns gradients off here, except under create_graph=True.
        backward = plan.backward_once if torch.is_grad_enabled() else plan.backward
        return plan.route((*backward(gradients, kept, saved, ctx.scalars), None))


# This skips the part of `Function.apply` for functorch: those calls go through `tnp.opaque`.
_apply = super(torch.autograd.Function, _Function).apply
