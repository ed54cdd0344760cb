"""Checks tables of bad input: each call, and the sentence that refuses it."""

from collections.abc import Callable
from typing import Any

import pytest

Refused = tuple[Callable[[], Any], str]


def assert_refused(
    *table: Refused, error: type[Exception] | tuple[type[Exception], ...] = ValueError
) -> None:
    """Asserts that each call raises `error` with a message that matches its sentence."""
    for run, sentence in table:
        with pytest.raises(error, match=sentence):
            run()
