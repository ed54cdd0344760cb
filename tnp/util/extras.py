"""What the core does without: packages that a part of tnp needs and that an extra brings."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from types import ModuleType


def install(extra: str) -> str:
    """The command that installs an extra, a name of pyproject.toml; no index has the project."""
    return f"pip install '.[{extra}]' in a clone of the project"


@cache
def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


class MissingExtra(ImportError):
    """A package of an extra is not installed; one sentence says which extra brings it."""


def require(package: str, what: str, extra: str) -> ModuleType:
    """The package; MissingExtra where it is not installed.

    Args:
        package: as it is imported, "altair".
        what: needs it, "plots".
        extra: brings it, a name of pyproject.toml.
    """
    try:
        return importlib.import_module(package)
    except ImportError:
        raise MissingExtra(f"{what} need {package}, which {install(extra)} brings") from None
