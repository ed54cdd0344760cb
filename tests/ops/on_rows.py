"""What tests of operators on rows share: results by name, and budgets over PyTorch's own error."""

import torch

from tnp.dispatch import devices, plans, selection
from tnp.dispatch.spec import Case, Kernel, Operator
from tnp.gates.checks import error_ratio
from tnp.ops._shared.random_values import Random

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HERE = devices.of_device(DEVICE)

Results = dict[str, torch.Tensor]


def drawn(operator: Operator, rows: int, width: int, dtype: str = "float32", **draw) -> Results:
    """Inputs by name."""
    case = Case(operator.problem(dtype, rows=rows, width=width), tuple(draw.items()))
    return operator.draw(case, Random(case, DEVICE))


def differentiated(
    operator: Operator,
    implementation: str,
    inputs: Results,
    wanted: tuple[str, ...] | None = None,
    forced: selection.Forced | None = None,
) -> Results:
    """Outputs and the gradients of `wanted`, all by default, of a loss over every output."""
    wanted = operator.differentiated if wanted is None else wanted
    leaves = {name: x.detach().requires_grad_(name in wanted) for name, x in inputs.items()}
    call = tuple(leaves.values())
    plan = plans.build(operator, implementation, call, (), wanted, forced=forced)
    outputs = plan.run(call, operator.numbers)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    random = torch.Generator(DEVICE).manual_seed(1)
    # Drawn in float32, so that every dtype gets the same.
    into = [torch.randn(y.shape, device=DEVICE, generator=random).to(y.dtype) for y in outputs]
    gradients = torch.autograd.grad(outputs, [leaves[name] for name in wanted], into)
    names = (*operator.outputs, *(f"d{name}" for name in wanted))
    return {name: x.detach() for name, x in zip(names, (*outputs, *gradients), strict=True)}


def kernels_forced(operator: Operator, inputs: Results) -> list[selection.Forced]:
    """Every kernel of both passes that takes these inputs, with every configuration."""
    own = operator.implementations[-1]
    what = selection.describe(operator, tuple(inputs.values()), (), operator.differentiated)

    def candidates(kernels: dict[str, Kernel]) -> list[tuple[str, object]]:
        able = [kernel for kernel in kernels.values() if kernel.refuses(what) is None]
        return [(kernel.name, config) for kernel in able for config in kernel.configs(what)]

    forward = candidates(selection.kernels_of(own.forward))
    backward = candidates(selection.kernels_of(own.backward))
    n = max(len(forward), len(backward))
    pairs = [(forward[i % len(forward)], backward[i % len(backward)]) for i in range(n)]
    return [{own.forward.name: one, own.backward.name: other} for one, other in pairs]


def ratios(operator: Operator, results: Results, inputs: Results) -> dict[str, float]:
    """Of each result's error to what must be expected, `tnp.gates.checks.error_ratio`."""
    exact = {name: x.double() for name, x in inputs.items()}
    wanted = tuple(name for name in operator.differentiated if f"d{name}" in results)
    own = differentiated(operator, "torch", inputs, wanted)
    best = differentiated(operator, "torch", exact, wanted)
    relative = operator.condition(None, inputs) if operator.condition else 0.0
    return {
        name: error_ratio(x, own[name], best[name], relative * best[name].norm().item())
        for name, x in results.items()
    }


def assert_within_budget(operator: Operator, results: Results, inputs: Results) -> None:
    budget = operator.budget
    for name, ratio in ratios(operator, results, inputs).items():
        assert ratio <= (budget.outputs if name in operator.outputs else budget.gradients), name
