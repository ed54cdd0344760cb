"""Sizes that tasks are padded to, where every batch has its own.

A captured step, a compiled one and a launch plan are of exact sizes, and contexts of 3 to 64 with
targets of 50 to 500 come in 28,000 pairs of them. A bucket is a pair that stands for all a little
smaller. Rounded up are both numbers: below 128 to a multiple of 16, from there on to a multiple of
an eighth of the power of two below, and nowhere above the largest that is expected. So at most an
eighth of the points is padding, plus 15, and half of that on average.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from tnp.util.checks import require_count

SMALLEST = 16  # points that a size is a multiple of
PER_DOUBLING = 8  # sizes between a power of two and the next


def rounded(n: int) -> int:
    """The next size from `n` on, of those that the module's description names."""
    step = max(SMALLEST, (1 << (n - 1).bit_length()) // (2 * PER_DOUBLING))
    return -(-n // step) * step


@dataclass(frozen=True)
class Buckets:
    """For tasks of at most so many context and target points; `len` says how many there are."""

    max_context: int
    max_target: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, require_count(name, value, at_least=1))

    @classmethod
    def of(cls, vary: dict | None) -> Buckets | None:
        """Up to the largest sizes that config.yaml's `vary` draws; None where sizes do not vary."""
        return None if vary is None else cls(vary["n_context"][1], vary["n_target"][1])

    def __len__(self) -> int:
        return _count(self.max_context) * _count(self.max_target)

    def sizes(self, n_context: int, n_target: int) -> tuple[int, int] | None:
        """Those of the bucket for so many points; None where that is more than any holds."""
        if n_context > self.max_context or n_target > self.max_target:
            return None
        return min(rounded(n_context), self.max_context), min(rounded(n_target), self.max_target)


def _sizes(most: int):
    n = 1
    while True:
        yield rounded(n)
        n = rounded(n) + 1


def _count(most: int) -> int:
    """Sizes up to `most`, which is one itself."""
    return 1 + sum(1 for _ in takewhile(lambda size: size < most, _sizes(most)))
