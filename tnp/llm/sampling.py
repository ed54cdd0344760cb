"""Chooses the next token from logits, on the device, without waiting for the host.

A random choice is the largest of score + Gumbel noise (Gumbel, 1954; Maddison et al., A* sampling,
arXiv 1411.0030), which has the distribution of softmax. The noise can be drawn ahead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tnp.util.checks import require_count, require_real


@dataclass(frozen=True)
class Sampling:
    """Says how a token is chosen.

    Args:
        temperature: 0 for the largest logit, the lowest id of equal ones. Otherwise logits are
            divided by it and a token is drawn.
        top_k: draws from the `top_k` largest logits alone, and those equal to the last of them.
        top_p: draws from the fewest likely tokens whose probabilities, after `top_k`, reach it.

    Raises:
        ValueError: a number is out of its range, or temperature is 0 and another is given.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= require_real("temperature", self.temperature) < math.inf:
            raise ValueError(
                f"temperature is {self.temperature!r}: it must be finite and at least 0"
            )
        if self.top_k is not None:
            require_count("top_k", self.top_k, 1)
        if self.top_p is not None and not 0.0 < require_real("top_p", self.top_p) <= 1.0:
            raise ValueError(f"top_p is {self.top_p!r}: it must be above 0 and at most 1")
        for name in ("top_k", "top_p"):
            if self.greedy and getattr(self, name) is not None:
                raise ValueError(
                    f"{name} is {getattr(self, name)} and temperature 0: give a temperature above 0"
                )

    @property
    def greedy(self) -> bool:
        """Returns whether the largest logit is taken."""
        return self.temperature == 0.0


def scores(logits: Tensor, sampling: Sampling) -> Tensor:
    """Returns logits / temperature [B, vocab] in float32, with −∞ for tokens that are left out."""
    found = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < found.shape[-1]:
        least = found.topk(sampling.top_k).values[:, -1:]
        found = found.masked_fill(found < least, -torch.inf)
    if sampling.top_p is not None:
        ordered, ids = found.sort(descending=True)
        p = ordered.softmax(-1)
        left_out = p.cumsum(-1) - p >= sampling.top_p  # what stands before reaches top_p already
        found = found.masked_fill(left_out.scatter(1, ids, left_out), -torch.inf)
    return found


def choose(logits: Tensor, sampling: Sampling, noise: Tensor | None = None) -> Tensor:
    """Returns the chosen ids, int64 [B].

    Args:
        logits: [B, vocab], any float dtype.
        sampling: how to choose.
        noise: [B, vocab] of `gumbel_`, float32; None if the choice is greedy.
    """
    if sampling.greedy:
        return logits.argmax(-1)
    return (scores(logits, sampling) + noise).argmax(-1)


def gumbel_(noise: Tensor, generator: torch.Generator | None = None) -> None:
    """Fills `noise` with independent Gumbel numbers."""
    noise.exponential_(generator=generator).log_().neg_()
