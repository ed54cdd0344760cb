"""Defines a step of decoding.

A step has three methods. `prompt` takes many tokens of each sequence. Calling the step takes one
token of each, and returns logits. `follow` chooses the next token too. All write keys and values to
the cache and advance its lengths on the device.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tnp.llm.cache import Cache
from tnp.llm.decoder import Decoder
from tnp.llm.tokens import Tokens


class Step(Protocol):
    """Computes logits of the next token. An implementation is made of a decoder."""

    def __init__(self, decoder: Decoder) -> None: ...

    @staticmethod
    def refuses(decoder: Decoder) -> str | None:
        """Returns why this implementation cannot compute the decoder where it is, or None."""
        ...

    def prompt(self, ids: Tensor, cache: Cache, lengths: Tensor | None = None) -> Tensor:
        """Returns the logits [B, vocab] behind each sequence's last token.

        Args:
            ids: int64 [B, T], new tokens, in range.
            cache: has room for T more tokens of each sequence.
            lengths: int32 [B], from 1 to T, how many tokens each sequence has, with padding behind
                them. None: T. Only for an empty cache.
        """
        ...

    def __call__(self, ids: Tensor, cache: Cache) -> Tensor:
        """Returns the logits [B, vocab] behind one more token of each sequence, ids int64 [B].

        Nothing waits for the host, so a step on CUDA can be captured.
        """
        ...

    def follow(self, tokens: Tokens, cache: Cache) -> None:
        """Adds to `tokens` the largest logits' ids, the lowest of equal ones."""
        ...
