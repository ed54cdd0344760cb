"""Rounds the sizes of tasks up to a few buckets, where every batch has other sizes.

A captured step, a compiled step and a launch plan serve exact sizes, and contexts of 3 to 64 points
with 50 to 500 targets have 28,000 pairs of sizes. A bucket is a pair of sizes that serves all
slightly smaller pairs. Both numbers are rounded up: below 128 to a multiple of 16, and from 128 on
to a multiple of an eighth of the power of two below. Neither exceeds the largest expected size. So
at most an eighth of the points plus 15 is padding, and on average half of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from tnp.util.checks import require_count

SMALLEST = 16  # sizes are multiples of this
PER_DOUBLING = 8  # how many sizes there are from a power of two to the next


def rounded(n: int) -> int:
    """Returns the smallest size of a bucket that is at least `n`."""
    step = max(SMALLEST, (1 << (n - 1).bit_length()) // (2 * PER_DOUBLING))
    return -(-n // step) * step


@dataclass(frozen=True)
class Buckets:
    """Lists the buckets up to these numbers of context and target points. `len` counts them."""

    max_context: int
    max_target: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            object.__setattr__(self, name, require_count(name, value, at_least=1))

    @classmethod
    def of(cls, vary: dict | None) -> Buckets | None:
        """Returns buckets up to the largest sizes of config.yaml's `vary`, or None without it."""
        return None if vary is None else cls(vary["n_context"][1], vary["n_target"][1])

    def __len__(self) -> int:
        return _count(self.max_context) * _count(self.max_target)

    def sizes(self, n_context: int, n_target: int) -> tuple[int, int] | None:
        """Returns the sizes of the bucket for so many points, or None if all are too small."""
        if n_context > self.max_context or n_target > self.max_target:
            return None
        return min(rounded(n_context), self.max_context), min(rounded(n_target), self.max_target)


def _sizes(most: int):
    n = 1
    while True:
        yield rounded(n)
        n = rounded(n) + 1


def _count(most: int) -> int:
    """Counts the sizes up to `most`, with `most` itself."""
    return 1 + sum(1 for _ in takewhile(lambda size: size < most, _sizes(most)))
