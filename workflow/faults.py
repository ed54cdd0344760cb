"""What is wrong at a place of the configuration, and the words for it."""

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import NamedTuple

from workflow.configuration import Place


class Fault(NamedTuple):
    place: Place
    what: str
    inside: Place = ()  # further in, where the line is that it is about


def not_among(
    place: Place, kind: str, names: Iterable[str], known: Iterable[str]
) -> Iterator[Fault]:
    """A fault for each of `names`, a list or keys, that is not `known`."""
    for index, name in enumerate(names):
        if name not in known:
            inside = name if isinstance(names, Mapping) else index
            yield Fault(place, unknown(kind, name, known), (inside,))


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """A sentence that says what `name` may have meant, or what is `known`."""
    close = get_close_matches(str(name), list(known), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose from {listed(known)}"
    return f"unknown {kind} {shown(name)}: {hint}"


def listed(values: Iterable) -> str:
    return ", ".join(map(str, values))


def shown(value: object) -> str:
    """As YAML would have it, and not at length."""
    words = {"None": "an empty value", "True": "true", "False": "false"}
    text = words.get(repr(value), repr(value))
    return text if len(text) <= 60 else f"{text[:59]}…"
