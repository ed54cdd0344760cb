"""Checks phase 10: a captured training step gives the losses and weights of the eager one.

Replayed predictions equal eager ones.
"""

from collections.abc import Iterator, Sequence

import torch

from tnp.gates import models
from tnp.gates.checks import Check, Unsupported, max_abs_error, relative_error
from tnp.model.variants import Variant
from tnp.train.step import TrainingStep
from tnp.train.step_graphs import N_EAGER_BEFORE_CAPTURE

N_STEPS = N_EAGER_BEFORE_CAPTURE + 5
# The spread is the largest difference between a first eager run and N_NULL more. Three runs measure
# it roughly, so a captured run may differ by MARGIN times as much. A skipped step, or one with old
# inputs, differs far more. Where sums have an order that varies only in some runs, equal runs may
# agree by chance, as in gate `ragged` on 2026-11-28. So the k-th of the others starts with every
# weight k float32 roundings larger.
N_NULL, MARGIN = 3, 8
# The largest difference in nats of two forward passes with equal weights. A step at the gate's
# learning rate changes the loss by 1e-2 to 1e-1.
SAME_WEIGHTS = 1e-4


def checks(device: torch.device) -> Iterator[Check]:
    if device.type != "cuda":
        raise Unsupported("CUDA graphs need a CUDA device")
    for name, variant in models.variants(device):
        yield from captured_checks(device, name, variant)


def captured_checks(device: torch.device, name: str, variant: Variant) -> Iterator[Check]:
    """Checks one variant. `name` is the implementation of attention."""

    def run(cuda_graph: bool = False, units: int = 0) -> tuple[torch.Tensor, torch.Tensor, float]:
        """Returns losses, weights, and the error of the next loss against the model's own."""
        model = models.moved(models.build_model(device, variant), units)
        rate = models.scale(device).learning_rate
        step = TrainingStep(model, learning_rate=rate, cuda_graph=cuda_graph)
        losses, weights = models.train(step, device, N_STEPS), models.weights(model)
        batch = models.task(device, N_STEPS)
        with torch.no_grad():
            outside = model.loss(batch)  # outside the step, the model casts its weights itself
        return losses, weights, max_abs_error(step(batch), outside)

    eager, captured = [run(units=k) for k in range(1 + N_NULL)], run(cuda_graph=True)
    said = f"losses of {N_STEPS} steps", f"weights after {N_STEPS} steps"
    names = [f"{variant.name}: {what}" for what in said]
    yield from against_eager(names, captured, eager, name)
    yield Check(
        f"{variant.name}: loss of the next step, captured against the model's own",
        "abs_error_nats", captured[2], SAME_WEIGHTS, name,
    )  # fmt: skip
    yield Check(
        f"{variant.name}: mixture parameters of two tasks, replayed against launched",
        "max_abs_error", _replayed_error(device, variant), 0.0, name,
    )  # fmt: skip


def against_eager(
    names: Sequence[str], captured: Sequence, eager: Sequence[Sequence], implementation: str
) -> Iterator[Check]:
    """Checks losses and weights of a captured run against eager runs.

    The bound follows the spread of the eager runs, which differ by rounding alone.

    Args:
        names: names the two checks.
        captured: losses and weights of the captured run.
        eager: losses and weights of each eager run; the first is the reference.
        implementation: the implementation of attention.
    """
    first, *others = eager
    distances = ("max_abs_error", max_abs_error), ("relative_error", relative_error)
    for at, (name, (metric, distance)) in enumerate(zip(names, distances, strict=True)):
        spread = max(distance(other[at], first[at]) for other in others)
        yield Check(f"{name}, captured against eager", metric,
                    distance(captured[at], first[at]), MARGIN * spread, implementation)  # fmt: skip


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
