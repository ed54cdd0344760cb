"""Puts into one sentence what is wrong at a place of the configuration."""

import re
from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from typing import NamedTuple

from pydantic import BaseModel, ValidationError

# The way to a value in the configuration: keys, and positions in lists.
Place = tuple[str | int, ...]

# The types of Pydantic's errors, in words.
_WANTED = {
    "bool_type": "must be true or false",
    "dict_type": "must be keys with values",
    "finite_number": "must be a finite number",
    "float_type": "must be a finite number",
    "greater_than": "must be larger than {gt:.10g}",
    "greater_than_equal": "must be at least {ge:.10g}",
    "int_type": "must be a whole number",
    "less_than_equal": "must be at most {le:.10g}",
    "list_type": "must be a list",
    "model_type": "must be keys with values",
    "string_type": "must be text",
    "too_short": "must not be empty",
    "value_error": "{error}",
}


class Fault(NamedTuple):
    place: Place
    what: str
    inside: Place = ()  # further in, where the line is that it is about


def sentence(fault: Fault, written: Mapping[Place, str]) -> str:
    """Returns a fault with its line and place in front; `written` says where values stand."""
    place = fault.place + fault.inside
    known = (written[place[:n]] for n in range(len(place), 0, -1) if place[:n] in written)
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault.place)
    parts = next(known, "config.yaml"), dotted.removeprefix("."), fault.what
    return ": ".join(filter(None, parts))


def fault_of(error: ValidationError, section: type[BaseModel]) -> Fault:
    """Returns the first fault that Pydantic found, an unknown key before all others."""
    errors = sorted(error.errors(), key=lambda found: found["type"] != "extra_forbidden")
    found = errors[0]
    place, kind, value = found["loc"], found["type"], found["input"]
    if kind == "missing":
        return Fault(place[:-1], f"key {place[-1]!r} is missing")
    if kind == "extra_forbidden":
        known = _keys(section, place[:-1])
        return Fault(place[:-1], unknown("key", place[-1], known), (place[-1],))
    inside: Place = ()
    if place[-1:] == ("[key]",):
        place, inside = place[:-2], (value,)
    if kind == "float_type" and re.fullmatch(r"\d+e-?\d+", str(value)):
        wanted = "is text to YAML, which wants a point in it: write 3e-4 as 3.0e-4"
    else:
        wanted = _WANTED.get(kind, found["msg"]).format(**found.get("ctx", {}))
    whole = kind == "value_error" and not wanted.startswith("must")
    return Fault(place, wanted if whole else f"{shown(value)} {wanted}", inside)


def _keys(annotation: object, place: Place) -> list[str]:
    """Returns the keys that a section may have at `place`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        fields = annotation.model_fields
        return _keys(fields[place[0]].annotation, place[1:]) if place else list(fields)
    inner = [getattr(annotation, "__origin__", None), *getattr(annotation, "__args__", ())]
    if inner[0] is dict:
        return _keys(inner[2], place[1:])
    return _keys(inner[0] if hasattr(annotation, "__metadata__") else inner[1], place)


def not_among(
    place: Place, kind: str, names: Iterable[str], known: Iterable[str]
) -> Iterator[Fault]:
    """Yields a fault for each of `names`, a list or keys, that is not `known`."""
    for index, name in enumerate(names):
        if name not in known:
            inside = name if isinstance(names, Mapping) else index
            yield Fault(place, unknown(kind, name, known), (inside,))


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Returns a sentence that says what `name` may have meant, or what is `known`."""
    close = get_close_matches(str(name), list(known), n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"choose from {listed(known)}"
    return f"unknown {kind} {shown(name)}: {hint}"


def listed(values: Iterable) -> str:
    return ", ".join(map(str, values))


def shown(value: object) -> str:
    """Returns a value as YAML would have it, and not at length."""
    words = {"None": "an empty value", "True": "true", "False": "false"}
    text = words.get(repr(value), repr(value))
    return text if len(text) <= 60 else f"{text[:59]}…"
