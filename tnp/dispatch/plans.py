"""Builds and keeps plans. A plan says which function or kernels serve a problem.

A plan owns no tensor and no stream: both come with every call. `tnp.dispatch.selection` chooses the
implementation and the kernels; a plan prepares their launches and runs them. Eager calls
(`tnp.dispatch.call`) and custom operators (`tnp.dispatch.custom_op`) find a plan again in `plans`,
by the key that `key_of` makes.
"""

from __future__ import annotations

import json
import threading
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import itemgetter
from os import environ
from typing import Any, NoReturn

import torch

from tnp.dispatch import derivatives, tuned_tables
from tnp.dispatch.devices import Target
from tnp.dispatch.private import (
    DisableAutocast,
    apply_of,
    clear_saved_tensors,
    current_device,
    environment,
    in_autocast,
    in_forward_mode,
    is_deterministic,
    keep_buffers,
    saved_tensors_hooks,
)
from tnp.dispatch.registry import AUTO, catalog
from tnp.dispatch.selection import (
    AUTO_VARIABLE,
    CHECK_VARIABLE,
    Forced,
    Refused,
    aligned,
    choose_implementation,
    choose_kernel,
    describe,
    kernels_of,
)
from tnp.dispatch.spec import Call, Implementation, Kernel, Operation, Operator
from tnp.dispatch.tuned_tables import Choice
from tnp.util.bounded import Bounded

_grad_enabled = torch.is_grad_enabled  # looked up once: a look-up costs as much as a call
_AUTO, _TABLES, _CHECK = map(
    environ.encodekey, (AUTO_VARIABLE, tuned_tables.VARIABLE, CHECK_VARIABLE)
)


def key_of(tensors: Iterable[torch.Tensor | None], *about: Any) -> tuple:
    """Returns the key of a plan: everything that a decision depends on.

    It holds `about`, the switches of PyTorch and of the environment, and the epoch of the tuned
    tables. For each tensor it holds shape, strides, dtype, device, alignment, and whether a
    gradient is wanted.
    """
    differentiated = _grad_enabled()
    key = (
        *about, is_deterministic(), tuned_tables.epoch,
        environment(_AUTO), environment(_TABLES), environment(_CHECK),
    )  # fmt: skip
    for x in tensors:
        if x is None:
            key += (None,)
        else:
            wants = differentiated and x.requires_grad
            key += ((x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, wants),)
    return key


class Plans:
    """Holds an operator's plans by key: a bounded number, all of one epoch of the tuned tables."""

    def __init__(self) -> None:
        self.by_key = Bounded()
        self.lock = threading.RLock()
        self.epoch = tuned_tables.epoch

    def find(self, key: tuple, make: Callable[[], Any]) -> Any:
        """Returns the value under `key`. If there is none, one thread makes and keeps it."""
        found = self.by_key.get(key)
        if found is None:
            with self.lock:
                found = self.by_key.get(key)
                if found is None:
                    found = make()
                    if self.epoch != tuned_tables.epoch:  # no later call asks for older plans
                        self.forget()
                        self.epoch = tuned_tables.epoch
                    self.by_key[key] = found
        return found

    def forget(self) -> None:
        """Drops every plan: the next call of each problem decides anew."""
        with self.lock:
            self.by_key.clear()


of_operator: dict[str, Plans] = {}


def plans(operator: Operator) -> Plans:
    """Returns this process's plan cache for `operator`."""
    return of_operator.get(operator.name) or of_operator.setdefault(operator.name, Plans())


@contextmanager
def forgotten_after() -> Iterator[None]:
    """Drops the plans that are made inside. Another thread's plans among them are made again."""
    before = {name: set(known.by_key) for name, known in list(of_operator.items())}
    try:
        yield
    finally:
        for name, known in list(of_operator.items()):
            with known.lock:
                for key in set(known.by_key) - before.get(name, set()):
                    del known.by_key[key]


