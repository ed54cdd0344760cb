"""Phase 10: samples of sizes of their own are computed as if each stood alone.

In float64 loss and gradients of a padded batch, and of a packed one, are those of its samples one
by one, to the rounding of sums in another order, with NaN for padding. In the model's dtype every
implementation of attention, and all operators of ours, come as near to that as PyTorch's own form
of the unpadded samples does. A model that takes padding for points must fail. Captured, one graph a
bucket of sizes, the steps are the eager ones.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from tnp.dispatch.spec import Budget
from tnp.gates import models
from tnp.gates.checks import Check, error_ratio, max_abs_error, relative_error
from tnp.gates.cuda_graphs import MARGIN, N_NULL
from tnp.model.buckets import Buckets
from tnp.model.packing import Capacity, capacity_for
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.tasks.task import Task
from tnp.train.step import TrainingStep

# Some ten sums of up to a thousand products, each in an order of its own.
FLOAT64_BOUND = 1e-12
LOSS_BOUND = 1e-3  # nats
N_STEPS = 12
SPARE = (3, 5)  # places of padding that even the largest sample has, context and target


def checks(device: torch.device) -> Iterator[Check]:
    whole = models.task(device, 0)
    batch = _ragged(whole, math.nan)
    in_float64 = batch.to(dtype=torch.float64)
    plain = models.build_model(device, Variant("plain", attention="reference"))
    exact = models.exact(plain)
    loss, gradients = _one_by_one(exact, in_float64)
    for how, capacity in _ways(batch):
        together = _gradients(exact, in_float64, capacity)
        yield Check(f"float64 loss, {how} against one by one", "max_abs_error",
                    max_abs_error(together[0], loss), FLOAT64_BOUND)  # fmt: skip
        for name, reference in gradients.items():
            yield Check(f"float64 gradient of {name}, {how} against one by one",
                        "relative_error", relative_error(together[1][name], reference),
                        FLOAT64_BOUND)  # fmt: skip
    ignoring = models.gradients_by_tensor(exact, _without_lengths(batch).to(dtype=torch.float64))
    yield Check("control must fail: padding taken for points", "abs_error_nats",
                max_abs_error(ignoring[0], loss), LOSS_BOUND, larger_is_better=True)  # fmt: skip
    own = _one_by_one(plain, batch)[1]
    for name, variant in (*models.variants(device), *_ours(device)):
        model = models.build_model(device, variant)
        attention = variant.attention
        for how, capacity in _ways(batch):
            found, by_tensor = _gradients(model, batch, capacity)
            yield Check(f"{name}: loss, {how} against float64", "abs_error_nats",
                        max_abs_error(found, loss), LOSS_BOUND, attention)  # fmt: skip
            for what, reference in gradients.items():
                gradient = by_tensor[what][tuple(map(slice, reference.shape))]
                yield Check(f"{name}: gradient of {what}, {how} against float64",
                            "error_ratio", error_ratio(gradient, own[what], reference),
                            Budget.gradients, attention)  # fmt: skip
    if device.type == "cuda":
        for name, variant in (*models.variants(device), *_ours(device)):
            for pack in (False, True):
                yield from _captured(device, name, replace(variant, pack=pack))


def _ways(batch: Task) -> list[tuple[str, Capacity | None]]:
    """How samples of other sizes are computed together, and the packed rows of it."""
    capacity = capacity_for(batch.count(), batch.batch, (batch.n_context, batch.n_target))
    return [("padded with NaN", None), ("packed, NaN behind each sample", capacity)]


def _gradients(
    model: TransformerNP, batch: Task, capacity: Capacity | None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return models.gradients_by_tensor(model, batch, partial(model.nll, capacity=capacity))


def _ours(device: torch.device) -> Iterator[tuple[str, Variant]]:
    """All operators of ours, where our attention runs here."""
    if "fused" in models.implementations(device):
        yield "all operators of ours", models.ours(device)


def _lengths(n_samples: int, most: int, device: torch.device) -> torch.Tensor:
    """All points, one, and numbers in between."""
    numbers = [most, 1, most // 2 + 1, most // 3 + 1]
    return torch.tensor(numbers[:n_samples], dtype=torch.int32, device=device)


def _ragged(task: Task, fill: float) -> Task:
    padded = task.padded(task.n_context + SPARE[0], task.n_target + SPARE[1]).clone()
    lengths = [
        _lengths(task.batch, most, task.x_context.device)
        for most in (task.n_context, task.n_target)
    ]
    points = ((padded.x_context, padded.y_context), (padded.x_target, padded.y_target))
    for pair, numbers in zip(points, lengths, strict=True):
        for b, n in enumerate(numbers.tolist()):
            for x in pair:
                x[b, n:] = fill
    return replace(padded, context_lengths=lengths[0], target_lengths=lengths[1])


def _without_lengths(task: Task) -> Task:
    values = (x.nan_to_num(0.0) for x in list(task)[:4])
    return Task(*values)


def _one_by_one(model: TransformerNP, task: Task) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients of samples that never meet, weighed by their targets."""
    sizes = list(zip(task.context_lengths.tolist(), task.target_lengths.tolist(), strict=True))
    n_targets, loss, gradients = sum(n for _, n in sizes), 0.0, {}
    for b, (m, n) in enumerate(sizes):
        one = slice(b, b + 1)
        alone = Task(
            task.x_context[one, :m], task.y_context[one, :m],
            task.x_target[one, :n], task.y_target[one, :n],
        )  # fmt: skip
        of_one, by_tensor = models.gradients_by_tensor(model, alone)
        loss = loss + of_one.double() * n / n_targets
        for name, gradient in by_tensor.items():
            gradients[name] = gradients.get(name, 0.0) + gradient.double() * n / n_targets
    return loss, gradients


def _captured(device: torch.device, name: str, variant: Variant) -> Iterator[Check]:
    whole, pack = models.task(device, 0), variant.pack
    name = f"{name}, packed" if pack else name
    sizes = [(whole.n_context, whole.n_target), (17, 30), (100, whole.n_target), (5, 100)]
    spare = SPARE if pack else (0, 0)
    buckets = Buckets(whole.n_context + spare[0], whole.n_target + spare[1])

    def run(cuda_graph: bool) -> tuple[torch.Tensor, torch.Tensor]:
        model = models.build_model(device, variant)
        rate = models.scale(device).learning_rate
        step = TrainingStep(model, learning_rate=rate, cuda_graph=cuda_graph, buckets=buckets)
        losses = []
        for index in range(N_STEPS):
            (m, n), task = sizes[index % len(sizes)], models.task(device, index)
            cut = (task.x_context[:, :m], task.y_context[:, :m])
            one = Task(*cut, task.x_target[:, :n], task.y_target[:, :n])
            losses.append(step(_ragged(one, 0.0) if pack else one))
        return torch.stack(losses), models.weights(model)

    losses, weights = run(cuda_graph=False)
    eager, captured = [run(cuda_graph=False) for _ in range(N_NULL)], run(cuda_graph=True)
    spread = max(max_abs_error(other[0], losses) for other in eager)
    yield Check(f"{name}: losses of {N_STEPS} steps of {len(sizes)} sizes, captured against eager",
                "max_abs_error", max_abs_error(captured[0], losses), MARGIN * spread,
                variant.attention)  # fmt: skip
    spread = max(relative_error(other[1], weights) for other in eager)
    yield Check(f"{name}: weights after them, captured against eager", "relative_error",
                relative_error(captured[1], weights), MARGIN * spread,
                variant.attention)  # fmt: skip
