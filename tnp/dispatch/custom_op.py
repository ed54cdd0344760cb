"""Runs our operators as custom operators where PyTorch compiles, traces or watches calls.

`torch.compile`, fake tensors, selective checkpoints and function transforms see only calls of
PyTorch's operators. They do not see a kernel that Python launches itself. There we call

    tnp::rms_norm_differentiable(Tensor x, Tensor weight, float eps, str call) -> Tensor[]

This operator is defined from the names in `Operator` at its first use. Autograd makes two operators
of it, `tnp::rms_norm` and `tnp::rms_norm_backward`: compiled graphs hold these, and modes see them.
`call` is JSON of all that decides the launch. Both run plans, as an eager call does
(`tnp.dispatch.plans`), but their results share no memory (`Call.apart`). A compiler sees only the
empty tensors of `Kernel.empty`.

PyTorch's own implementations are called directly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from hashlib import sha256
from operator import index
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.compiler.config as compiler_config

from tnp.dispatch import derivatives, devices
from tnp.dispatch.plans import Differentiated, KernelPlan, PlainPlan, build, key_of, plans
from tnp.dispatch.private import constant_in_graphs, dispatch_modes, in_forward_mode
from tnp.dispatch.registry import AUTO, catalog
from tnp.dispatch.selection import (
    Refused,
    choose_implementation,
    choose_kernel,
    kernels_of,
    refusal,
    wanted_of,
)
from tnp.dispatch.spec import Call, Case, Implementation, Kernel, Operation, Operator, Problem
from tnp.dispatch.tuned_tables import Choice
from tnp.util.bounded import MOST

# Custom operator → function that counts a call's operations, for PyTorch's FlopCounterMode.
_formulas: dict[Any, Callable[..., int]] = {}
_library = torch.library.Library("tnp", "FRAGMENT")
_defined: dict[str, CustomOperator] = {}
# Functions that torch.compile traces through, named "run__operator__implementation". It must find
# each function again by name. A dictionary would not do: torch.compile does not see entries that
# are added while it traces.
_plain = ModuleType(f"{__name__}.plain")
_RUN = "run__"
_REFUSED = "refused"  # replaces the argument `call`
_grad_enabled = torch.is_grad_enabled


def digest_of(*folders: Path) -> str:
    """Returns a digest of the Python files in folders."""
    files = sorted(file for folder in folders for file in folder.rglob("*.py"))
    return sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


# PyTorch keeps compiled graphs on disk. Their keys hold an operator's name and not what it saves.
# Without the digest a graph from before a change of tnp would be used after it.
_code = digest_of(*(Path(__file__).parents[1] / name for name in ("dispatch", "ops")))
compiler_config.cache_key_tag += f" tnp {_code}"


def call(
    operator: Operator, implementation: str, inputs: tuple, scalars: tuple, options: tuple,
    or_none: bool = False,
) -> Any:  # fmt: skip
    """Does the same as `tnp.dispatch.call`, through custom operators."""
    wanted = wanted_of(operator, inputs)
    first = next(x for x in inputs if x is not None)
    values = operator.describe(*inputs, **dict(options))
    dtype = values.pop("dtype", None) or str(first.dtype).removeprefix("torch.")
    sizes = tuple([values[name] for name in operator.sizes])
    named = zip(operator.tensors, inputs, strict=True)
    given = tuple([n for n, x in named if n in operator.optional and x is not None])
    read_off = tuple([(name, index(values[name])) for name in operator.read_off if name in values])
    known = (operator.name, implementation, dtype, first.device, wanted, options, read_off, given)
    tracing = torch.compiler.is_compiling()
    text = None if or_none else _decided(*known, None, tracing)
    if text is None:  # the choice depends on sizes: they become constants of the graph
        text = _decided(*known, tuple([index(size) for size in sizes]), tracing, or_none)
    if text == _REFUSED:
        return None
    if text.startswith(_RUN):
        return getattr(_plain, text)(*inputs, *scalars, **dict(options))
    if not tracing:
        _count_flops()
        _refuse_transforms(operator, text, inputs)
    op = getattr(torch.ops.tnp, f"{operator.name}_differentiable").default
    outputs = op(*inputs, *scalars, text)
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def _count_flops() -> None:
    """Registers our operators with PyTorch's `FlopCounterMode`, also with active counters."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:  # not imported, so no counter is active; importing it is slow
        return
    counting = [mode.counter.flop_registry for mode in dispatch_modes() if hasattr(mode, "counter")]
    for registry in (counter.flop_registry, *counting):
        registry.update(_formulas)


