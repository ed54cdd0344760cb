"""Counts how many tables and views lie below each view."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tnp.store.views import CREATED, READ


def depths(files: Sequence[Path]) -> dict[str, int]:
    """Returns {table or view: the longest chain of tables and views below it and itself}.

    Recorded tables, which no file creates, have depth 0 and are not listed. No file may name a
    common table expression like a table or view, because only names are looked at.
    """
    reads: dict[str, set[str]] = {}
    for path in files:
        text = re.sub(r"--.*", "", path.read_text())
        starts = [*CREATED.finditer(text)]
        ends = [match.start() for match in starts[1:]] + [len(text)]
        for match, end in zip(starts, ends, strict=True):
            if match[2] != "macro":
                reads[match[3]] = set(READ.findall(text[match.end() : end]))

    @cache
    def depth(name: str) -> int:
        return 1 + max((depth(read) for read in reads[name] & reads.keys()), default=0)

    return {name: depth(name) for name in reads}
