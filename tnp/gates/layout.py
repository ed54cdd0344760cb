"""Checks that a launch lays out tensors as `Kernel.empty` says, which is all a compiler knows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch

from tnp.dispatch import private
from tnp.dispatch.plans import KernelPlan
from tnp.dispatch.spec import Kernel
from tnp.gates.results import Setting


def faults(plan: KernelPlan, backward: Kernel | None, setting: Setting) -> list[str]:
    """Returns a sentence for each tensor of a plan's launches that differs from `Kernel.empty`.

    The tensors' values do not matter, so Triton's interpreter skips the kernels.
    """
    operator, numbers = setting.operator, setting.operator.numbers
    inputs = tuple(setting.inputs.values())
    wanted = plan.what.wanted
    on_gpu = setting.device.type == "cuda"
    with torch.no_grad(), nullcontext() if on_gpu else private.interpreter_at_rest():
        outputs, saved = plan.forward(inputs, numbers)
        named = operator.of_results(setting.options)
        says_outputs, says_saved = plan.kernel.empty(wanted, inputs, **named)
        of_outputs = operator.outputs_of(setting.case.problem)
        found = list(_different(of_outputs, outputs, says_outputs))
        names = tuple(f"saved tensor {i}" for i in range(max(len(saved), len(says_saved))))
        found += _different(names, saved, says_saved)
        if backward is None or not wanted:
            return found
        gradients = tuple(
            setting.upstream(name, x) if x.is_floating_point() else None
            for name, x in zip(of_outputs, outputs, strict=True)
        )
        given = gradients, tuple(plan.kept(inputs, outputs)), tuple(saved)
        results, says = plan.backward(*given, numbers), backward.empty(wanted, given)
        names = tuple(f"d{name}" for name in operator.differentiated)
        return [*found, *_different(names, results, says)]


def _different(names: tuple[str, ...], results: tuple, says: tuple) -> Iterator[str]:
    if len(results) != len(says) or len(results) != len(names):
        yield f"{len(results)} tensors of {', '.join(names)}, and `empty` says {len(says)}"
        return
    for name, real, said in zip(names, results, says, strict=True):
        if _looks(real) != _looks(said):
            yield f"{name} is {_text(real)}, and `empty` says {_text(said)}"


def _looks(x: torch.Tensor | None) -> tuple | None:
    """Returns the properties that compiled code relies on. Strides of sizes 1 do not count."""
    if x is None:
        return None
    steps = tuple(
        step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1 and x.numel()
    )
    return x.shape, steps, x.dtype, x.device


def _text(x: torch.Tensor | None) -> str:
    return "None" if x is None else f"{x.dtype} {tuple(x.shape)} with strides {x.stride()}"
