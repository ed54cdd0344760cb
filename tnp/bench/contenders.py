"""Runs one pass of one problem for each contender, and checks the results.

A contender is an implementation, or a tuning trial: an implementation with forced kernels and
configurations. All contenders of a job get the same inputs. There are as many sets of inputs as
exceed twice the L2 cache. Results are compared with the same float64 reference.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

import torch

from tnp.bench.outcome import SEPARATOR, implementation_of, passes
from tnp.bench.timing import first_call
from tnp.dispatch import devices, plans, selection, tuned_tables
from tnp.dispatch.registry import catalog, is_automatic
from tnp.dispatch.spec import Call, Case, Implementation, Operation, Work
from tnp.experiment.failures import Unsupported
from tnp.gates.results import compute, in_float64, wanted_of
from tnp.ops._shared.random_values import Random, Upstream

Output = torch.Tensor | tuple[torch.Tensor | None, ...]
Forced = Mapping[str, tuple[str, Any]]  # operation → kernel, and its configuration as JSON holds it


def input_sets(bytes_touched: float, device: torch.device) -> int:
    """Returns how many sets of inputs together exceed twice the L2 cache; 1 on the CPU."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, math.ceil(2 * cache / max(bytes_touched, 1)))


def trials(op: str, implementation: str, pass_: str, call: Call) -> dict[str, Forced]:
    """Returns contenders by name: each kernel that serves the pass, with each configuration.

    The default comes first. In a backward pass, the forward kernel saves the tensors that the
    backward kernel reads, and is chosen among such kernels.
    """
    found = catalog().load(op, implementation)
    operation = found.forward if pass_ == "forward" else found.backward
    if operation is None:
        return {}
    named: dict[str, Forced] = {}
    for kernel in selection.kernels_of(operation).values():
        if kernel.refuses(call) is not None:
            continue
        before: Forced = {}
        if pass_ == "backward":
            forward, picked = selection.choose_kernel(
                found.forward, catalog().operator(op), call, kernel.saves
            )
            before = {found.forward.name: (forward.name, tuned_tables.as_json(picked.config))}
        for config in kernel.configs(call):
            text = tuned_tables.as_json(config)
            name = f"{implementation}{SEPARATOR}{kernel.name} {json.dumps(text)}"
            named[name] = {**before, operation.name: (kernel.name, text)}
    return named


def listed(parameters: dict) -> dict:
    """Returns changes of a job that lists its trials: new `implementations` and `forced`.

    Only a process that has imported the kernels and sees the device can list trials. A contender
    without trials stays as it is.
    """
    forced = dict(parameters.get("forced", {}))
    if {} not in forced.values():
        return {}
    operator = catalog().operator(parameters["op"])
    problem = operator.from_json(parameters["problem"])
    target = devices.of_device(torch.device(parameters["device"]))
    contenders: dict[str, str] = {}
    for name, config_id in parameters["implementations"].items():
        found: dict[str, Forced] = {}
        if forced.get(name) == {}:
            wanted = wanted_of(operator, catalog().load(operator.name, name), Case(problem))
            call = Call(problem, target, wanted)
            (pass_,) = passes(parameters)
            found = trials(operator.name, name, pass_, call)
        if found:
            del forced[name]
        forced |= found
        contenders |= {trial: config_id + trial.removeprefix(name) for trial in found} or {
            name: config_id
        }
    return {"implementations": contenders, "forced": forced}


