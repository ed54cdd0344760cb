"""Draws the figures: each module draws the view of the same name. `render` writes one to disk.

Planning reads the order of the figures alone, so it needs neither Altair nor a renderer.
"""

from tnp.util.lazy import offers

__getattr__, __dir__, __all__ = offers(
    __name__,
    {
        "tnp.figures.drawing": ("about", "draw", "finding", "render", "render_index"),
        "tnp.figures.story": ("FIGURES",),
    },
)
