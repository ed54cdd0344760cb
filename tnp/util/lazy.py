"""Lets a package offer names of its modules, and imports a module when a name is first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping


def offers(
    package: str, names: Mapping[str, Iterable[str]]
) -> tuple[Callable[[str], object], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package that imports nothing by itself.

    Args:
        package: the package's `__name__`.
        names: what it offers, by the full name of the module that defines it.
    """
    homes = {name: module for module, own in names.items() for name in own}

    def find(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, found)
        return found

    def list_names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return find, list_names, sorted(homes)