def _refuse_transforms(operator: Operator, text: str, inputs: tuple) -> None:
    """Raises RuntimeError under a transform of torch.func, or for inputs with a tangent."""
    asked = None
    if derivatives.is_transforming():
        asked = derivatives.TRANSFORMED
    elif in_forward_mode() and derivatives.has_tangent(inputs):
        asked = derivatives.FORWARD_MODE
    if asked is not None:
        raise custom_operator(operator).call_of(text).refusal(asked)


@constant_in_graphs
def _decided(
    op: str,
    implementation: str,
    dtype: str,
    device: torch.device,
    wanted: tuple[str, ...],
    options: tuple,
    read_off: tuple,
    given: tuple[str, ...],
    sizes: tuple[int, ...] | None,
    tracing: bool = False,
    or_none: bool = False,
) -> str | None:
    """Returns the custom operator's argument `call`, or the name of a function in `_plain`.

    Returns None where `sizes` is None and the choice depends on the sizes. A compiled graph holds
    the result as a constant: later changes of TNP_AUTO and TNP_TABLES do not reach its choice of an
    implementation.
    """
    operator = catalog().operator(op)
    custom = custom_operator(operator)
    about = implementation, dtype, device, wanted, options, read_off, given, sizes
    key = key_of((), "decided", *about, or_none)
    try:
        text = custom.plans.find(key, partial(_decide, operator, *about))
    except Refused:
        if not or_none:
            raise
        text = custom.plans.find(key, lambda: _REFUSED)
    if not text or text == _REFUSED:
        return text or None
    if text.startswith(_RUN):
        if not hasattr(_plain, text):
            found = catalog().load(op, text.removeprefix(f"{_RUN}{op}__"))
            run = found.run if found.traceable else torch.compiler.disable(found.run)
            setattr(_plain, text, run)
        return text
    if tracing:  # torch.compile runs this while it traces, under the caller's transforms
        if derivatives.is_transforming():
            raise custom.call_of(text).refusal(derivatives.TRANSFORMED)
        if in_forward_mode():
            raise custom.call_of(text).refusal(derivatives.FORWARD_MODE)
    return text


def _decide(
    operator: Operator, implementation: str, dtype: str, device: torch.device,
    wanted: tuple[str, ...], options: tuple, read_off: tuple, given: tuple[str, ...],
    sizes: tuple[int, ...] | None,
) -> str | None:  # fmt: skip
    """Computes the result of `_decided`, which caches it."""
    of_sizes = dict(zip(operator.sizes, sizes or (1,) * len(operator.sizes), strict=True))
    on = dict.fromkeys(given, True) | dict(options + read_off)
    what = Call(operator.problem(dtype, **on | of_sizes), devices.of_device(device), wanted)
    if sizes is None:
        if implementation.partition(":")[0] == AUTO:
            return ""
        found = catalog().load(operator.name, implementation)
        if found.run is not None:
            _require(operator, found, what)
            return f"{_RUN}{operator.name}__{found.name}"
        forms = {kernel.saves for kernel in kernels_of(found.forward).values()}
        if len(forms) > 1:
            return ""
        (saves,) = forms
    else:
        _, found = choose_implementation(operator, implementation, what)
        if found.run is not None:
            return f"{_RUN}{operator.name}__{found.name}"
        saves = choose_kernel(found.forward, operator, what)[0].saves
    content = {"implementation": found.name, "saves": saves, "wanted": wanted, "given": given}
    return json.dumps(content | {"options": options, "read_off": read_off, "dtype": dtype})


def _require(operator: Operator, found: Implementation, what: Call) -> None:
    """Raises RuntimeError if PyTorch's implementation takes this call at no sizes."""
    limits = Implementation(
        found.name, run=found.run, dtypes=found.dtypes, options=found.options,
        gradients=found.gradients,
    )  # fmt: skip
    reason = limits.refuses(what)
    if reason is not None:
        raise RuntimeError(refusal(operator, found, reason))


def custom_operator(operator: Operator) -> CustomOperator:
    """Returns the operators of PyTorch for `operator`, and defines them at their first use."""
    if operator.name not in _defined:
        with plans(operator).lock:
            if operator.name not in _defined:
                _defined[operator.name] = CustomOperator(operator)
    return _defined[operator.name]


def custom_op(operator: Operator) -> Any:
    """Returns `torch.ops.tnp.<name>.default`, the forward pass that modes and policies see."""
    return custom_operator(operator).forward


