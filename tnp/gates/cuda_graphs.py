"""Phase 10: a captured training step gives the losses and weights of the eager one, and predictions
that are replayed are those that are launched.
"""

from collections.abc import Iterator

import torch

from tnp.gates import models
from tnp.gates.checks import Check, Unsupported, max_abs_error, relative_error
from tnp.model.variants import Variant
from tnp.train.step import TrainingStep
from tnp.train.step_graphs import N_EAGER_BEFORE_CAPTURE

N_STEPS = N_EAGER_BEFORE_CAPTURE + 5
# Eager runs that measure the spread, and how far beyond it a captured run may be: the largest of
# three is a rough measure. A step that is skipped or sees old inputs is off by far more.
N_NULL = 3
MARGIN = 8
# Nats between two forward passes of one model; a step at the gate's learning rate changes the loss
# by 1e-2 to 1e-1.
SAME_WEIGHTS = 1e-4


def checks(device: torch.device) -> Iterator[Check]:
    if device.type != "cuda":
        raise Unsupported("CUDA graphs need a CUDA device")
    for name, variant in models.variants(device):
        yield from captured_checks(device, name, variant)


def captured_checks(device: torch.device, name: str, variant: Variant) -> Iterator[Check]:
    """Of one variant; `name` is the implementation of attention."""

    def run(cuda_graph: bool) -> tuple[torch.Tensor, torch.Tensor, float]:
        model = models.build_model(device, variant)
        rate = models.scale(device).learning_rate
        step = TrainingStep(model, learning_rate=rate, cuda_graph=cuda_graph)
        losses, weights = models.train(step, device, N_STEPS), models.weights(model)
        batch = models.task(device, N_STEPS)
        with torch.no_grad():
            # What the model says outside the step, where it casts the weights of now by itself.
            outside = model.loss(batch)
        return losses, weights, max_abs_error(step(batch), outside)

    losses, weights, _ = run(cuda_graph=False)
    eager = [run(cuda_graph=False) for _ in range(N_NULL)]
    captured = run(cuda_graph=True)
    # What eager runs differ by among themselves: nothing where all kernels are deterministic.
    spread = max(max_abs_error(other[0], losses) for other in eager)
    yield Check(
        f"{variant.name}: losses of {N_STEPS} steps, captured against eager",
        "max_abs_error", max_abs_error(captured[0], losses), MARGIN * spread, name,
    )  # fmt: skip
    spread = max(relative_error(other[1], weights) for other in eager)
    yield Check(
        f"{variant.name}: weights after {N_STEPS} steps, captured against eager",
        "relative_error", relative_error(captured[1], weights), MARGIN * spread, name,
    )  # fmt: skip
    yield Check(
        f"{variant.name}: loss of the next step, captured against the model's own",
        "abs_error_nats", captured[2], SAME_WEIGHTS, name,
    )  # fmt: skip
    yield Check(
        f"{variant.name}: mixture parameters of two tasks, replayed against launched",
        "max_abs_error", _replayed_error(device, variant), 0.0, name,
    )  # fmt: skip


@torch.no_grad()
def _replayed_error(device: torch.device, variant: Variant) -> float:
    """Largest difference of what is replayed for other targets than those that were captured."""
    model, batch = models.build_model(device, variant), models.task(device, 0)
    launched = model.encode(batch.context)
    replayed = model.encode(batch.context, cuda_graph=True)
    for _ in range(2):
        replayed.decode(model, batch.x_target)
    others = (models.task(device, step).x_target for step in (1, 2))
    return max(max_abs_error(replayed.decode(model, x), launched.decode(model, x)) for x in others)
