"""Tasks: sets of context points to learn a function from, and target points to predict.

A source draws a task as a function of (seed, step) alone, so that a resumed run sees what an
unbroken one would have seen.
"""

from tnp.tasks.collate import collate
from tnp.tasks.functions import FunctionTasks
from tnp.tasks.gaussian_process import GaussianProcessTasks
from tnp.tasks.images import ImageTasks
from tnp.tasks.sizes import draw_sizes
from tnp.tasks.tables import functions_of_table
from tnp.tasks.task import Context, Task

__all__ = [
    "Context",
    "FunctionTasks",
    "GaussianProcessTasks",
    "ImageTasks",
    "Task",
    "collate",
    "draw_sizes",
    "functions_of_table",
]