class _CustomCall(Differentiated):
    """Runs the calls whose argument `call` is `text`. Their passes are custom operators."""

    def __init__(self, custom: CustomOperator, text: str) -> None:
        self.custom, self.text, content = custom, text, json.loads(text)
        super().__init__(custom.operator, content["implementation"])
        self.dtype, self.saves = content["dtype"], content["saves"]
        self.wanted = tuple(content["wanted"])
        self.options = tuple((name, value) for name, value in content["options"])
        self.read_off = tuple((name, value) for name, value in content["read_off"])
        self.given = dict.fromkeys(content["given"], True)  # optional inputs
        self.found = catalog().load(custom.operator.name, self.implementation)
        self._routes: dict[tuple[bool, ...], list[int | None]] = {}  # keyed by absent gradients

    def forward(self, inputs: tuple, scalars: tuple) -> tuple[tuple, list]:
        """Returns the outputs and the saved tensors. `scalars` begin with the problem's sizes."""
        outputs, saved = self.custom.forward(*inputs, *scalars[1:], self.text)
        return tuple(outputs), saved

    def backward(
        self, gradients: tuple, kept: tuple, saved: tuple, scalars: tuple, are_hooked: bool
    ) -> tuple:
        """Returns gradients in the order of `Operator.differentiated`, None where not wanted."""
        if derivatives.is_batched(gradients):
            raise self.refusal(derivatives.BATCHED)
        tensors = list(gradients), list(kept), list(saved)
        absent = tuple(x is None for x in gradients)
        if absent not in self._routes:
            self._routes[absent] = _places(self.empty_gradients(tensors), gradients)
        found = (*gradients, *self.custom.backward(*tensors, *scalars, self.text))
        return tuple(None if at is None else found[at] for at in self._routes[absent])

    def sizes(self, inputs: tuple) -> list:
        """Returns the problem's sizes in the operator's order."""
        values = self.operator.describe(*inputs, **dict(self.options))
        return [values[size] for size in self.operator.sizes]

    def problem(self, sizes: Iterable) -> Problem:
        """Returns the problem of these sizes, which are in the operator's order."""
        named = dict(zip(self.operator.sizes, map(int, sizes), strict=True))
        options = self.given | dict(self.options + self.read_off)
        return self.operator.problem(self.dtype, **options | named)

    def flops(self, problem: Problem, pass_: str) -> int:
        """Returns the number of operations of a pass, as the implementation counts them."""
        work = (self.found.work or self.operator.work)(Case(problem), pass_)
        return int(sum(work.flops.values()))

    def empty_results(self, inputs: tuple) -> tuple[tuple, tuple]:
        """Returns tensors like the outputs, and tensors like the saved ones."""
        named = self.operator.of_results(dict(self.options))
        return self._kernel(self.found.forward).empty(self.wanted, inputs, **named)

    def empty_gradients(self, tensors: Iterable) -> tuple:
        """Returns tensors like the gradients; `tensors` are gradients, kept and saved."""
        return self._kernel(self.found.backward).empty(self.wanted, tuple(map(tuple, tensors)))

    def _kernel(self, operation: Operation) -> Kernel:
        """Returns any kernel that saves in this form: all of them return tensors of equal sizes."""
        return next(iter(kernels_of(operation, self.saves).values()))


