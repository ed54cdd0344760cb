"""Runs our operators as custom operators where PyTorch compiles, traces or watches calls.

`torch.compile`, fake tensors, selective checkpoints and function transforms see only calls of
PyTorch's operators. They do not see a kernel that Python launches itself. There we call

    tnp::rms_norm(Tensor x, Tensor weight, float eps, str call) -> (Tensor[], Tensor[])

which is defined from the operator's own names at its first use. It returns the outputs and the
tensors saved for the backward pass. The backward pass is a second custom operator. `call` is JSON
of all that decides the launch. The custom operator runs a plan, as an eager call does, but its
results share no memory (`Call.apart`). A compiler sees only the empty tensors of `Kernel.empty`.

PyTorch's own implementations are called directly.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from functools import partial
from operator import index
from types import ModuleType
from typing import Any

import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tnp import choice, derivatives, targets
from tnp.catalog import AUTO, catalog
from tnp.contract import Call, Case, Implementation, Kernel, Operator, Problem
from tnp.plans import KernelPlan, PlainPlan, build, plans, prepared
from tnp.selection import (
    aligned,
    choose_implementation,
    choose_kernel,
    kernels_of,
    refusal,
    wanted_of,
)

# Custom operator → function that counts a call's operations, for PyTorch's FlopCounterMode.
_formulas: dict[Any, Callable[..., int]] = {}
_library = torch.library.Library("tnp", "FRAGMENT")
_defined: dict[str, Any] = {}
# Functions that torch.compile traces through, named "run__operator__implementation". It must find
# each function again by name. A dictionary would not do: torch.compile does not see entries that
# are added while it traces.
_plain = ModuleType(f"{__name__}.plain")
_RUN = "run__"


def call(
    operator: Operator, implementation: str, inputs: tuple, scalars: tuple, options: tuple
) -> Any:
    """Does the same as `tnp.dispatch.call`, through operators that PyTorch sees."""
    wanted = wanted_of(operator, inputs)
    first = next(x for x in inputs if x is not None)
    values = operator.describe(*inputs, **dict(options))
    dtype = values.pop("dtype", None) or str(first.dtype).removeprefix("torch.")
    sizes = tuple([values[name] for name in operator.sizes])
    named = zip(operator.tensors, inputs, strict=True)
    given = tuple([n for n, x in named if n in operator.optional and x is not None])
    shown = tuple([(name, index(values[name])) for name in operator.shown if name in values])
    known = (operator.name, implementation, dtype, first.device, wanted, options, shown, given)
    tracing = torch.compiler.is_compiling()
    text = _decided(*known, None, tracing)
    if text is None:  # the sizes decide: they become constants of the graph
        text = _decided(*known, tuple([index(size) for size in sizes]), tracing)
    if text.startswith(_RUN):
        return getattr(_plain, text)(*inputs, *scalars, **dict(options))
    if not tracing:
        _count_flops()
        _require_derivatives(operator, text, inputs)
    outputs, _saved = getattr(torch.ops.tnp, operator.name).default(*inputs, *scalars, text)
    return tuple(outputs) if len(outputs) > 1 else outputs[0]


def _count_flops() -> None:
    """Tells PyTorch's counters, also those that count now, how many operations our calls take."""
    counter = sys.modules.get("torch.utils.flop_counter")
    if counter is None:  # nobody imported it, so nobody counts; importing it is slow
        return
    modes = _get_current_dispatch_mode_stack()
    counting = [mode.counter.flop_registry for mode in modes if hasattr(mode, "counter")]
    for registry in (counter.flop_registry, *counting):
        registry.update(_formulas)


def _require_derivatives(operator: Operator, text: str, inputs: tuple) -> None:
    """Raises RuntimeError where the caller asks for more than first derivatives backward."""
    asked = None
    if derivatives.is_transforming():
        asked = derivatives.TRANSFORMED
    elif forward_ad._current_level >= 0 and derivatives.has_tangent(inputs):
        asked = derivatives.FORWARD_MODE
    if asked is not None:
        raise derivatives.refusal(operator, json.loads(text)["implementation"], asked)


