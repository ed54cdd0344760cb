"""A small model and its tasks, the same for every gate that trains one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from tnp.dispatch import devices
from tnp.dispatch.spec import Call
from tnp.gates.checks import max_abs_error
from tnp.model.config import TNPConfig
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import FAMILIES, Variant
from tnp.ops.attention import OPERATOR
from tnp.tasks.gaussian_process import GaussianProcessTasks
from tnp.tasks.task import Task
from tnp.train.step import TrainingStep

SEED = 0


@dataclass(frozen=True)
class Scale:
    """What a device can bear: the specification's width on a GPU, a toy on the CPU."""

    config: TNPConfig
    d_ff_storage: int
    dtype: torch.dtype
    batch: int
    n_context: int
    n_target: int
    # Small enough that two runs which round differently stay together.
    learning_rate: float


def scale(device: torch.device) -> Scale:
    if device.type == "cuda":
        config = TNPConfig(n_layers=2)
        return Scale(
            config, 1408, torch.bfloat16, batch=4, n_context=331, n_target=186, learning_rate=1e-4
        )
    config = TNPConfig(d_model=64, n_layers=2, n_heads=4, d_ff=85, n_components=3)
    return Scale(config, 96, torch.float32, batch=2, n_context=19, n_target=14, learning_rate=1e-3)


def implementations(device: torch.device) -> Iterator[str]:
    """PyTorch's attention backends and ours, those that run here in the dtype the gates use."""
    chosen = scale(device)
    sizes = {"n_heads": chosen.config.n_heads, "n_q": chosen.n_context + chosen.n_target}
    sizes |= {"n_k": chosen.n_context, "head_dim": chosen.config.d_model // sizes["n_heads"]}
    dtype = str(chosen.dtype).removeprefix("torch.")
    problem = OPERATOR.problem(dtype, batch=chosen.batch, **sizes)
    call = Call(problem, devices.of_device(device), OPERATOR.differentiated)
    # One that cannot run here has no result to check; its benchmarks say why in their rows.
    for own in OPERATOR.implementations:
        if own.selectable and own.refuses(call) is None:
            yield own.name


def ours(device: torch.device, attention: str = "fused") -> Variant:
    """All operators of ours, of attention `attention`, and the switches that go with them."""
    operators = dict.fromkeys(FAMILIES, "fused") | {"attention": attention}
    width = scale(device).d_ff_storage
    return Variant("all operators of ours", **operators, skip_unread=True, d_ff_storage=width)


def variants(device: torch.device) -> Iterator[tuple[str, Variant]]:
    """Each implementation of attention with PyTorch's other operators.

    A switch of the model is checked with these; with all operators of ours by gate `skip_unread`,
    so that an edited kernel voids no step of PyTorch's.
    """
    for name in implementations(device):
        yield name, Variant(f"attention {name}", attention=name)


def build_model(
    device: torch.device, variant: Variant, *, checkpoint: bool = False
) -> TransformerNP:
    """The gate's model; equal weights for every variant and switch."""
    torch.manual_seed(SEED)
    chosen = scale(device)
    model = TransformerNP(chosen.config, variant, chosen.dtype, checkpoint=checkpoint)
    return model.to(device)


def recomputing(device: torch.device, variant: Variant) -> Iterator[tuple[str, TransformerNP]]:
    """The model with each way of computing blocks again in the backward pass."""
    yield "checkpointed", build_model(device, variant, checkpoint=True)
    selective = replace(variant, recompute_above=1)
    yield "computed again but for attention", build_model(device, selective)


def exact(model: TransformerNP, **switches: bool) -> TransformerNP:
    """The same weights in float64, every operator by its formula, and these switches on."""
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
    """Loss and all gradients in one vector."""
    loss, by_tensor = gradients_by_tensor(model, batch)
    return loss, torch.cat([gradient.flatten() for gradient in by_tensor.values()])


def gradients_by_tensor(
    model: TransformerNP, batch: Task, nll: Callable[..., torch.Tensor] | None = None
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss, and gradients by the parameter's name; of `nll`, the model compiled, where given."""
    model.zero_grad(set_to_none=True)
    loss = (nll or model.nll)(*batch)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def padding(model: TransformerNP) -> float:
    """The largest weight that a hidden layer's zero padding has come to."""
    layers = [*(block.mlp for block in model.blocks), model.heads]
    return max(
        max_abs_error(part, torch.zeros_like(part))
        for layer in layers
        for part in layer.padding().values()
    )


def train(step: TrainingStep, device: torch.device, n_steps: int) -> torch.Tensor:
    """Losses of `n_steps` steps, each on a task of its own."""
    return torch.stack([step(task(device, index)) for index in range(n_steps)])


def weights(model: TransformerNP) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
