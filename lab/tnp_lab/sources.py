"""Reads CUDA C++ for `tnp.experiment.code_hash`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from tnp.experiment.code_hash import EVERYTHING, Symbol, digest

# Includes of our own headers, which are in quotation marks.
INCLUDE = re.compile(r'^\s*#include "(.+)"', re.MULTILINE)
COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
KERNEL = re.compile(r"__global__[^;{]*?\b(\w+)\(\s*(?:const\b|TYPE\b)")


class CudaSource:
    """Reads a file of CUDA C++, or one of our headers. Its hash leaves out comments only.

    Args:
        file: ends in one of `suffixes`.
    """

    suffixes = (".cu", ".cuh")
    imported: Mapping[str, Symbol] = {}

    def __init__(self, file: Path) -> None:
        text = COMMENT.sub("", file.read_text())
        self.bound = frozenset(KERNEL.findall(text))
        # Headers lay in tnp/ops when rows were recorded: the hash keeps that path.
        said = INCLUDE.sub(lambda found: f'#include "tnp/ops/{Path(found[1]).name}"', text)
        self._hash = digest([line.strip() for line in said.splitlines() if line.strip()])
        included = [Path(name).with_suffix("") for name in INCLUDE.findall(text)]
        self._mentions = [(".".join(name.parts), EVERYTHING) for name in included]

    def read(self, name: str) -> tuple[str, list[Symbol]]:
        """Returns the file's hash, whatever kernel `name` is, and the headers that it includes."""
        return self._hash, self._mentions