def _decided(
    op: str,
    implementation: str,
    dtype: str,
    device: torch.device,
    wanted: tuple[str, ...],
    options: tuple,
    shown: tuple,
    given: tuple[str, ...],
    sizes: tuple[int, ...] | None,
    tracing: bool = False,
) -> str | None:
    """Returns the custom operator's argument `call`, or the name of a function in `_plain`.

    Returns None where `sizes` is None and the choice depends on the sizes.
    """
    operator = catalog().operator(op)
    custom_op(operator)
    if sizes is None:
        if implementation.partition(":")[0] == AUTO:
            return None
        found = catalog().load(op, implementation)
        implementation = found.name
        if found.run is not None:
            what = Call(
                _sizeless(operator, dtype, given, options + shown),
                targets.of_device(device),
                wanted,
            )
            _require(operator, found, what)
            return _plain_form(operator, found, options)
        forms = {kernel.saves for kernel in kernels_of(found.forward).values()}
        if len(forms) > 1:
            return None
        (saves,) = forms
    else:
        named = dict(zip(operator.sizes, sizes, strict=True))
        on = dict.fromkeys(given, True) | dict(options + shown)
        what = Call(operator.problem(dtype, **on | named), targets.of_device(device), wanted)
        chosen, found = choose_implementation(operator, implementation, what)
        if found.run is not None:
            return _plain_form(operator, found, options)
        implementation = chosen.name
        saves = choose_kernel(found.forward, operator, what)[0].saves
    if tracing:  # torch.compile runs this while it traces, under the caller's transforms
        if derivatives.is_transforming():
            raise derivatives.refusal(operator, implementation, derivatives.TRANSFORMED)
        if forward_ad._current_level >= 0:
            raise derivatives.refusal(operator, implementation, derivatives.FORWARD_MODE)
    content = {"implementation": implementation, "saves": saves, "wanted": wanted, "given": given}
    return json.dumps(content | {"options": options, "shown": shown, "dtype": dtype})


# torch.compiler.assume_constant_result sets this too, but it imports Dynamo, which would double the
# time that `import tnp` takes.
_decided._dynamo_marked_constant = True


def _sizeless(operator: Operator, dtype: str, given: tuple[str, ...], options: tuple):
    """Returns a problem whose dtype and options are known, and whose sizes are all 1."""
    sizes = dict.fromkeys(operator.sizes, 1)
    return operator.problem(dtype, **dict.fromkeys(given, True) | dict(options) | sizes)


def _require(operator: Operator, found: Implementation, what: Call) -> None:
    """Raises RuntimeError where PyTorch's form does not take this call at any sizes."""
    limits = Implementation(
        found.name, run=found.run, dtypes=found.dtypes, options=found.options,
        gradients=found.gradients,
    )  # fmt: skip
    reason = limits.refuses(what)
    if reason is not None:
        raise RuntimeError(refusal(operator, found, reason))


def _plain_form(operator: Operator, found: Implementation, options: tuple) -> str:
    text = f"{_RUN}{operator.name}__{found.name}"
    run = found.run if found.traceable else torch.compiler.disable(found.run)
    setattr(_plain, text, run)
    return text


def custom_op(operator: Operator) -> Any:
    """Returns `torch.ops.tnp.<name>.default`, and defines it at its first use."""
    if operator.name not in _defined:
        with plans(operator).lock:
            if operator.name not in _defined:
                _defined[operator.name] = _define(operator)
    return _defined[operator.name]


