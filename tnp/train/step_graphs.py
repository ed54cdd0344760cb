"""A training step captured as CUDA graphs, one for each size of its tasks, in one memory pool.

Of packed tasks the number of rows is a part of the size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from tnp.cuda_graphs import Captures
from tnp.model.packing import Capacity
from tnp.ops._shared.casting import WeightCasts
from tnp.tasks.task import Task

# Steps that are run eagerly before any is captured: cuBLAS, Triton and the optimizer create their
# state in them. One of each size is among them, or follows, which finds the kernels of that size.
N_EAGER_BEFORE_CAPTURE = 3
# Graphs kept at most. Their memory is shared, but each node of one takes some hundred bytes.
MOST_GRAPHS = 256

Step = Callable[[tuple[Task, ...], Capacity | None], torch.Tensor]
log = logging.getLogger("tnp.train.step")


class Watched:
    """What a captured step reads and writes, and where it lay: a graph knows addresses alone."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, casts: WeightCasts
    ) -> None:
        self.copies = casts.copies()  # kept, whatever later steps do without
        self.parameters = [
            (f"{prefix}.{name}".lstrip("."), module._parameters, name, parameter.data_ptr())
            for prefix, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]
        self.optimizer, self.state = optimizer, optimizer.state
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def check(self) -> None:
        """Raises RuntimeError where a replay would train what nobody reads any more."""
        again = "since the step was captured: make a new TrainingStep"
        for path, owner, name, address in self.parameters:
            if owner[name].data_ptr() != address:
                raise RuntimeError(f"parameter {path} was moved or replaced {again}")
        if self.optimizer.state is not self.state:
            raise RuntimeError(f"the optimizer's state was replaced {again}")
        groups = self.optimizer.param_groups
        if any(group["lr"] is not rate for group, rate in zip(groups, self.rates, strict=True)):
            raise RuntimeError(f"the optimizer's learning rate was replaced {again}, or fill_ it")


@dataclass
class _OfOneSize:
    tasks: tuple[Task, ...]  # static: what the graph reads
    has_run: bool = False
    replay: Callable[[], None] | None = None
    loss: torch.Tensor | None = None  # static: what the graph writes
    watched: Watched | None = None


class StepGraphs:
    """Runs a step eagerly at first, and then by replaying the graph of its tasks' sizes.

    Args:
        run: the step; it must not wait for the device.
        watch: what is to stay where it is, as it is now.
        captures: of the device where all of it lies.
        vary: whether tasks may have other sizes than the first.
    """

    def __init__(
        self, run: Step, watch: Callable[[], Watched], captures: Captures, vary: bool
    ) -> None:
        self._run, self._watch, self._captures, self._vary = run, watch, captures, vary
        self._by_size: dict[tuple, _OfOneSize] = {}
        self._n_eager, self._full = 0, False

    def __call__(self, tasks: tuple[Task, ...], capacity: Capacity | None = None) -> torch.Tensor:
        """The loss, a tensor of its own."""
        one = self._of_size(tasks, capacity)
        if one is None:
            return self._captures.run(partial(self._run, tasks, capacity))
        run = partial(self._run, one.tasks, capacity)
        # Eager calls read the static tasks too: torch.compile guards on strides, and a task that is
        # a view of another layout would make it compile again in the middle of the capture.
        for static, task in zip(one.tasks, tasks, strict=True):
            static.copy_(task)
        if not one.has_run or self._n_eager < N_EAGER_BEFORE_CAPTURE:
            loss = self._captures.run(run)
            self._n_eager += 1
            one.has_run = True
            return loss
        if one.replay is None:
            # What eager steps took would lie beside the graphs' memory, which is as much.
            torch.cuda.empty_cache()
            one.replay, one.loss = self._captures.capture(run)
            one.watched = self._watch()
        one.watched.check()
        one.replay()
        return one.loss.clone()

    def _of_size(self, tasks: tuple[Task, ...], capacity: Capacity | None) -> _OfOneSize | None:
        if not self._vary and self._by_size:
            one = next(iter(self._by_size.values()))
            if len(one.tasks) != len(tasks):
                raise ValueError(
                    f"the captured step is of {len(one.tasks)} tasks, not {len(tasks)}: give as "
                    "many each time"
                )
            if capacity is None:
                return one  # a task of another size is refused where it is copied
        shapes = (x if x is None else (x.shape, x.dtype) for task in tasks for x in task)
        size = (*shapes, capacity)
        if size not in self._by_size:
            if len(self._by_size) == MOST_GRAPHS:
                if not self._full:
                    log.warning(
                        "%d sizes of tasks were met: others run without a graph",
                        MOST_GRAPHS,
                    )
                self._full = True
                return None
            self._by_size[size] = _OfOneSize(tuple(task.clone() for task in tasks))
        return self._by_size[size]
