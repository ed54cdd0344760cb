"""Checks phase 5: 8 bits change each gradient by less than a tenth of its noise between batches.

A model with all our operators is trained a little in 16 bits. Then it computes gradients of the
same batches twice with the same weights: in 16 bits, and with one operator in 8 bits. For each
parameter, the root mean square of the two gradients' difference must be below a tenth of the
standard deviation between batches.

Model and batches have the sizes of shape `small`, which is too slow without a GPU. A control has
MLP weights in two bits: its largest ratio must exceed the bound.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import torch

from tnp.dispatch import devices
from tnp.dispatch.registry import catalog
from tnp.dispatch.spec import Call
from tnp.gates import models
from tnp.gates.checks import Check, Unsupported
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import FAMILIES, Variant, storage_width
from tnp.tasks.gaussian_process import GaussianProcessTasks
from tnp.tasks.task import Task
from tnp.train.step import TrainingStep

BOUND = 0.1
N_BATCHES = 16
LEARNING_RATE = 1e-4
N_STEPS = 300
SIZES = 64, 64, 500  # tasks, context and target points


def checks(device: torch.device) -> Iterator[Check]:
    if device.type != "cuda":
        raise Unsupported("this gate needs an NVIDIA GPU")
    model = _trained(device)
    batches = [_task(device, N_STEPS + index) for index in range(N_BATCHES)]
    for family, op, name in _in_8_bits(device):
        other = _like(model, replace(model.variant, **{family: name}))
        for parameter, ratio in ratios(model, other, batches).items():
            what = f"gradient of {parameter}, {op} {name}"
            yield Check(f"{what}: difference over the deviation between batches", "ratio",
                        ratio, BOUND, name, op=op)  # fmt: skip
    coarse = _like(model, model.variant)
    round_mlp_to_2_bits(coarse)
    yield Check("control must fail: weights of the MLP in 2 bits", "ratio",
                max(ratios(model, coarse, batches).values()), BOUND,
                larger_is_better=True)  # fmt: skip


def _in_8_bits(device: torch.device) -> Iterator[tuple[str, str, str]]:
    """Yields (family, operator, implementation) with a gradient, whose `precision` is 8 bits."""
    config, (batch, n_context, n_target) = TNPConfig(), SIZES
    model = asdict(config) | {"d_ff_storage": storage_width(config.d_ff)}
    run = {"batch": batch, "n_context": n_context, "n_target": n_target, "dtype": "bfloat16"}
    for family in FAMILIES:
        for operator in catalog().family(family):
            for own in operator.implementations:
                if not own.precision or not own.differentiable:
                    continue
                problem = operator.within(model, run)
                call = Call(problem, devices.of_device(device), operator.differentiated)
                if own.refuses(call) is None:
                    yield family, operator.name, own.name


def _trained(device: torch.device) -> TransformerNP:
    torch.manual_seed(models.SEED)
    model = TransformerNP(TNPConfig(), Variant.named("fused"), torch.bfloat16).to(device)
    step = TrainingStep(model, learning_rate=LEARNING_RATE)
    for index in range(N_STEPS):
        step(_task(device, index))
    return model


def _task(device: torch.device, index: int) -> Task:
    return GaussianProcessTasks(device=device).sample(models.SEED, index, *SIZES)


def _like(model: TransformerNP, variant: Variant) -> TransformerNP:
    """Returns a model with the same weights and another variant."""
    other = TransformerNP(model.config, variant, model.compute_dtype)
    other.load_state_dict(model.state_dict())
    return other.to(next(model.parameters()).device)


def ratios(model: TransformerNP, other: TransformerNP, batches: Sequence[Task]) -> dict[str, float]:
    """Returns, by parameter, the gradients' RMS difference ÷ their deviation between batches."""
    total, squares, differences = {}, {}, {}
    for batch in batches:
        _, gradients = models.gradients_by_tensor(model, batch)
        _, others = models.gradients_by_tensor(other, batch)
        for name, gradient in gradients.items():
            gradient = gradient.double()
            total[name] = total.get(name, 0.0) + gradient
            squares[name] = squares.get(name, 0.0) + gradient.square().sum()
            difference = (others[name].double() - gradient).square().sum()
            differences[name] = differences.get(name, 0.0) + difference
    n, found = len(batches), {}
    for name, one in total.items():
        variance = (squares[name] - one.square().sum() / n) / (n - 1)
        found[name] = (differences[name] / n / variance).sqrt().item()
    return found


@torch.no_grad()
def round_mlp_to_2_bits(model: TransformerNP) -> None:
    """Rounds the weights of every MLP to −1, 0 or 1 times a scale for each row."""
    for block in model.blocks:
        for weight in (block.mlp.up, block.mlp.down):
            scale = 1.5 * weight.abs().mean(-1, keepdim=True).clamp(min=1e-12)
            weight.copy_((weight / scale).round().clamp(-1, 1) * scale)
