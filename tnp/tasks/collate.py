"""Makes batches of tasks that differ in size."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tnp.tasks.task import Task, require_tasks


def collate(tasks: Sequence[Task]) -> Task:
    """Joins all samples of `tasks` in one batch, padded to the largest.

    It is a DataLoader's `collate_fn`.

    The batch has no lengths if all samples are equally long.

    Raises:
        TypeError: an element of `tasks` is no `Task`.
        ValueError: there is no task, or they differ in dimensions or devices.
    """
    if not tasks:
        raise ValueError("there is no task to collate: give at least one")
    require_tasks("tasks to collate", tasks)
    n_context = max(task.n_context for task in tasks)
    n_target = max(task.n_target for task in tasks)
    dimensions = {(task.x_context.shape[-1], task.y_context.shape[-1]) for task in tasks}
    if len(dimensions) > 1:
        found = " and ".join(f"d_x {d_x}, d_y {d_y}" for d_x, d_y in sorted(dimensions))
        raise ValueError(f"tasks of {found} cannot be in one batch")
    devices = {str(task.x_context.device) for task in tasks}
    if len(devices) > 1:
        found = " and ".join(sorted(devices))
        raise ValueError(f"tasks on {found} cannot be in one batch: move them to one device")
    padded = [task.padded(n_context, n_target) for task in tasks]
    batch = Task(*(torch.cat(parts) for parts in zip(*padded, strict=True)))
    if batch.count() == (batch.batch * n_context, batch.batch * n_target):
        return Task(*list(batch)[:4])
    return batch
