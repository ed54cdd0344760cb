"""A model's precision is its own: `torch.autocast` around a model changes nothing."""

import logging
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch

log = logging.getLogger("tnp.model")


def without_autocast(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the model's method, run with autocast off where the caller has it on.

    Autocast would give some tensors another dtype than `compute_dtype`, and operators of ours do
    not mix dtypes. The first call under it is logged.
    """

    @wraps(method)
    def run(model: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
        if not torch._C._is_any_autocast_enabled():
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