class CustomOperator:
    """Holds PyTorch's custom operators for one operator of ours.

    `tnp::<name>` launches the forward pass and `tnp::<name>_backward` the backward pass. Compiled
    graphs hold these two, and modes see them. They have no autograd, so PyTorch's dispatcher calls
    their Python at once. `tnp::<name>_differentiable` calls the two, and has autograd.
    """

    def __init__(self, operator: Operator) -> None:
        self.operator, self.plans = operator, plans(operator)
        self.n_tensors = len(operator.tensors)
        self.call_of = lru_cache(MOST)(partial(_CustomCall, self))  # keyed by argument `call`
        optional = ["?" if one in operator.optional else "" for one in operator.tensors]
        inputs = [f"Tensor{o} {one}, " for o, one in zip(optional, operator.tensors, strict=True)]
        scalars = [f"float {one}, " for one in operator.scalars]
        given = "".join([*inputs, *scalars, "str call"])
        passes = "Tensor?[] gradients, Tensor?[] kept, Tensor[] saved, SymInt[] sizes, "
        given_back = "".join([passes, *scalars, "str call"])
        name = operator.name
        _library.define(f"{name}({given}) -> (Tensor[], Tensor[])")
        _library.define(f"{name}_backward({given_back}) -> Tensor[]")
        _library.define(f"{name}_differentiable({given}) -> Tensor[]")
        _implement(name, self._forward, self._fake_forward)
        _implement(f"{name}_backward", self._backward, self._fake_backward)
        for key in ("FuncTorchBatched", "Batched"):  # torch.func, is_grads_batched
            _library.impl(f"{name}_backward", self._batched_backward, key)
        _library.impl(f"{name}_differentiable", self._differentiable, "CompositeImplicitAutograd")
        self.forward = getattr(torch.ops.tnp, name).default
        self.backward = getattr(torch.ops.tnp, f"{name}_backward").default
        self.differentiable = getattr(torch.ops.tnp, f"{name}_differentiable").default
        _formulas[self.forward.overloadpacket] = self._forward_flops
        _formulas[self.backward.overloadpacket] = self._backward_flops

    def _differentiable(self, *arguments: Any) -> list[torch.Tensor]:
        custom_call, n = self.call_of(arguments[-1]), self.n_tensors
        if not (custom_call.wanted and _grad_enabled()):
            return self.forward(*arguments)[0]
        inputs = arguments[:n]
        outputs = custom_call.differentiated(inputs, (custom_call.sizes(inputs), *arguments[n:-1]))
        return list(outputs) if isinstance(outputs, tuple) else [outputs]

    def _forward(self, *arguments: Any) -> tuple:
        if _grad_enabled():  # autograd must not look into a launch
            with torch.no_grad():
                return self._forward(*arguments)
        inputs, text = arguments[: self.n_tensors], arguments[-1]
        key = key_of(inputs, text)
        plan = self.plans.by_key.get(key)
        if plan is None:
            plan = self.plans.find(key, partial(self._forward_plan, inputs, text))
        return plan.forward(inputs, arguments[self.n_tensors : -1])

    def _forward_plan(self, inputs: tuple, text: str) -> PlainPlan | KernelPlan:
        asked = self.call_of(text)
        return build(
            self.operator, asked.implementation, inputs, asked.options, asked.wanted,
            saves=asked.saves, apart=True,
        )  # fmt: skip

    def _backward(self, gradients: list, kept: list, saved: list, sizes: list, *rest: Any) -> list:
        if _grad_enabled():
            with torch.no_grad():
                return self._backward(gradients, kept, saved, sizes, *rest)
        first = next(x for x in (*kept, *saved) if x is not None)
        key = key_of((), rest[-1], first.device, *sizes)
        plan = self.plans.by_key.get(key)
        if plan is None:
            made = partial(self._backward_plan, first.device, sizes, rest[-1])
            plan = self.plans.find(key, made)
        results = plan.backward(tuple(gradients), tuple(kept), tuple(saved), rest[:-1])
        return _new_tensors(results, gradients)

    def _backward_plan(self, device: torch.device, sizes: list, text: str) -> KernelPlan:
        asked = self.call_of(text)
        problem = asked.problem(sizes)
        what = Call(problem, devices.of_device(device), asked.wanted, apart=True)
        chosen = Choice(asked.implementation, source="named")
        return KernelPlan(self.operator, what, asked.found, chosen, device, asked.saves)

    def _batched_backward(self, *arguments: Any) -> None:
        raise self.call_of(arguments[-1]).refusal(derivatives.BATCHED)

    def _fake_forward(self, *arguments: Any) -> tuple:
        outputs, saved = self.call_of(arguments[-1]).empty_results(arguments[: self.n_tensors])
        return list(outputs), list(saved)

    def _fake_backward(self, gradients: list, *rest: Any) -> list:
        tensors = gradients, *rest[:2]
        return _new_tensors(self.call_of(rest[-1]).empty_gradients(tensors), gradients)

    def _forward_flops(self, *arguments: Any, out_val: Any = None, **_: Any) -> int:
        custom_call, inputs = self.call_of(arguments[-1]), arguments[: self.n_tensors]
        return custom_call.flops(custom_call.problem(custom_call.sizes(inputs)), "forward")

    def _backward_flops(self, *arguments: Any, out_val: Any = None, **_: Any) -> int:
        custom_call, sizes = self.call_of(arguments[-1]), arguments[3]
        return custom_call.flops(custom_call.problem(sizes), "backward")


def _implement(name: str, real: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """Registers an operator's launch and its fake for compilers, both without autograd."""
    for key in ("CPU", "CUDA"):
        _library.impl(name, real, key)
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"tnp::{name}", fake, lib=_library)


def _new_tensors(results: Iterable, gradients: Iterable) -> list[torch.Tensor]:
    """Returns the new tensors among the results, each of them once.

    A kernel may return an incoming gradient, or the same tensor for two inputs, as for a sum. But
    the results of a custom operator must not share memory.
    """
    seen, new = {id(None), *map(id, gradients)}, []
    for x in results:
        if id(x) not in seen:
            seen.add(id(x))
            new.append(x)
    return new


def _places(results: tuple, gradients: tuple) -> list[int | None]:
    """Returns each result's place in the incoming gradients followed by `_new_tensors`, or None."""
    everything = (*gradients, *_new_tensors(results, gradients))
    places: dict[int, int | None] = {id(x): at for at, x in enumerate(everything)}
    places[id(None)] = None
    return [places[id(x)] for x in results]
