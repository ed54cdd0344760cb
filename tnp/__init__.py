"""Transformer Neural Processes, the kernels that make them fast, and the proof of both.

What a user needs is offered here, and imported when it is first used: `tnp.TransformerNP`,
`tnp.fit`. The operators are packages of `tnp.ops`: `from tnp.ops.attention import attention`.
"""

from tnp import _moved
from tnp.util.lazy import offers

__getattr__, __dir__, __all__ = offers(
    __name__,
    {
        "tnp.model.config": ("TNPConfig",),
        "tnp.model.transformer_np": ("TransformerNP",),
        "tnp.model.variants": ("Variant",),
        "tnp.tasks.collate": ("collate",),
        "tnp.tasks.functions": ("FunctionTasks",),
        "tnp.tasks.gaussian_process": ("GaussianProcessTasks",),
        "tnp.tasks.images": ("ImageTasks",),
        "tnp.tasks.normalization": ("Normalization",),
        "tnp.tasks.sizes": ("draw_sizes",),
        "tnp.tasks.tables": ("functions_of_table",),
        "tnp.tasks.task": ("Context", "Task"),
        "tnp.train.loop": ("fit",),
        "tnp.train.step": ("TrainingStep",),
    },
)
_moved.install()
