"""Orders the figures by a reader's questions."""

# Question → figures, which are modules of `tnp.figures`.
STORY = {
    "Is it faster?": ("speedup", "matrix", "language_models"),
    "What does it cost in memory?": ("memory",),
    "Is it right?": ("training",),
    "What does each part give?": ("ablation", "operators", "stages"),
    "How near is it to the hardware?": ("roofline", "profiles", "host"),
    "How sure are we?": ("noise",),
}
FIGURES = tuple(name for figures in STORY.values() for name in figures)
