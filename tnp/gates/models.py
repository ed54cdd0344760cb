"""Builds a small model and its tasks, which all gates of the model share."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from tnp.dispatch import devices
from tnp.dispatch.spec import Budget, Call
from tnp.gates.checks import Check, error_ratio, max_abs_error, relative_error
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import FAMILIES, Variant
from tnp.ops.attention import OPERATOR
from tnp.tasks.gaussian_process import GaussianProcessTasks
from tnp.tasks.task import Task
from tnp.train.step import TrainingStep

SEED = 0
FLOAT64_BOUND = 1e-12  # about ten sums of up to a thousand products, each in its own order
LOSS_BOUND = 1e-3  # nats

Learned = tuple[torch.Tensor, dict[str, torch.Tensor]]  # loss, and gradients by parameter


@dataclass(frozen=True)
class Scale:
    """Holds the sizes for a device: the specification's width on a GPU, a toy on the CPU."""

    config: TNPConfig
    d_ff_storage: int
    dtype: torch.dtype
    batch: int
    n_context: int
    n_target: int
    learning_rate: float  # so small that two runs which round differently stay close


def scale(device: torch.device) -> Scale:
    if device.type == "cuda":
        config = TNPConfig(n_layers=2)
        return Scale(
            config, 1408, torch.bfloat16, batch=4, n_context=331, n_target=186, learning_rate=1e-4
        )
    config = TNPConfig(d_model=32, n_layers=2, n_heads=2, d_ff=85, n_components=3)
    return Scale(config, 96, torch.float32, batch=2, n_context=19, n_target=14, learning_rate=1e-3)


def implementations(device: torch.device) -> Iterator[str]:
    """Yields implementations of attention that run here in the gates' dtype."""
    chosen = scale(device)
    sizes = {"n_heads": chosen.config.n_heads, "n_q": chosen.n_context + chosen.n_target}
    sizes |= {"n_k": chosen.n_context, "head_dim": chosen.config.d_model // sizes["n_heads"]}
    dtype = str(chosen.dtype).removeprefix("torch.")
    problem = OPERATOR.problem(dtype, batch=chosen.batch, **sizes)
    call = Call(problem, devices.of_device(device), OPERATOR.differentiated)
    # An implementation that cannot run here has no result. Its benchmarks say why in their rows.
    for own in OPERATOR.implementations:
        if own.selectable and own.refuses(call) is None:
            yield own.name


def ours(device: torch.device, attention: str = "fused") -> Variant:
    """Returns a variant of all our operators, with attention `attention` and all switches."""
    operators = dict.fromkeys(FAMILIES, "fused") | {"attention": attention}
    width = scale(device).d_ff_storage
    return Variant("all operators of ours", **operators, skip_unread=True, d_ff_storage=width)


def variants(device: torch.device) -> Iterator[tuple[str, Variant]]:
    """Yields each implementation of attention with PyTorch's other operators.

    Gates of a switch of the model use these variants. Gate `skip_unread` checks the switches with
    all our operators, so that an edited kernel does not invalidate PyTorch's steps.
    """
    for name in implementations(device):
        yield name, Variant(f"attention {name}", attention=name)


def build_model(
    device: torch.device, variant: Variant, *, checkpoint: bool = False
) -> TransformerNP:
    """Returns the gate's model. Weights are equal for every variant and switch."""
    torch.manual_seed(SEED)
    chosen = scale(device)
    model = TransformerNP(chosen.config, variant, chosen.dtype, checkpoint=checkpoint)
    return model.to(device)


@torch.no_grad()
def moved(model: TransformerNP, units: int) -> TransformerNP:
    """Returns the model, after every weight grew by `units` times its dtype's `eps`."""
    for p in model.parameters():
        p.mul_(1 + units * torch.finfo(p.dtype).eps)
    return model


def recomputing(device: torch.device, variant: Variant) -> Iterator[tuple[str, TransformerNP]]:
    """Yields the model with each way of recomputing blocks in the backward pass."""
    yield "checkpointed", build_model(device, variant, checkpoint=True)
    selective = replace(variant, recompute_above=1)
    yield "computed again but for attention", build_model(device, selective)


def exact(model: TransformerNP, **switches: bool) -> TransformerNP:
    """Returns the same weights in float64, with the formula of every operator and some switches."""
    width = model.variant.d_ff_storage
    variant = Variant("exact", attention="reference", d_ff_storage=width, **switches)
    reference = TransformerNP(model.config, variant, torch.float64).double()
    reference.load_state_dict(model.state_dict())
    return reference.to(next(model.parameters()).device)


def task(device: torch.device, step: int) -> Task:
    chosen = scale(device)
    tasks = GaussianProcessTasks(device=device)
    return tasks.sample(SEED, step, chosen.batch, chosen.n_context, chosen.n_target)


def gradients(model: TransformerNP, batch: Task) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the loss, and all gradients in one vector."""
    loss, by_tensor = gradients_by_tensor(model, batch)
    return loss, torch.cat([gradient.flatten() for gradient in by_tensor.values()])


def gradients_by_tensor(
    model: TransformerNP, batch: Task, nll: Callable[..., torch.Tensor] | None = None
) -> Learned:
    """Returns the loss, and gradients by the parameter's name.

    `nll` replaces the model's own, for example compiled.
    """
    model.zero_grad(set_to_none=True)
    loss = (nll or model.nll)(*batch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def float64_checks(how: str, found: Learned, expected: Learned) -> Iterator[Check]:
    """Checks that loss and gradients in float64 equal the expected ones; `how` says which."""
    yield Check(f"float64 loss{how}", "max_abs_error",
                max_abs_error(found[0], expected[0]), FLOAT64_BOUND)  # fmt: skip
    for name, reference in expected[1].items():
        yield Check(f"float64 gradient of {name}{how}", "relative_error",
                    relative_error(found[1][name], reference), FLOAT64_BOUND)  # fmt: skip


def checks_of_variant(
    name: str, how: str, found: Learned, exact: Learned, pytorch: Learned, attention: str
) -> Iterator[Check]:
    """Checks loss and gradients of variant `name` against float64, in units of PyTorch's error."""
    yield Check(f"{name}: loss{how} against float64", "abs_error_nats",
                max_abs_error(found[0], exact[0]), LOSS_BOUND, attention)  # fmt: skip
    gradients = without_padding(found[1], exact[1])
    for what, reference in exact[1].items():
        yield Check(f"{name}: gradient of {what}{how} against float64", "error_ratio",
                    error_ratio(gradients[what], pytorch[1][what], reference), Budget.gradients,
                    attention)  # fmt: skip


def without_padding(
    padded: dict[str, torch.Tensor], unpadded: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    return {name: padded[name][tuple(map(slice, x.shape))] for name, x in unpadded.items()}


def padding(model: TransformerNP) -> float:
    """Returns the largest absolute weight in the zero padding of hidden layers."""
    layers = [*(block.mlp for block in model.blocks), model.heads]
    return max(
        max_abs_error(part, torch.zeros_like(part))
        for layer in layers
        for part in layer.padding().values()
    )


def train(step: TrainingStep, device: torch.device, n_steps: int) -> torch.Tensor:
    """Returns the losses of `n_steps` steps, each on its own task."""
    return torch.stack([step(task(device, index)) for index in range(n_steps)])


def weights(model: TransformerNP) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
