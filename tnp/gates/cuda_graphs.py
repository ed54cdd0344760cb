"""Checks phase 10: a captured training step gives the losses and weights of the eager one.

Replayed predictions equal eager ones.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from tnp.dispatch import selection
from tnp.gates import models
from tnp.gates.checks import Check, Unsupported, max_abs_error, relative_error
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.ops.attention import OPERATOR
from tnp.tasks.task import Task
from tnp.train.step import TrainingStep
from tnp.train.step_graphs import N_EAGER_BEFORE_CAPTURE

N_STEPS = N_EAGER_BEFORE_CAPTURE + 5
# The spread is the largest difference between a first eager run and N_NULL more. Equal runs may
# agree by chance, as in gate `ragged` on 2026-11-28. So the k-th of the others starts with every
# weight k float32 roundings larger. Three runs measure the spread roughly, so a captured run's
# losses may differ by 8 spreads. Its weights may differ by 2: a lost last update, which no loss
# shows, moves them more.
N_NULL, LOSS_MARGIN, WEIGHT_MARGIN = 3, 8, 2
# The largest difference in nats of two forward passes with equal weights. A step at the gate's
# learning rate changes the loss by 1e-2 to 1e-1.
SAME_WEIGHTS = 1e-4


def starts(attention: str) -> range:
    """Returns how many roundings each eager run adds to its first weights.

    If all sums of an attention have a fixed order, one run is enough: the captured run must equal
    it. PyTorch's attention declares no order. No other operator of the gates' variants adds in an
    order that varies.
    """
    [found] = (one for one in OPERATOR.implementations if one.name == attention)
    operations = [one for one in (found.forward, found.backward) if one]
    kernels = [kernel for one in operations for kernel in selection.kernels_of(one).values()]
    fixed = kernels and not any(kernel.nondeterministic for kernel in kernels)
    return range(1 if fixed else 1 + N_NULL)


class Trained(NamedTuple):
    """Holds losses [steps] of a run, and all weights after and before its last update."""

    losses: torch.Tensor
    weights: torch.Tensor
    before: torch.Tensor


def trained(step: TrainingStep, model: TransformerNP, tasks: Sequence[Task]) -> Trained:
    """Trains the model by one step a task."""
    *first, last = tasks
    losses = [step(task) for task in first]
    before = models.weights(model)
    losses.append(step(last))
    return Trained(torch.stack(losses), models.weights(model), before)


def checks(device: torch.device) -> Iterator[Check]:
    if device.type != "cuda":
        raise Unsupported("CUDA graphs need a CUDA device")
    for _, variant in models.variants(device):
        yield from captured_checks(device, variant)


def captured_checks(device: torch.device, variant: Variant) -> Iterator[Check]:
    """Checks one variant."""
    attention = variant.attention

    def run(cuda_graph: bool = False, units: int = 0) -> tuple[Trained, float]:
        """Returns what training gave, and the error of the next loss against the model's own."""
        model = models.moved(models.build_model(device, variant), units)
        rate = models.scale(device).learning_rate
        step = TrainingStep(model, learning_rate=rate, cuda_graph=cuda_graph)
        learned = trained(step, model, [models.task(device, i) for i in range(N_STEPS)])
        batch = models.task(device, N_STEPS)
        with torch.no_grad():
            outside = model.loss(batch)  # outside the step, the model casts its weights itself
        return learned, max_abs_error(step(batch), outside)

    eager = [run(units=k)[0] for k in starts(attention)]
    captured, next_error = run(cuda_graph=True)
    said = f"losses of {N_STEPS} steps", f"weights after {N_STEPS} steps"
    names = [f"{variant.name}: {what}" for what in said]
    yield from against_eager(names, captured, eager, attention)
    yield Check(
        f"{variant.name}: loss of the next step, captured against the model's own",
        "abs_error_nats", next_error, SAME_WEIGHTS, attention,
    )  # fmt: skip
    yield Check(
        f"{variant.name}: mixture parameters of two tasks, replayed against launched",
        "max_abs_error", _replayed_error(device, variant), 0.0, attention,
    )  # fmt: skip


def against_eager(
    names: Sequence[str], captured: Trained, eager: Sequence[Trained], implementation: str
) -> Iterator[Check]:
    """Checks losses and weights of a captured run against eager runs.

    The bounds follow the spread of the eager runs, which differ by rounding alone. A captured run
    must equal a single eager run. The control is an eager run that lost its last update.

    Args:
        names: names the checks of losses and of weights.
        captured: the captured run.
        eager: the eager runs; the first is the reference.
        implementation: the implementation of attention.
    """
    first, *others = eager
    spread = max((max_abs_error(one.losses, first.losses) for one in others), default=0.0)
    yield Check(f"{names[0]}, captured against eager", "max_abs_error",
                max_abs_error(captured.losses, first.losses), LOSS_MARGIN * spread,
                implementation)  # fmt: skip
    apart = max((relative_error(one.weights, first.weights) for one in others), default=0.0)
    bound = WEIGHT_MARGIN * apart
    yield Check(f"{names[1]}, captured against eager", "relative_error",
                relative_error(captured.weights, first.weights), bound,
                implementation)  # fmt: skip
    yield Check(f"control must fail: {names[1]}, without the last update", "relative_error",
                relative_error(first.before, first.weights), bound, implementation,
                larger_is_better=True)  # fmt: skip


@torch.no_grad()
def _replayed_error(device: torch.device, variant: Variant) -> float:
    """Returns the largest error of replays for other targets than the captured ones."""
    model, batch = models.build_model(device, variant), models.task(device, 0)
    launched = model.encode(batch.context)
    replayed = model.encode(batch.context, cuda_graph=True)
    for _ in range(2):  # the first call of a size runs eagerly, the second captures
        replayed.decode(model, batch.x_target)
    others = (models.task(device, step).x_target for step in (1, 2))
    return max(max_abs_error(replayed.decode(model, x), launched.decode(model, x)) for x in others)
