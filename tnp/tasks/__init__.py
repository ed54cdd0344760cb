"""Holds tasks: context points to learn a function from, and target points to predict.

A source draws a task as a function of only (seed, step), so that a resumed run sees the same tasks
as an unbroken run.
"""

from tnp.util.lazy import offers

__getattr__, __dir__, __all__ = offers(
    __name__,
    {
        "tnp.tasks.collate": ("collate",),
        "tnp.tasks.functions": ("FunctionTasks",),
        "tnp.tasks.gaussian_process": ("GaussianProcessTasks",),
        "tnp.tasks.images": ("ImageTasks",),
        "tnp.tasks.sizes": ("draw_sizes",),
        "tnp.tasks.tables": ("functions_of_table",),
        "tnp.tasks.task": ("Context", "Task"),
    },
)
