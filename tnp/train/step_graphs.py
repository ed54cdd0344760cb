"""Captures a training step as CUDA graphs, one for each size of its tasks, in one memory pool.

The size of packed tasks includes their number of rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from tnp.cuda_graphs import Captures, Graph, GraphCache
from tnp.model.packing import Capacity
from tnp.ops._shared.casting import WeightCasts
from tnp.tasks.task import Task

# Steps that run eagerly before the first capture: cuBLAS, Triton and the optimizer create their
# state in them. Each size has at least one eager step, which chooses its kernels.
N_EAGER_BEFORE_CAPTURE = 3
MOST_GRAPHS = 256  # further sizes of tasks run without a graph

Step = Callable[[tuple[Task, ...], Capacity | None], torch.Tensor]
log = logging.getLogger("tnp.train.step")


class Watched:
    """Remembers the addresses that a captured step reads and writes; a graph knows only these."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, casts: WeightCasts
    ) -> None:
        self.copies = casts.copies()  # kept alive, even if later steps do not use them
        self.parameters = [
            (f"{prefix}.{name}".lstrip("."), module._parameters, name, parameter.data_ptr())
            for prefix, module in model.named_modules()
            for name, parameter in module.named_parameters(recurse=False)
        ]
        self.optimizer, self.state = optimizer, optimizer.state
        self.rates = [group["lr"] for group in optimizer.param_groups]

    def check(self) -> None:
        """Raises RuntimeError if a replay would train tensors that are no longer used."""
        again = "since the step was captured: make a new TrainingStep"
        for path, owner, name, address in self.parameters:
            if owner[name].data_ptr() != address:
                raise RuntimeError(f"parameter {path} was moved or replaced {again}")
        if self.optimizer.state is not self.state:
            raise RuntimeError(f"the optimizer's state was replaced {again}")
        groups = self.optimizer.param_groups
        if any(group["lr"] is not rate for group, rate in zip(groups, self.rates, strict=True)):
            raise RuntimeError(f"the optimizer's learning rate was replaced {again}, or fill_ it")


class StepGraphs:
    """Runs a step eagerly at first, and then replays the graph of its tasks' sizes.

    Args:
        run: the step; it must not wait for the device.
        watch: returns the current addresses, which must not change.
        captures: makes the graphs, on the device of the model.
        vary: whether tasks may have other sizes than the first.
    """

    def __init__(
        self, run: Step, watch: Callable[[], Watched], captures: Captures, vary: bool
    ) -> None:
        self._run, self._watch, self._captures, self._vary = run, watch, captures, vary
        self._graphs: GraphCache[tuple[Task, ...]] = GraphCache(
            captures, MOST_GRAPHS, log, "%d sizes of tasks were met: others run without a graph"
        )
        self._n_eager = 0

    def __call__(self, tasks: tuple[Task, ...], capacity: Capacity | None = None) -> torch.Tensor:
        """Returns the loss, a tensor of its own."""
        one = self._of_size(tasks, capacity)
        if one is None:
            return self._captures.run(partial(self._run, tasks, capacity))
        run = partial(self._run, one.inputs, capacity)
        # Eager calls read the static tasks too: torch.compile guards on strides, and a task with
        # another layout would make it compile again during the capture.
        for static, task in zip(one.inputs, tasks, strict=True):
            static.copy_(task)
        if not one.has_run or self._n_eager < N_EAGER_BEFORE_CAPTURE:
            with self._graphs.eager(one):
                loss = self._captures.run(run)
            self._n_eager += 1
            return loss
        if one.replay is None:
            # Otherwise memory of the eager steps would stay allocated beside the graphs' memory.
            torch.cuda.empty_cache()
            self._graphs.capture(one, run)
            one.kept = self._watch()
        one.kept.check()
        one.replay()
        return one.result.clone()

    def _of_size(
        self, tasks: tuple[Task, ...], capacity: Capacity | None
    ) -> Graph[tuple[Task, ...]] | None:
        first = self._graphs.first
        if not self._vary and first is not None:
            if len(first.inputs) != len(tasks):
                raise ValueError(
                    f"the captured step takes {len(first.inputs)} tasks, not {len(tasks)}: give as "
                    "many in every call"
                )
            if capacity is None:
                return first  # a task of another size is refused where it is copied
        shapes = (x if x is None else (x.shape, x.dtype) for task in tasks for x in task)
        return self._graphs.get((*shapes, capacity), lambda: tuple(task.clone() for task in tasks))