def launch_configs() -> list[dict[str, Any]]:
    """Returns the kernels and configurations of this process's plans, with problem and mode."""
    described = {
        json.dumps({"problem": plan.what.problem.json, "mode": plan.what.mode} | plan.described())
        for known in list(of_operator.values())
        for plan in list(known.by_key.values())
        if isinstance(plan, KernelPlan)
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
    or_refused: bool = False,
) -> PlainPlan | KernelPlan | RefusedPlan:
    """Returns the plan of a call.

    Args:
        operator, implementation, inputs, options: the arguments of `tnp.dispatch.call`.
        wanted: names of the inputs whose gradients are wanted.
        target: the device to plan for; None stands for the inputs' device.
        forced: operation → kernel and configuration, for gates and tuning.
        saves: the form in which the forward kernel must save its tensors, or None for any.
        apart: True where results must share no memory.
        or_refused: whether to return a `RefusedPlan` if the implementation cannot run here.

    Raises:
        ValueError: the inputs do not fit together, or there is no such name.
        Refused: the implementation cannot run here, with the reason.
    """
    what = replace(describe(operator, inputs, options, wanted, target), apart=apart)
    if _is_empty(what):
        return _empty_plan(operator, implementation, what, inputs, saves)
    try:
        chosen, found = choose_implementation(operator, implementation, what)
    except Refused as error:
        if or_refused:
            return RefusedPlan(what, error)
        raise
    if found.run is not None:
        return PlainPlan(what, found, chosen)
    first = next(x for x in inputs if x is not None)
    plan = KernelPlan(operator, what, found, chosen, first.device, saves, forced)
    plan.bind(inputs)
    return plan


def _is_empty(what: Call) -> bool:
    return 0 in dict(what.problem.sizes).values()


def _empty_plan(
    operator: Operator, implementation: str, what: Call, inputs: tuple, saves: str | None
) -> PlainPlan:
    """Returns a plan that runs the reference, and casts to the implementation's dtypes."""
    run, saved = operator.reference, None
    if implementation.partition(":")[0] != AUTO:
        found = catalog().load(operator.name, implementation)
        if found.forward is not None:
            kernel = next(iter(kernels_of(found.forward, saves).values()))
            named = operator.of_results(dict(operator.call_options(what.problem)))
            saved = partial(kernel.empty, what.wanted, **named)
            dtypes = [x.dtype for x in saved(inputs)[0]]

            def run(*arguments: Any, **options: Any) -> Any:
                outputs = operator.reference(*arguments, **options)
                if not isinstance(outputs, tuple):
                    return outputs.to(dtypes[0])
                return tuple(x.to(dtype) for x, dtype in zip(outputs, dtypes, strict=True))

    found = Implementation(operator.implementations[0].name, run=run)
    return PlainPlan(what, found, Choice("empty"), saved)


class PlainPlan:
    """Runs a function that PyTorch differentiates."""

    def __init__(
        self,
        what: Call,
        found: Implementation,
        chosen: Choice,
        empty: Callable[[tuple], tuple[tuple, tuple]] | None = None,
    ) -> None:
        self.what, self.found, self.chosen, self.empty = what, found, chosen, empty
        operator = catalog().operators[what.problem.op]
        self.function, self.options = found.run, dict(operator.call_options(what.problem))
        if found.compile:
            self.function = compiled(found)

    def described(self) -> dict[str, dict]:
        """Returns {}, because it has no kernels of ours."""
        return {}

    def run(self, inputs: tuple, scalars: tuple) -> Any:
        """Returns the operator's outputs."""
        return self.function(*inputs, *scalars, **self.options)

    def forward(self, inputs: tuple, scalars: tuple) -> tuple[tuple, tuple]:
        """Returns the outputs, and tensors like the tensors that a kernel would save."""
        outputs, (_, saved) = self.run(inputs, scalars), self.empty(inputs)
        return outputs if isinstance(outputs, tuple) else (outputs,), saved


class RefusedPlan:
    """Stands for a call that its implementation cannot serve. `run` raises the reason."""

    def __init__(self, what: Call, error: Refused) -> None:
        self.what, self.error = what, error

    def run(self, inputs: tuple, scalars: tuple) -> NoReturn:
        raise Refused(*self.error.args)


