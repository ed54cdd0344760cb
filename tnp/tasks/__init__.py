"""Tasks: sets of context points to learn a function from, and target points to predict.

A source draws a task as a function of (seed, step) alone, so that a resumed run sees what an
unbroken one would have seen.
"""

from tnp.tasks.gaussian_process import GaussianProcessTasks
from tnp.tasks.images import ImageTasks
from tnp.tasks.task import Context, Task

__all__ = ["Context", "GaussianProcessTasks", "ImageTasks", "Task"]
