"""Runs decoders: language models of the kinds GPT-2, Llama and Qwen3, read from Hugging Face.

`Decoder` holds sizes and weights, `generate` writes text with it. Only `tnp.llm.huggingface`
imports transformers, and only inside of functions.
"""

from tnp.util.lazy import offers

__getattr__, __dir__, __all__ = offers(
    __name__,
    {
        "tnp.llm.cache": ("Cache",),
        "tnp.llm.decoder": ("Decoder", "Sizes"),
    },
)
