"""Defines a dictionary of limited size."""

from __future__ import annotations

from typing import Any

MOST = 4096


class Bounded(dict):
    """Keeps at most `most` entries. A new key in a full dictionary drops the older half.

    Looking up costs as much as in a `dict`. Threads that store hold their own lock.
    """

    def __init__(self, most: int = MOST) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self and len(self) >= self.most:
            for old in list(self)[: (len(self) + 1) // 2]:
                del self[old]
        super().__setitem__(key, value)
