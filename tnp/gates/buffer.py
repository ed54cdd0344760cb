"""Checks phase 10: the buffer gives the results of the full computation under an explicit mask.

In float64, three results equal those of `masked`, except for rounding. They are the training loss
with its gradients, the joint density of one pass, and the density of points that enter one by one.
In the model's dtype, every attention and all our operators come as near as PyTorch's formula does.
Our kernels are checked with separate launches for each kind of row, and with one launch for all. On
a GPU, captured joint samples equal launched ones. Two controls must fail: a diagonal that is one
off, and a buffer taken for context.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch

from tnp.dispatch import devices
from tnp.dispatch.spec import OWN, Budget, Call
from tnp.gates import models
from tnp.gates.checks import Check, error_ratio, max_abs_error, relative_error
from tnp.gates.models import FLOAT64_BOUND
from tnp.model.causal_buffer import Buffer, Points, log_densities
from tnp.model.prediction import Prediction
from tnp.model.transformer_np import TransformerNP
from tnp.model.variants import Variant
from tnp.ops.attention import OPERATOR
from tnp.ops.attention.torch_forms import attend, softmax_scale
from tnp.ops.mixture_nll import mixture_nll
from tnp.ops.projection import linear
from tnp.tasks.task import Context, Task

CONTROL_BOUND = 1e-6  # one point more or less changes little in an untrained model
ROOM = {"cuda": 40, "cpu": 3}  # points of the buffer; training takes two groups of as many targets
NEAR = 100  # points of a context that fits on chip with the buffer


def masked(
    model: TransformerNP,
    context: Context,
    entered: Points,
    x_target: torch.Tensor,
    n_seen: torch.Tensor,
) -> torch.Tensor:
    """Returns mixture parameters [B, N, K, 1 + 2·d_y] by one pass under a mask: the definition.

    Args:
        model: a model with a buffer.
        context: a context without padding, in the model's units like all arguments.
        entered: x [B, n, d_x] and y [B, n, d_y] of the buffer's points in their order.
        x_target: [B, N, d_x].
        n_seen: int64 [N], how many of the buffer's points a target sees.
    """
    dtype = model.compute_dtype
    h = torch.cat(
        [
            model.embed(context.x, context.y, None, dtype),
            model.embed(*entered, None, dtype) + model.embed.role.to(dtype),
            model.embed(None, None, x_target, dtype),
        ],
        1,
    )
    m, n = context.x.shape[1], entered[0].shape[1]
    seen, update = visible(context, n, n_seen), None
    for block in model.blocks:
        own = block.attention
        h, x = own.norm(h, update)
        q, k, v = own.project(x)
        o = attend(q, k, v, seen, softmax_scale(q.shape[-1] ** -0.5, own.base2))
        h, update = block.mlp(h, linear(o.transpose(1, 2).flatten(-2), own.output))
    return model.heads(h[:, m + n :].contiguous(), update[:, m + n :].contiguous())


def visible(context: Context, n_buffer: int, n_seen: torch.Tensor) -> torch.Tensor:
    """Returns bool [B, 1, rows, rows] of context, buffer and targets: which row sees which."""
    m, n = context.x.shape[1], n_buffer
    row = torch.arange(m + n + len(n_seen), device=context.x.device)
    place = row - m  # a row's place in the buffer
    last = torch.cat([torch.full_like(row[:m], -1), place[m : m + n], n_seen - 1])
    of_buffer = (place >= 0) & (place < n) & (place <= last[:, None])
    lengths = context.lengths
    if lengths is None:
        lengths = torch.full_like(context.x[:, 0, 0], m, dtype=torch.int32)
    of_context = (row < m) & (row < lengths[:, None])
    return (of_context[:, None] | of_buffer)[:, None]


def masked_log_density(model: TransformerNP, task: Task, more: int = 0) -> torch.Tensor:
    """Returns log p(y_i | x_i, context, targets before i), [B, N], by `masked`.

    Each target sees `more` additional targets.
    """
    context = Context(*model.prepared_context(*task.context), task.context_lengths)
    points = model.prepared_x(task.x_target), model.in_units("y", task.y_target)
    n_seen = torch.arange(task.n_target, device=task.x_target.device) + more
    found = masked(model, context, points, points[0], n_seen)
    return Prediction(found, model.config.sigma_min, model.normalization).log_prob(task.y_target)


def in_training(n_target: int, room: int) -> tuple[list[int], list[int]]:
    """Returns the targets that enter the buffer, and how many of them each target sees."""
    n = min(room, n_target // 2)
    turn = 2 * (n_target // (2 * n))  # targets of a turn; the last half of them see the buffer
    sees = [i < n * turn and i % turn >= turn // 2 for i in range(n_target)]
    return [i * turn for i in range(n)], [(i // turn + 1) * sees[i] for i in range(n_target)]


def masked_loss(model: TransformerNP, task: Task) -> torch.Tensor:
    """Computes `model.loss` by `masked`."""
    entering, n_seen = in_training(task.n_target, model.config.buffer)
    context = Context(*model.prepared_context(*task.context), task.context_lengths)
    x, y = model.prepared_x(task.x_target), model.in_units("y", task.y_target)
    seen = torch.tensor(n_seen, device=x.device)
    found = masked(model, context, (x[:, entering], y[:, entering]), x, seen)
    return mixture_nll(found, y, sigma_min=model.config.sigma_min)


def one_by_one(model: TransformerNP, task: Task) -> torch.Tensor:
    """Returns the result of `masked_log_density` from points that enter one after another."""
    known = Buffer(model, model.encode(task.context), task.n_target - 1)
    entering, found = None, []
    for x, y in zip(task.x_target.split(1, 1), task.y_target.split(1, 1), strict=True):
        found.append(known.predict(x, entering).log_prob(y))
        entering = x, y
    return torch.cat(found, 1)


def build(device: torch.device, variant: Variant) -> TransformerNP:
    """Returns the gates' model with a buffer. Its points differ from a context's points."""
    plain = models.build_model(device, variant)
    config = replace(plain.config, buffer=ROOM[device.type])
    model = TransformerNP(config, variant, plain.compute_dtype).to(device)
    weights = {"embed.role": torch.linspace(-1.0, 1.0, config.d_model)}
    model.load_state_dict(plain.state_dict() | weights)
    return model


def checks(device: torch.device) -> Iterator[Check]:
    batch = _ragged(models.task(device, 0))
    double = batch.to(dtype=torch.float64)
    plain = build(device, Variant("plain", attention="reference"))
    exact = models.exact(plain)
    by_mask = _by_mask(exact, double)
    found = models.gradients_by_tensor(exact, double)
    yield from models.float64_checks(" against the mask", found, by_mask)
    with torch.no_grad():
        one_run_double = _one_run(double)
        joint = masked_log_density(exact, one_run_double)
        for how, other in _densities(exact, one_run_double):
            yield Check(f"float64 joint density, {how}, against the mask", "relative_error",
                        relative_error(other, joint), FLOAT64_BOUND)  # fmt: skip
        for what, other in _broken(exact, one_run_double):
            yield Check(f"control must fail: {what}", "relative_error",
                        relative_error(other, joint), CONTROL_BOUND,
                        larger_is_better=True)  # fmt: skip
        if device.type == "cuda":
            yield Check("float64 draws, captured, against launched ones", "max_abs_error",
                        max_abs_error(*_draws(exact, double)), FLOAT64_BOUND)  # fmt: skip
    yield from _of_variants(device, plain, exact, batch, _variants(device))
    yield from _of_variants(device, plain, exact, _near(batch), _at_once(device))


def _of_variants(
    device: torch.device,
    plain: TransformerNP,
    exact: TransformerNP,
    batch: Task,
    variants: Iterator[tuple[str, Variant]],
) -> Iterator[Check]:
    """Checks variants in the model's dtype against float64. PyTorch's error is the unit."""
    in_float64, pytorch = _by_mask(exact, batch.to(dtype=torch.float64)), _by_mask(plain, batch)
    one_run = _one_run(batch)
    with torch.no_grad():
        joint = masked_log_density(exact, one_run.to(dtype=torch.float64))
        own_joint = masked_log_density(plain, one_run)
    for name, variant in variants:
        model, attention = build(device, variant), variant.attention
        found = models.gradients_by_tensor(model, batch)
        yield from models.checks_of_variant(name, "", found, in_float64, pytorch, attention)
        with torch.no_grad():
            for how, other in _densities(model, one_run):
                yield Check(f"{name}: joint density, {how}, against float64", "error_ratio",
                            error_ratio(other, own_joint, joint), Budget.gradients,
                            attention)  # fmt: skip


def _ragged(task: Task) -> Task:
    """Returns the task with contexts of two sizes."""
    most = task.n_context
    lengths = torch.tensor([most, most // 3], dtype=torch.int32, device=task.x_context.device)
    return replace(task, context_lengths=lengths.repeat(task.batch // 2))


def _one_run(task: Task) -> Task:
    """Returns the task with as many targets as pass the buffer in one run."""
    n = ROOM[task.x_target.device.type] + 1
    return replace(task, x_target=task.x_target[:, :n], y_target=task.y_target[:, :n])


def _by_mask(model: TransformerNP, batch: Task) -> models.Learned:
    """Returns loss, and gradients by the parameter's name."""
    return models.gradients_by_tensor(model, batch, lambda *given: masked_loss(model, Task(*given)))


