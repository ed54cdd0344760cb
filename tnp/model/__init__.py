"""The model: its network, the variants of its layers, predictions, samples, checkpoints."""

from tnp.util.lazy import offers

__getattr__, __dir__, __all__ = offers(
    __name__,
    {
        "tnp.model.config": ("TNPConfig",),
        "tnp.model.transformer_np": ("TransformerNP",),
        "tnp.model.variants": ("Variant",),
    },
)