class Contenders:
    """Holds one pass of a job: inputs, calls and the check afterwards.

    Args:
        parameters: the result of `tnp.bench.outcome.op_job`.
        pass_: "forward" or "backward".
        device: where the contenders run.
        n_sets: number of sets of inputs; by default as many as exceed the cache.
    """

    def __init__(
        self, parameters: dict, pass_: str, device: torch.device, n_sets: int | None = None
    ) -> None:
        self.operator = catalog().operator(parameters["op"])
        problem = self.operator.from_json(parameters["problem"])
        self.case = Case(problem, tuple(sorted(parameters.get("draw", {}).items())))
        self.pass_, self.device, self.forced = pass_, device, parameters.get("forced", {})
        # A forward pass beside a backward pass saves tensors for it, as in training. So does a
        # trial: its choice serves training too.
        self.trains = bool(self.forced) or "backward" in passes(parameters)
        self.options = dict(self.operator.call_options(problem))
        self.sets, self.upstreams = [], []
        replicate = parameters["replicate"]
        random = Random(self.case, device, replicate)
        least = self.operator.work(self.case, pass_).bytes
        for i in range(n_sets or input_sets(least, device)):
            drawn = self.operator.draw(self.case, random)
            self.sets.append({name: drawn.get(name) for name in self.operator.tensors})
            # Drawn once, when the first contender's outputs are known.
            arriving = Random(self.case, device, (replicate + 1) * 1_000_003 + i)
            self.upstreams.append(Upstream(arriving, drawn))
        self.plans: dict[str, plans.PlainPlan | plans.KernelPlan] = {}

    def require_supported(self, contender: str) -> None:
        """Raises Unsupported with a reason if the contender cannot run here."""
        name = implementation_of(contender)
        if is_automatic(name):
            return
        found = self._found(name)
        if self.pass_ == "backward" and not self._wanted(contender):
            raise Unsupported("it is forward only")
        reason = selection.refuses(found, self._call(contender))
        if reason is not None:
            raise Unsupported(reason)

    def calls(self, contender: str) -> list[Callable[[], Output]]:
        """Returns one call for each set of inputs; a call returns outputs or gradients."""
        name, wanted = implementation_of(contender), self._wanted(contender)
        forced = self.trial(contender)
        by_layout: dict[tuple, plans.PlainPlan | plans.KernelPlan] = {}
        calls = []
        for inputs, upstream in zip(self.sets, self.upstreams, strict=True):
            leaves = tuple(
                x if x is None else x.detach().requires_grad_(one in wanted)
                for one, x in inputs.items()
            )
            key = tuple(x if x is None else (x.stride(), x.data_ptr() % 16) for x in leaves)
            if key not in by_layout:
                by_layout[key] = plans.build(
                    self.operator, name, leaves, tuple(self.options.items()), wanted, forced=forced
                )
            run = partial(by_layout[key].run, leaves, self.operator.numbers)
            calls.append(run if self.pass_ == "forward" else
                         self._backward(run, leaves, wanted, upstream))  # fmt: skip
        self.plans[contender] = next(iter(by_layout.values()))
        return calls

    def _backward(
        self, run: Callable, leaves: tuple, wanted: tuple[str, ...], upstream: Upstream
    ) -> Callable[[], Output]:
        named = dict(zip(self.operator.tensors, leaves, strict=True))
        of = [named[name] for name in wanted]

        def arriving(outputs: Output) -> tuple[list, list]:
            pairs = zip(self._outputs, _as_tuple(outputs), strict=True)
            given = [(x, upstream(name, x.detach())) for name, x in pairs if x.requires_grad]
            return [x for x, _ in given], [gradient for _, gradient in given]

        if self.operator.backward_with_forward:
            arriving(run())  # draws the gradients

            def both() -> Output:
                outputs, gradients = arriving(run())
                return torch.autograd.grad(outputs, of, gradients)

            return both
        outputs, gradients = arriving(run())
        return partial(torch.autograd.grad, outputs, of, gradients, retain_graph=True)

    def work(self, contender: str) -> Work:
        """Returns the least work that the contender must do."""
        declared = self.plans[contender].found.work or self.operator.work
        return declared(self.case, self.pass_)

    def launch_config(self, contender: str) -> str | None:
        """Returns the choices made for the contender as JSON, or None if there were none."""
        plan = self.plans[contender]
        content: dict[str, Any] = plan.described()
        if is_automatic(implementation_of(contender)):
            chosen = plan.chosen.describe()
            content = {"implementation": chosen.pop("choice")} | chosen | (
                {"launch": content} if content else {}
            )  # fmt: skip
        return json.dumps(content) if content else None

    def precision(self, contender: str) -> str:
        """Returns the narrower number format that it computes in, or ""."""
        return self.plans[contender].found.precision

    def plan_ms(self, contender: str) -> float | None:
        """Returns the milliseconds that the host plans once, or None without a plan.

        It is the median of five runs after a first one, for the first set of inputs.
        """
        plan, inputs = self.plans[contender].found.plan, tuple(self.sets[0].values())
        if plan is None:
            return None
        run = partial(plan, *inputs, *self.operator.numbers, **self.options)
        return 1e3 * statistics.median([first_call(run, self.device) for _ in range(6)][1:])

    def check(self, contender: str, output: Output) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns pairs (measured, float64) of the results for the first set of inputs."""
        if self.pass_ == "forward":
            named = dict(zip(self._outputs, _as_tuple(output), strict=True))
        else:
            names = [f"d{name}" for name in self._wanted(contender)]
            named = dict(zip(names, _as_tuple(output), strict=True))
        return [
            (named[name][index], exact)
            for name, (index, exact) in self._exact.items()
            if name in named and exact is not None and named[name].is_floating_point()
        ]

    @cached_property
    def _exact(self) -> dict[str, tuple[Any, torch.Tensor | None]]:
        """Returns float64 results of the first set, or the part that `partial_reference` gives."""
        operator, inputs, upstream = self.operator, self.sets[0], self.upstreams[0]
        wanted = operator.differentiated if self.pass_ == "backward" else ()
        wanted = tuple(name for name in wanted if inputs[name] is not None)
        if operator.partial_reference is not None:
            gradients = upstream.known if wanted else None
            return operator.partial_reference(self.case, inputs, gradients)
        found = compute(
            operator, self.case.problem, lambda *a: operator.reference(*a, **self.options),
            in_float64(inputs), wanted, upstream,
        )  # fmt: skip
        of_outputs = self.pass_ == "forward"
        return {
            name: (..., x) for name, x in found.items() if (name in operator.outputs) == of_outputs
        }

    @property
    def _outputs(self) -> tuple[str, ...]:
        return self.operator.outputs_of(self.case.problem)

    def _found(self, name: str) -> Implementation:
        listed = catalog().listed(self.operator.name, name)
        if listed.missing:
            raise Unsupported(listed.missing)
        return catalog().load(self.operator.name, name)

    def _wanted(self, contender: str) -> tuple[str, ...]:
        """Returns the inputs whose gradients the contender gives, or prepares for."""
        if not self.trains:
            return ()
        name = implementation_of(contender)
        found = self.operator.implementations[0] if is_automatic(name) else self._found(name)
        return wanted_of(self.operator, found, self.case)

    def _call(self, contender: str) -> Call:
        return Call(self.case.problem, devices.of_device(self.device), self._wanted(contender))

    def trial(self, contender: str) -> selection.Forced:
        """Returns the forced kernels and configurations of a trial; {} for other contenders.

        The configuration is the candidate with equal JSON. Raises Unsupported if there is none.
        """
        forced: selection.Forced = {}
        for name, (kernel_name, wanted) in self.forced.get(contender, {}).items():
            found, call = self._found(implementation_of(contender)), self._call(contender)
            kernel = selection.kernels_of(_operation(found, name)).get(kernel_name)
            if kernel is None:
                raise Unsupported(f"{name} has no kernel {kernel_name!r}")
            reason = kernel.refuses(call)
            if reason is not None:
                raise Unsupported(reason)
            equal = [one for one in kernel.configs(call) if tuned_tables.as_json(one) == wanted]
            if not equal:
                raise Unsupported(f"{kernel_name} has no configuration {json.dumps(wanted)}")
            forced[name] = kernel_name, equal[0]
        return forced


def _operation(found: Implementation, name: str) -> Operation:
    known = [one for one in (found.forward, found.backward) if one and one.name == name]
    if not known:
        raise Unsupported(f"{found.name} has no operation {name!r}")
    return known[0]


def _as_tuple(output: Output) -> tuple:
    return output if isinstance(output, tuple) else (output,)