def compiled(found: Implementation) -> Any:
    """Returns `found.run` through torch.compile, with a graph for every shape."""
    keep_buffers()  # benchmarks time many backward passes after one forward pass
    mode = {"default": None, "max-autotune": "max-autotune-no-cudagraphs"}[found.compile]
    return torch.compile(found.run, fullgraph=True, dynamic=False, mode=mode)


class Differentiated:
    """Serves as base class of plans that run behind `_Function`, the `autograd.Function` of all
    operators.

    A subclass has `forward(inputs, scalars)`, which returns the outputs and the saved tensors. Its
    `backward(gradients, kept, saved, scalars)` returns gradients in the order of
    `Operator.differentiated`, None where not wanted.
    """

    def __init__(self, operator: Operator, implementation: str) -> None:
        self.operator, self.implementation = operator, implementation
        names = operator.tensors
        everything = (*names, *operator.outputs)
        self.keep = [everything.index(name) for name in operator.kept]
        self.n_kept = len(self.keep)
        # Picks from (*gradients, None): None for the plan, None for the scalars, then each input's
        # gradient.
        order = operator.differentiated
        places = [order.index(name) if name in order else -1 for name in names]
        self.route = itemgetter(-1, -1, *places)

    def differentiated(self, inputs: tuple, scalars: tuple) -> Any:
        """Returns the operator's outputs, with their graph."""
        return _apply(self, scalars, *inputs)

    def kept(self, inputs: tuple, outputs: tuple) -> list:
        """Returns the inputs and outputs that the backward pass reads."""
        everything = (*inputs, *outputs)
        return [everything[at] for at in self.keep]

    def refusal(self, what: str) -> RuntimeError:
        """Returns the error "this implementation does not give `what`"."""
        return derivatives.refusal(self.operator, self.implementation, what)

    def backward_once(
        self, gradients: tuple, kept: tuple, saved: tuple, scalars: tuple, are_hooked: bool
    ) -> tuple:
        """Does the same as `backward`. Differentiating its results raises an error."""
        run = partial(self.backward, scalars=scalars, are_hooked=are_hooked)
        return derivatives.once(self.refusal(derivatives.SECOND), run, gradients, kept, saved)