class _Spec:
    """The parsed argument `call` of a custom operator."""

    def __init__(self, operator: Operator, text: str) -> None:
        content = json.loads(text)
        self.operator, self.saves = operator, content["saves"]
        self.implementation, self.dtype = content["implementation"], content["dtype"]
        self.wanted = tuple(content["wanted"])
        self.options = tuple((name, value) for name, value in content["options"])
        self.shown = tuple((name, value) for name, value in content["shown"])
        self.given = dict.fromkeys(content["given"], True)  # optional inputs
        self.found = catalog().load(operator.name, self.implementation)
        self._routes: dict[tuple[bool, ...], list[int | None]] = {}

    def problem(self, sizes: Iterable) -> Problem:
        """Returns the problem of these sizes, which are in the operator's order."""
        named = dict(zip(self.operator.sizes, map(int, sizes), strict=True))
        options = self.given | dict(self.options + self.shown)
        return self.operator.problem(self.dtype, **options | named)

    def flops(self, problem: Problem, pass_: str) -> int:
        """Returns the number of operations of a pass, as the implementation counts them."""
        work = (self.found.work or self.operator.work)(Case(problem), pass_)
        return int(sum(work.flops.values()))

    def kernel(self, operation: Any) -> Kernel:
        """Returns any kernel that saves in this form: all of them return tensors of equal sizes."""
        return next(iter(kernels_of(operation, self.saves).values()))

    def routes(self, gradients: tuple, kept: list, saved: list) -> list[int | None]:
        """Returns each gradient's place in the incoming gradients followed by the results."""
        absent = tuple(gradient is None for gradient in gradients)
        if absent not in self._routes:
            kernel = self.kernel(self.found.backward)
            results = kernel.empty(self.wanted, (tuple(gradients), tuple(kept), tuple(saved)))
            self._routes[absent] = _routed(results, gradients)[1]
        return self._routes[absent]

    def plan(self, inputs: tuple) -> PlainPlan | KernelPlan:
        """Returns the plan of an eager call with these inputs, which have no graph in here."""
        known = plans(self.operator)
        key = (
            "opaque", self.implementation, self.saves, self.wanted, self.options, self.dtype,
            choice.epoch, torch.are_deterministic_algorithms_enabled(),
            *[
                None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15)
                for x in inputs
            ],
        )  # fmt: skip
        plan = known.by_key.get(key)
        if plan is None:
            with known.lock:
                plan = known.keep(
                    key,
                    build(
                        self.operator, self.implementation, inputs, self.options, self.wanted,
                        saves=self.saves, apart=True,
                    ),
                )  # fmt: skip
        return plan


def _routed(results: tuple, gradients: tuple) -> tuple[list, list[int | None]]:
    """Returns the gradients that are new tensors, and the place of every gradient, or None.

    A kernel may return an incoming gradient, or one tensor for two inputs, as for a sum. But the
    results of a custom operator must not share memory. So it returns only new tensors, and a place
    counts through the incoming gradients first, then through the new tensors.
    """
    found = list(gradients)
    places: list[int | None] = []
    for result in results:
        at = next((at for at, one in enumerate(found) if one is result), len(found))
        if result is not None and at == len(found):
            found.append(result)
        places.append(None if result is None else at)
    return found[len(gradients) :], places


