"""Names sizes of language models. Imports no torch: plans of the workflow read them."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tnp.util.checks import require_count

KINDS = ("gpt2", "llama", "qwen3")


@dataclass(frozen=True)
class Sizes:
    """Holds what a decoder's weights do not show by themselves.

    `kind` is "gpt2" (LayerNorm, learned positions, GELU in its tanh form, biases), "llama"
    (RMSNorm, rotation, SwiGLU) or "qwen3" (as Llama, with RMSNorm of each head's q and k).
    `longest` is the most tokens of a sequence. `tied`: the head is the embedding's matrix.
    """

    kind: str
    vocab: int
    width: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    eps: float
    longest: int
    tied: bool

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind is {self.kind!r}: choose from {', '.join(KINDS)}")
        for field in fields(self):
            if field.name not in ("kind", "eps", "tied"):
                require_count(field.name, getattr(self, field.name), 1)
        if self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_kv_heads is {self.n_kv_heads} and n_heads {self.n_heads}: the first must "
                "divide the second"
            )
        if self.rotates and self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}: it must be even, for a rotation")

    @property
    def gated(self) -> bool:
        """Returns whether the feed-forward layers are SwiGLU."""
        return self.kind != "gpt2"

    @property
    def rotates(self) -> bool:
        """Returns whether positions rotate q and k. Otherwise they are learned vectors."""
        return self.kind != "gpt2"


@dataclass(frozen=True)
class Stretch:
    """Holds the numbers by which Llama 3.1 and later stretch long wavelengths."""

    factor: float
    low: float
    high: float
    original: int  # positions that the model was first trained with


@dataclass(frozen=True)
class Model:
    """Holds a model's sizes, and of its rotation the base and how it is stretched."""

    sizes: Sizes
    theta: float = 0.0
    stretch: Stretch | None = None


def _model(
    kind: str, vocab: int, width: int, n_layers: int, heads: tuple[int, int, int], d_ff: int,
    *, eps: float, longest: int, tied: bool, theta: float = 0.0, stretch: Stretch | None = None,
) -> Model:  # fmt: skip
    sizes = Sizes(kind, vocab, width, n_layers, *heads, d_ff, eps, longest, tied)
    return Model(sizes, theta, stretch)


_LLAMA32 = Stretch(factor=32.0, low=1.0, high=4.0, original=8192)

# Heads are (n_heads, n_kv_heads, head_dim). The numbers are those of the published configurations:
# openai-community/gpt2, meta-llama/Llama-3.2-1B, meta-llama/Meta-Llama-3-8B, Qwen/Qwen3-0.6B. The
# small ones are for gates and tests. Their heads are not tied: with a tied head a random model
# repeats one token.
MODELS = {
    "gpt2": _model(
        "gpt2", 50257, 768, 12, (12, 12, 64), 3072, eps=1e-5, longest=1024, tied=True
    ),
    "llama3_1b": _model(
        "llama", 128256, 2048, 16, (32, 8, 64), 8192, eps=1e-5, longest=131072, tied=True,
        theta=5e5, stretch=_LLAMA32,
    ),
    "llama3_8b": _model(
        "llama", 128256, 4096, 32, (32, 8, 128), 14336, eps=1e-5, longest=8192, tied=False,
        theta=5e5,
    ),
    "qwen3_0_6b": _model(
        "qwen3", 151936, 1024, 28, (16, 8, 128), 3072, eps=1e-6, longest=40960, tied=True,
        theta=1e6,
    ),
    "small_gpt2": _model(
        "gpt2", 1000, 256, 3, (4, 4, 64), 1024, eps=1e-5, longest=256, tied=False
    ),
    "small_llama": _model(
        "llama", 1000, 256, 3, (4, 2, 64), 512, eps=1e-5, longest=512, tied=False,
        theta=1e4, stretch=Stretch(factor=8.0, low=1.0, high=4.0, original=64),
    ),
    "small_qwen3": _model(
        "qwen3", 1000, 256, 3, (4, 2, 128), 512, eps=1e-6, longest=256, tied=False, theta=1e4
    ),
}  # fmt: skip


def named(name: str) -> Model:
    """Returns a model by its name. Raises ValueError for an unknown name."""
    if name not in MODELS:
        raise ValueError(f"unknown model {name!r}: choose from {', '.join(MODELS)}")
    return MODELS[name]