class KernelPlan(Differentiated):
    """Runs our kernels: one forward launch, and a backward launch per layout of gradients.

    The plan of a custom operator's backward pass has no forward launch, and the given `saves`.
    """

    def __init__(
        self,
        operator: Operator,
        what: Call,
        found: Implementation,
        chosen: Choice,
        device: torch.device,
        saves: str | None = None,
        forced: Forced | None = None,
    ) -> None:
        super().__init__(operator, found.name)
        self.what, self.found, self.chosen = what, found, chosen
        self.saves, self.forced = saves, forced
        self.choices: ChainMap[str, dict] = ChainMap()  # a composed kernel's layers are included
        self.device = device.index if device.type == "cuda" else None
        self.backwards = Bounded()
        self.run = self.differentiated if what.wanted else self._plain

    def described(self) -> dict[str, dict]:
        """Returns {operation: kernel and configuration}, also for a composed kernel's layers."""
        return {name: one for part in self.choices.maps for name, one in part.items()}

    def bind(self, inputs: tuple) -> None:
        """Chooses and prepares the forward kernel."""
        self.kernel, self.launch = self._prepared(self.found.forward, self.what, inputs)
        self.saves = self.kernel.saves

    def forward(self, inputs: tuple, scalars: tuple) -> tuple[tuple, tuple]:
        """Returns the outputs, and the tensors saved for the backward pass."""
        return self._launched(self.launch, inputs, scalars)

    def _launched(self, launch: Callable[..., Any], inputs: tuple, scalars: tuple) -> Any:
        if in_autocast():  # autocast would cast in PyTorch's part of a launch
            with DisableAutocast():
                return self._launched(launch, inputs, scalars)
        if self.device is None or self.device == current_device():
            return launch(inputs, scalars)
        with torch.cuda.device(self.device):  # where Triton launches
            return launch(inputs, scalars)

    def _plain(self, inputs: tuple, scalars: tuple) -> Any:
        outputs, _ = self.forward(inputs, scalars)
        return outputs if len(outputs) > 1 else outputs[0]

    def backward(
        self, gradients: tuple, kept: tuple, saved: tuple, scalars: tuple, are_hooked: bool = True
    ) -> tuple:
        """Returns gradients in the order of `differentiated`, None where not wanted.

        `are_hooked` is True if hooks may have replaced kept and saved tensors by copies.
        """
        if in_forward_mode() and derivatives.has_tangent(gradients):
            raise self.refusal(derivatives.FORWARD_MODE)
        # Gradients may have any strides, and copies made by hooks another alignment.
        decide = (*gradients, *kept, *saved) if are_hooked else gradients
        try:
            key = tuple(
                [None if x is None else (x.stride(), x.dtype, x.data_ptr() & 15) for x in decide]
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

    @property
    def _lock(self) -> threading.RLock:
        return plans(self.operator).lock

    def _prepare(self, key: tuple, tensors: tuple[tuple, tuple, tuple]) -> Any:
        gradients, kept, _ = tensors
        what = replace(self.what, aligned=aligned(kept, gradients))
        _, launch = self._prepared(self.found.backward, what, tensors)
        self.backwards[key] = launch
        return launch

    def _prepared(self, operation: Operation, what: Call, inputs: tuple) -> tuple[Kernel, Any]:
        """Returns the kernel that serves an operation, and the function that launches it."""
        kernel, picked = choose_kernel(operation, self.operator, what, self.saves, self.forced)
        self.choices[operation.name] = picked.describe()
        if operation is self.found.backward and _is_empty(what):
            return kernel, partial(_zeros, kernel, what.wanted)
        with torch.cuda.device(-1 if self.device is None else self.device):
            launch = prepared(kernel, what, picked.config, inputs)
        if hasattr(launch, "choices"):
            self.choices.maps.append(launch.choices)
        return kernel, launch


def _zeros(kernel: Kernel, wanted: tuple[str, ...], tensors: tuple, _scalars: tuple) -> tuple:
    """Returns gradients of zeros, as a backward launch on an empty problem does."""
    arriving = set(map(id, tensors[0]))
    results = kernel.empty(wanted, tensors)
    return tuple(x if x is None or id(x) in arriving else torch.zeros_like(x) for x in results)


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
    """Returns the tensors with every vector contiguous, copied where it is not."""
    if isinstance(x, tuple | list):
        return tuple(map(_dense, x))
    return x.contiguous() if _is_strided(x) else x


def _laid_out(x: torch.Tensor | None, strides: tuple[int, ...]) -> torch.Tensor | None:
    """Returns x with the strides that it was saved with, copied where hooks have changed them."""
    if x is None or x.stride() == strides or 0 in strides:
        return x
    return x.new_empty_strided(x.shape, strides).copy_(x)


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, plan, scalars, *inputs):
        outputs, saved = plan.forward(inputs, scalars)
        tensors = *plan.kept(inputs, outputs), *saved
        ctx.plan, ctx.scalars, ctx.strides = plan, scalars, None
        if saved_tensors_hooks(False) is not None:  # hooks may return copies with another layout
            ctx.strides = [None if x is None else x.stride() for x in tensors]
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)  # the gradient of an unused output is None, not zeros
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx, *gradients):
        plan = ctx.plan
        if gradients[0] is None and all(gradient is None for gradient in gradients):
            return (None,) * (2 + len(plan.operator.tensors))
        tensors, are_hooked = ctx.saved_tensors, ctx.strides is not None
        if are_hooked:
            tensors = tuple(map(_laid_out, tensors, ctx.strides))
        kept, saved = tensors[: plan.n_kept], list(tensors[plan.n_kept :])
        # A launch may empty this list, so that memory is free before it ends.
        del tensors
        clear_saved_tensors(ctx)
        # Autograd turns gradients off here, except under create_graph=True.
        backward = plan.backward_once if torch.is_grad_enabled() else plan.backward
        results = backward(gradients, kept, saved, ctx.scalars, are_hooked)
        return plan.route((*results, None))


_apply = apply_of(_Function)  # calls under a transform go through `tnp.dispatch.custom_op`