def _define(operator: Operator) -> Any:
    name, n, m = operator.name, len(operator.tensors), len(operator.scalars)
    optional = ["?" if one in operator.optional else "" for one in operator.tensors]
    tensors = [f"Tensor{o} {one}" for o, one in zip(optional, operator.tensors, strict=True)]
    scalars = "".join(f", float {one}" for one in operator.scalars)
    _library.define(f"{name}({', '.join(tensors)}{scalars}, str call) -> (Tensor[], Tensor[])")
    _library.define(
        f"{name}_backward(Tensor?[] gradients, Tensor?[] kept, Tensor[] saved, SymInt[] sizes"
        f"{scalars}, str call) -> Tensor[]"
    )
    specs: dict[str, _Spec] = {}

    def spec(text: str) -> _Spec:
        return specs.get(text) or specs.setdefault(text, _Spec(operator, text))

    def forward(*arguments):
        inputs, numbers = arguments[:n], arguments[n : n + m]
        plan = spec(arguments[-1]).plan(inputs)
        if not isinstance(plan, KernelPlan):  # nothing to compute
            outputs = plan.run(inputs, numbers)
            return list(outputs if isinstance(outputs, tuple) else (outputs,)), []
        outputs, saved = plan.forward(inputs, numbers)
        return list(outputs), list(saved)

    def fake_forward(*arguments):
        known = spec(arguments[-1])
        named = operator.of_results(dict(known.options))
        kernel = known.kernel(known.found.forward)
        outputs, saved = kernel.empty(known.wanted, arguments[:n], **named)
        return list(outputs), list(saved)

    def backward(gradients, kept, saved, sizes, *rest):
        known, numbers = spec(rest[-1]), rest[:-1]
        tensors = tuple(gradients), tuple(kept), tuple(saved)
        first = next(x for x in (*kept, *saved) if x is not None)
        problem = known.problem(sizes)
        rows_aligned = aligned(kept, gradients)
        what = Call(
            problem, targets.of_device(first.device), known.wanted, rows_aligned, apart=True
        )
        kernel, picked = choose_kernel(known.found.backward, operator, what, known.saves)
        with torch.cuda.device_of(first):  # where Triton launches
            results = prepared(kernel, what, picked.config, tensors)(tensors, numbers)
        return _routed(results, gradients)[0]

    def fake_backward(gradients, kept, saved, sizes, *rest):
        known = spec(rest[-1])
        kernel = known.kernel(known.found.backward)
        results = kernel.empty(known.wanted, (tuple(gradients), tuple(kept), tuple(saved)))
        return _routed(results, gradients)[0]

    def save(ctx, inputs, output):
        outputs, saved = output
        by_name = dict(zip(operator.tensors, inputs[:n], strict=True))
        by_name |= dict(zip(operator.outputs, outputs, strict=False))
        ctx.scalars, ctx.text = inputs[n : n + m], inputs[-1]
        known = spec(ctx.text)
        values = operator.describe(*inputs[:n], **dict(known.options))
        ctx.sizes = [values[size] for size in operator.sizes]
        ctx.n_kept = len(operator.kept)
        ctx.save_for_backward(*(by_name[one] for one in operator.kept), *saved)
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)

    def refuses(text: str, what: str) -> RuntimeError:
        return derivatives.refusal(operator, spec(text).implementation, what)

    def watched_backward(keyset, gradients, *rest):
        """Runs ahead of every backward pass, compiled ones too, and refuses a tangent."""
        if forward_ad._current_level >= 0 and derivatives.has_tangent(gradients):
            raise refuses(rest[-1], derivatives.FORWARD_MODE)
        op = getattr(torch.ops.tnp, f"{name}_backward").default
        return op.redispatch(keyset & torch._C._after_autograd_keyset, gradients, *rest)

    def batched_backward(*arguments):
        raise refuses(arguments[-1], derivatives.BATCHED)

    def differentiate(ctx, gradients, _saved):
        nothing = (None,) * (m + 1)
        if gradients is None or all(gradient is None for gradient in gradients):
            return (None,) * n + nothing
        if derivatives.is_batched(gradients):
            raise refuses(ctx.text, derivatives.BATCHED)
        tensors = ctx.saved_tensors
        kept, saved = list(tensors[: ctx.n_kept]), list(tensors[ctx.n_kept :])
        routes = spec(ctx.text).routes(gradients, kept, saved)
        op = getattr(torch.ops.tnp, f"{name}_backward").default

        def run(*parts: tuple) -> list[torch.Tensor]:
            return op(*map(list, parts), ctx.sizes, *ctx.scalars, ctx.text)

        if torch.is_grad_enabled():  # only under create_graph=True
            run = partial(derivatives.once, refuses(ctx.text, derivatives.SECOND), run)
        results = run(tuple(gradients), tuple(kept), tuple(saved))
        found = (*gradients, *results)
        by_name = {
            one: None if at is None else found[at]
            for one, at in zip(operator.differentiated, routes, strict=True)
        }
        return (*(by_name.get(one) for one in operator.tensors), *nothing)

    def forward_flops(*arguments, out_val=None, **_):
        known, inputs = spec(arguments[-1]), arguments[:n]
        values = operator.describe(*inputs, **dict(known.options))
        sizes = [values[size] for size in operator.sizes]
        return known.flops(known.problem(sizes), "forward")

    def backward_flops(gradients, kept, saved, sizes, *rest, out_val=None, **_):
        known = spec(rest[-1])
        return known.flops(known.problem(sizes), "backward")

    packets = [getattr(torch.ops.tnp, name + suffix) for suffix in ("", "_backward")]
    _formulas.update(zip(packets, (forward_flops, backward_flops), strict=True))
    for suffix, real, fake in (("", forward, fake_forward), ("_backward", backward, fake_backward)):
        for key in ("CPU", "CUDA"):
            _library.impl(name + suffix, real, key)
        torch.library.register_fake(f"tnp::{name}{suffix}", fake, lib=_library)
    torch.library.register_autograd(f"tnp::{name}", differentiate, setup_context=save, lib=_library)
    _library.impl(f"{name}_backward", watched_backward, "Autograd", with_keyset=True)
    for key in ("FuncTorchBatched", "Batched"):  # of torch.func, and of is_grads_batched
        _library.impl(f"{name}_backward", batched_backward, key)
    return getattr(torch.ops.tnp, name).default
