"""Turns `torch.autocast` off inside a model, which computes in its own `compute_dtype`."""

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

from tnp.dispatch.private import in_autocast

log = logging.getLogger("tnp.model")


def without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a model's method so that it runs with autocast off, whatever its caller chose.

    Autocast would give some tensors another dtype than `compute_dtype`, and our operators do not
    mix dtypes. The first call under autocast logs a warning.
    """

    @wraps(method)
    def run(model: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        if not in_autocast():
            return method(model, *arguments, **named)
        if not torch.compiler.is_compiling():
            _say_once(model.compute_dtype)
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            return method(model, *arguments, **named)

    return run


@cache
def _say_once(compute_dtype: torch.dtype) -> None:
    log.warning(
        "torch.autocast changes nothing here: the model computes in its compute_dtype, %s",
        compute_dtype,
    )
