"""Imports optional packages: one part of tnp needs them, and an extra installs them."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType


def install(extra: str, folder: str = "") -> str:
    """Returns the command that installs an extra of a clone's pyproject.toml, or of a folder's."""
    return f"pip install '{folder and './'}{folder or '.'}[{extra}]' in a clone of the project"


@cache
def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


class MissingExtra(ImportError):
    """Says that a package is not installed, and which extra installs it."""


def require(package: str, what: str, extra: str) -> ModuleType:
    """Returns the package; raises MissingExtra if it is not installed.

    Args:
        package: its import name, "altair".
        what: the part of tnp that needs it, "plots".
        extra: the extra that installs it, a name of pyproject.toml.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise MissingExtra(f"{what} need {package}: run {install(extra)}") from None
