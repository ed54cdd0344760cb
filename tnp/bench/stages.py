"""Where the time of an eager step goes: marks set by forward hooks, in passes of their own."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from tnp.bench.statistics import summarize
from tnp.bench.timing import Mark, elapsed_ms, mark, synchronize
from tnp.step import TrainingStep
from tnp.tasks import Task

Spans = dict[str, list[tuple[Mark, Mark]]]


def stage_rows(
    step: TrainingStep, task: Task, device: torch.device, n_passes: int
) -> list[dict[str, object]]:
    """One row a stage, milliseconds per step over `n_passes` eager steps.

    embed, attention, mlp and heads are forward time summed over their calls; loss is what follows
    the heads; backward includes what a checkpoint recomputes. Weights that are cast ahead of the
    forward pass are in none of them. The step must have run before.
    """
    passes = [_one_pass(step, task, device) for _ in range(n_passes)]
    synchronize(device)
    return [
        {"stage": stage}
        | summarize(
            [sum(elapsed_ms(*span) for span in spans[stage]) for spans in passes], "time_ms"
        )
        for stage in passes[0]
    ]


def _one_pass(step: TrainingStep, task: Task, device: torch.device) -> Spans:
    """An eager step by hand, its marks not yet read."""
    spans: Spans = defaultdict(list)
    step.optimizer.zero_grad(set_to_none=True)
    with step.casts.step():
        with _marking(_stages(step), spans, device):
            loss = step.nll(*task)
        after_loss = mark(device)
        loss.backward()
    after_backward = mark(device)
    spans["loss"].append((spans["heads"][-1][1], after_loss))
    spans["backward"].append((after_loss, after_backward))
    if step.update:
        step.optimizer.step()
        spans["optimizer"].append((after_backward, mark(device)))
    return spans


def _stages(step: TrainingStep) -> list[tuple[str, nn.Module]]:
    model = step.model
    blocks = [
        part
        for block in model.blocks
        for part in (("attention", block.attention), ("mlp", block.mlp))
    ]
    return [("embed", model.embed), *blocks, ("heads", model.heads)]


@contextmanager
def _marking(
    stages: list[tuple[str, nn.Module]], spans: Spans, device: torch.device
) -> Iterator[None]:
    """Mark both ends of every call of the modules; the hooks are gone before the backward pass."""
    starts: dict[nn.Module, Mark] = {}
    handles = []
    for stage, module in stages:

        def begin(module: nn.Module, _: object) -> None:
            starts[module] = mark(device)

        def end(module: nn.Module, _: object, __: object, stage: str = stage) -> None:
            spans[stage].append((starts[module], mark(device)))

        handles += [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
