"""Tasks: sets of context points to learn a function from, and target points to predict.

A source draws a task as a function of (seed, step) alone, so that a resumed run sees what an
unbroken one would have seen.
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
