"""Computes joint samples and joint densities: each target is given the earlier ones.

Targets are taken in runs. The targets of a run share one encoding of the context, and see each
other through the buffer (`tnp.model.causal_buffer`). After the run they join the context. A run of
one target is a prediction, and needs no buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from tnp.cuda_graphs import Captures
from tnp.model.buffer_rows import behind
from tnp.model.causal_buffer import log_densities, require_buffer
from tnp.model.prediction import as_context, encode, on_device, predict, require_on_host
from tnp.model.sample_graph import Draws
from tnp.tasks.task import Context, Task, is_padding, require_tasks, without_padding
from tnp.util.checks import require_count

if TYPE_CHECKING:
    from tnp.model.network import Network


def sample(
    model: Network,
    context: Context,
    x_target: torch.Tensor,
    n_samples: int,
    buffer: bool | None,
    cuda_graph: bool,
) -> torch.Tensor:
    """Implements `TransformerNP.sample_jointly`."""
    n_samples = require_count("n_samples", n_samples, at_least=1)
    context = as_context(model, context)
    x_target = on_device(model, "x_target", x_target)
    model.prepared_x(x_target)
    if len(x_target) != len(context.x):
        raise ValueError(
            f"x_target has {len(x_target)} samples and the context {len(context.x)}: they must "
            "have equally many"
        )
    device = x_target.device
    require_on_host(model, "x_target", x_target, None)
    if cuda_graph and device.type != "cuda":
        raise RuntimeError(f"a CUDA graph needs a CUDA device: x_target is on {device}")
    size, drawn = _run_size(model, buffer), []
    x_target, repeats = x_target.repeat(n_samples, 1, 1), n_samples
    draws = Draws(model, x_target, Captures(device) if cuda_graph else None) if size > 1 else None
    for x in x_target.split(size, 1):
        if draws is None:
            y = predict(model, _repeated(context, repeats), x).sample()
        else:
            y = draws.run(encode(model, context), x.shape[1])
        drawn.append(y.to(context.y.dtype))
        context, repeats = _joined(_repeated(context, repeats), x, y), 1
    return torch.cat(drawn, 1).unflatten(0, (n_samples, -1))


def log_density(model: Network, task: Task, buffer: bool | None) -> torch.Tensor:
    """Implements `TransformerNP.joint_log_density`."""
    require_tasks("task", [task])
    size, lengths, context = _run_size(model, buffer), task.target_lengths, task.context
    x_target, y_target = (without_padding(x, lengths) for x in (task.x_target, task.y_target))
    found = []
    for x, y in zip(x_target.split(size, 1), y_target.split(size, 1), strict=True):
        found.append(log_densities(model, context, x, y))
        context = _joined(context, x, y)  # padding is followed only by padding
    densities = torch.cat(found, 1)
    if lengths is not None:
        densities = densities.masked_fill(is_padding(lengths, task.n_target), 0.0)
    return densities.sum(1)


def _run_size(model: Network, buffer: bool | None) -> int:
    """Returns the targets of a run. The first sees only the context, and all but the last enter."""
    if buffer:
        require_buffer(model)
    has_one = model.config.buffer is not None
    return 1 + model.config.buffer if has_one and buffer is not False else 1


def _repeated(context: Context, repeats: int) -> Context:
    x, y = (each.repeat(repeats, 1, 1) for each in context[:2])
    return Context(x, y, None if context.lengths is None else context.lengths.repeat(repeats))


def _joined(context: Context, x: torch.Tensor, y: torch.Tensor) -> Context:
    """Returns the context with points added after each sample's own points."""
    pairs = (context.x, x.to(context.x.dtype)), (context.y, y.to(context.y.dtype))
    both = [torch.cat(pair, 1) for pair in pairs]
    if context.lengths is None:
        return Context(*both)
    order = behind(context.lengths, context.x.shape[1], x.shape[1])[..., None]
    points = (each.gather(1, order.expand_as(each)) for each in both)
    return Context(*points, context.lengths + x.shape[1])