def _densities(model: TransformerNP, task: Task) -> Iterator[tuple[str, torch.Tensor]]:
    points = task.x_target, task.y_target
    yield "in one pass", log_densities(model, task.context, *points)
    yield "one by one", one_by_one(model, task)


def _draws(model: TransformerNP, task: Task) -> list[torch.Tensor]:
    """Returns joint samples from equal noise: by CUDA graphs, and launched."""
    x_target, found = task.x_target[:, : 2 * ROOM["cuda"] + 3], []
    for cuda_graph in (True, False):
        torch.manual_seed(0)
        found.append(model.sample_jointly(task.context, x_target, 2, cuda_graph=cuda_graph))
    return found


def _broken(model: TransformerNP, task: Task) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields densities by wrong masks, and without the vector that marks the buffer."""
    yield "the diagonal one off, a target sees itself", masked_log_density(model, task, more=1)
    yield "the diagonal one off the other way", masked_log_density(model, task, more=-1)
    other = models.exact(model)
    other.embed.role.zero_()
    yield "points of the buffer taken for context points", masked_log_density(other, task)


def _near(task: Task) -> Task:
    """Returns the task with contexts that fit on chip with the buffer."""
    n, lengths = NEAR, task.context_lengths.clamp(max=NEAR)
    return replace(
        task, x_context=task.x_context[:, :n], y_context=task.y_context[:, :n],
        context_lengths=lengths,
    )  # fmt: skip


@dataclass(frozen=True)
class _Apart(Variant):
    """Computes each kind of row separately, even if one launch could compute all."""

    buffered_attention = None


def _apart(variant: Variant) -> Variant:
    return _Apart(**{field.name: getattr(variant, field.name) for field in fields(variant)})


def _at_once(device: torch.device) -> Iterator[tuple[str, Variant]]:
    """Yields all our operators, with one launch for all kinds of rows; nothing without Triton."""
    if devices.of_device(device).kind != "cpu":
        yield "all operators of ours, rows at once", models.ours(device)


def _variants(device: torch.device) -> Iterator[tuple[str, Variant]]:
    """Yields PyTorch's attentions, and all our operators with each attention of ours.

    Each must take this mask here. Kinds of rows are launched separately.
    """
    chosen = models.scale(device)
    n_heads, dtype = chosen.config.n_heads, str(chosen.dtype).removeprefix("torch.")
    room = ROOM[device.type]
    problem = OPERATOR.problem(
        dtype, batch=chosen.batch, n_heads=3 * n_heads, n_kv_heads=n_heads, n_q=room,
        n_k=chosen.n_context + room, head_dim=chosen.config.d_model // n_heads, causal=True,
        n_keys=True,
    )  # fmt: skip
    call = Call(problem, devices.of_device(device), OPERATOR.differentiated)
    for own in OPERATOR.implementations:
        if own.selectable and own.refuses(call) is None:
            if own.provider == OWN:
                yield f"all operators of ours, {own.name}", _apart(models.ours(device, own.name))
            else:
                yield own.name, Variant(own.name, attention=own.name)
