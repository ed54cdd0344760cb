"""Checks phase 5: steps in 8 bits stay finite at shapes `mid` and `large`, and hide no bad value.

A model of each variant in 8 bits makes a few training steps on normal points. All losses and all
gradients of the next step must be finite. The scales of 8 bits must not hide what is wrong: with an
infinite weight, or a NaN among the context values, the loss must not be finite.
"""

import math
from collections.abc import Iterator

import torch

from tnp.gates import models
from tnp.gates.checks import Check, Unsupported
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant, named_specs
from tnp.tasks.task import Task
from tnp.train.step import TrainingStep

# Tasks, context and target points, as config.yaml has them.
SHAPES = {"mid": (4, 10_000, 1000), "large": (1, 200_000, 5000)}
N_STEPS = 3
LEARNING_RATE = 3e-4  # of the training runs


def checks(device: torch.device) -> Iterator[Check]:
    if device.type != "cuda":
        raise Unsupported("this gate needs an NVIDIA GPU")
    for name in variants():
        for shape, sizes in SHAPES.items():
            found = n_not_finite(_model(device, name), [_task(device, *sizes, seed=i)
                                                        for i in range(N_STEPS + 1)])  # fmt: skip
            yield Check(f"{name} at {shape}: losses and gradients not finite", "count", found, 0.0)
        for what, made in BAD.items():
            loss = made(_model(device, name), _task(device, *SHAPES["mid"], seed=0))
            yield Check(f"control must fail: {name}, the loss with {what}", "count",
                        float(not math.isfinite(loss)), 1.0, larger_is_better=True)  # fmt: skip


def variants() -> list[str]:
    """Returns the package's variants with products in 8 bits, without those that pack rows."""
    known = {name: Variant.named(name) for name in named_specs()}
    return [name for name, variant in known.items() if variant.in_8_bits and not variant.pack]


def n_not_finite(model: TransformerNP, tasks: list[Task]) -> float:
    """Trains on all tasks but the last. Returns how many losses and gradients are not finite.

    A parameter's gradient counts once.
    """
    step = TrainingStep(model, learning_rate=LEARNING_RATE)
    losses = [step(task) for task in tasks[:-1]]
    loss, gradients = models.gradients_by_tensor(model, tasks[-1])
    return float(sum(not torch.isfinite(x).all() for x in (*losses, loss, *gradients.values())))


@torch.no_grad()
def infinite_weight(model: TransformerNP, task: Task) -> float:
    """Returns the loss with one infinite weight in the first block's MLP."""
    model.blocks[0].mlp.up[0, 0] = math.inf
    return model.nll(*task).item()


@torch.no_grad()
def infinite_norm(model: TransformerNP, task: Task) -> float:
    """Returns the loss with one infinite weight in the norm before the first block's MLP."""
    model.blocks[0].mlp.norm.weight[0] = math.inf
    return model.nll(*task).item()


@torch.no_grad()
def nan_in_context(model: TransformerNP, task: Task) -> float:
    """Returns the loss with a NaN among the values of the first sample's context."""
    task.y_context[0, -1, 0] = math.nan
    return model.nll(*task).item()


BAD = {
    "an infinite weight": infinite_weight,
    "an infinite weight of a norm": infinite_norm,
    "a NaN in y": nan_in_context,
}


def _model(device: torch.device, name: str) -> TransformerNP:
    torch.manual_seed(models.SEED)
    return TransformerNP(TNPConfig(), Variant.named(name), torch.bfloat16).to(device)


def _task(device: torch.device, batch: int, n_context: int, n_target: int, seed: int) -> Task:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((n_context, 1), (n_context, 1), (n_target, 1), (n_target, 1))
    return Task(*(torch.randn(batch, *size, generator=generator) for size in sizes)).to(device)
