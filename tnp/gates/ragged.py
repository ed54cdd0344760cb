"""Checks phase 10: samples of different sizes are computed as if each stood alone.

In float64, loss and gradients of a padded or packed batch equal those of its single samples, except
for rounding. Padding is NaN. In the model's dtype, every attention and all our operators are as
near to float64 as PyTorch's own form without padding. A model that takes padding for points must
fail.
Captured steps, with one graph for each bucket of sizes, equal the eager ones.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch

from tnp.gates import models
from tnp.gates.checks import Check, max_abs_error
from tnp.gates.cuda_graphs import Trained, against_eager, starts, trained
from tnp.model.buckets import Buckets
from tnp.model.packing import Capacity, capacity_for
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.tasks.task import Task
from tnp.train.step import TrainingStep

N_STEPS = 12
SPARE = (3, 5)  # padding that even the largest sample has, in context and target points


def checks(device: torch.device) -> Iterator[Check]:
    whole = models.task(device, 0)
    batch = _ragged(whole, math.nan)
    in_float64 = batch.to(dtype=torch.float64)
    plain = models.build_model(device, Variant("plain", attention="reference"))
    exact = models.exact(plain)
    singly = _one_by_one(exact, in_float64)
    for how, capacity in _ways(batch):
        together = _gradients(exact, in_float64, capacity)
        yield from models.float64_checks(f", {how} against one by one", together, singly)
    points = (x.nan_to_num(0.0) for x in list(in_float64)[:4])
    ignoring, _ = models.gradients_by_tensor(exact, Task(*points))
    yield Check("control must fail: padding taken for points", "abs_error_nats",
                max_abs_error(ignoring, singly[0]), models.LOSS_BOUND,
                larger_is_better=True)  # fmt: skip
    pytorch = _one_by_one(plain, batch)
    for name, variant in (*models.variants(device), *_ours(device)):
        model = models.build_model(device, variant)
        for how, capacity in _ways(batch):
            found = _gradients(model, batch, capacity)
            yield from models.checks_of_variant(
                name, f", {how}", found, singly, pytorch, variant.attention
            )
    if device.type == "cuda":
        for name, variant in (*models.variants(device), *_ours(device)):
            for pack in (False, True):
                yield from _captured(device, name, replace(variant, pack=pack))


def _ways(batch: Task) -> list[tuple[str, Capacity | None]]:
    """Returns each way to compute ragged samples together, with its packed rows (None: padded)."""
    capacity = capacity_for(batch.count(), batch.batch, (batch.n_context, batch.n_target))
    return [("padded with NaN", None), ("packed, NaN behind each sample", capacity)]


def _gradients(model: TransformerNP, batch: Task, capacity: Capacity | None) -> models.Learned:
    return models.gradients_by_tensor(model, batch, partial(model.nll, capacity=capacity))


def _ours(device: torch.device) -> Iterator[tuple[str, Variant]]:
    """Yields a variant with all our operators, if our attention runs here."""
    if "fused" in models.implementations(device):
        yield "all operators of ours", models.ours(device)


def _lengths(n_samples: int, most: int, device: torch.device) -> torch.Tensor:
    """Returns lengths: all points, one, and numbers in between."""
    numbers = [most, 1, most // 2 + 1, most // 3 + 1]
    return torch.tensor(numbers[:n_samples], dtype=torch.int32, device=device)


def _ragged(task: Task, fill: float) -> Task:
    """Returns the task with samples of different sizes, padded with `fill`."""
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


def _one_by_one(model: TransformerNP, task: Task) -> models.Learned:
    """Returns loss and gradients of samples that never meet, weighted by their targets."""
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

    def run(cuda_graph: bool = False, units: int = 0) -> Trained:
        model = models.moved(models.build_model(device, variant), units)
        rate = models.scale(device).learning_rate
        step = TrainingStep(model, learning_rate=rate, cuda_graph=cuda_graph, buckets=buckets)
        tasks = []
        for index in range(N_STEPS):
            (m, n), task = sizes[index % len(sizes)], models.task(device, index)
            cut = (task.x_context[:, :m], task.y_context[:, :m])
            one = Task(*cut, task.x_target[:, :n], task.y_target[:, :n])
            tasks.append(_ragged(one, 0.0) if pack else one)
        return trained(step, model, tasks)

    eager, captured = [run(units=k) for k in starts(variant.attention)], run(cuda_graph=True)
    losses = f"{name}: losses of {N_STEPS} steps of {len(sizes)} sizes"
    names = losses, f"{name}: weights after them"
    yield from against_eager(names, captured, eager, variant.attention)
