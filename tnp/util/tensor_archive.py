"""Writes files of tensors whole or not at all, and verifies them before use.

A file is one of `torch.save`, which is a zip archive. The archive's comment is the SHA-256 digest
of everything before it: PyTorch itself notices no flipped bit in a weight.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
from collections.abc import Iterator, Set
from pathlib import Path, PurePath

import numpy as np
import torch

from tnp.util.atomic_files import cannot_write, first_line, replacing

_DIGEST_BYTES = 64  # SHA-256 in hexadecimal
_HELD = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size)
_NO_COMMENT = (0).to_bytes(2, "little")  # an archive ends with the length of its comment


def save(path: Path, state: dict) -> None:
    """Replaces `path` by `state`. A kill or an error leaves the old file.

    Numbers of numpy are written as Python's, and paths as text. The new file is read once before it
    replaces the old one.

    Raises:
        StoreError: the folder is not writable or full.
        TypeError: the state holds something that `load` would not read.
    """
    state = plain(state)
    with replacing(path) as temporary:
        try:
            torch.save(state, temporary)
        except RuntimeError as error:  # PyTorch's for a full disk, which names no file
            raise cannot_write(path, error) from error
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise _cannot_save(path, state, error) from error
        seal(temporary)
        try:
            torch.load(temporary, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:
            raise _cannot_save(path, state, error) from error


def seal(path: Path) -> None:
    """Writes the digest of a file of `torch.save` behind it."""
    with open(path, "r+b") as file:
        file.seek(-len(_NO_COMMENT), os.SEEK_END)
        if file.read() != _NO_COMMENT:
            raise RuntimeError("torch.save no longer writes a zip archive without a comment")
        file.seek(-len(_NO_COMMENT), os.SEEK_END)
        file.write(_DIGEST_BYTES.to_bytes(len(_NO_COMMENT), "little"))
        file.seek(0)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        file.write(digest.encode())


def plain(value: object) -> object:
    """Returns the value with numpy's numbers as Python's and paths as text.

    Dicts, lists and tuples are searched too. Other values are unchanged.
    """
    if isinstance(value, dict):
        return {plain(key): plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if isinstance(value, np.generic):
        return value.item()
    return str(value) if isinstance(value, PurePath) else value


def plain_values(name: str, value: object) -> object:
    """Returns `plain` of a value that can be compared: numbers, texts, lists and dicts.

    Raises TypeError naming a part of another type, such as a tensor.
    """
    value = plain(value)
    for at, each in _leaves(value, name):
        if type(each) not in _HELD:
            kind = type(each).__name__
            raise TypeError(f"{at} is a {kind}: it must hold numbers, texts, lists and dicts")
    return value


def _cannot_save(path: Path, state: dict, error: Exception) -> TypeError:
    foreign = (
        (name, each)
        for name, each in _leaves(state)
        if type(each) not in _HELD and not isinstance(each, torch.Tensor)
    )
    found = next(foreign, None)
    what = "the state" if found is None else f"{found[0]} is a {type(found[1]).__name__}"
    reason = f" ({first_line(error)})" if found is None else ""
    return TypeError(
        f"cannot save {path}: {what}{reason}: it must hold numbers, texts, tensors, lists and "
        "dicts, which can be read without running code"
    )


def _leaves(value: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yields the values in dicts, lists and tuples, each with its name."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _leaves(each, f"{name}.{key}".lstrip("."))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _leaves(each, f"{name}[{index}]")
    else:
        yield name, value


def load(path: Path, device: torch.device | str, keys: Set[str], what: str, remedy: str) -> dict:
    """Returns the state that `save` wrote, with tensors on `device`. It runs no pickled code.

    Args:
        path: the file.
        device: for the tensors.
        keys: keys that the state must have.
        what: the file's kind in the error's sentence, "checkpoint".
        remedy: the end of the error's sentence, which says what to do.

    Raises:
        ValueError: the file is damaged, was not written by `save`, or lacks a key.
    """
    try:
        whole = _has_its_digest(path)
    except OSError as error:
        raise ValueError(f"cannot read {what} {path} ({error.strerror}): {remedy}") from None
    if not whole:
        raise ValueError(f"{what} {path} is damaged, or is none at all: {remedy}")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except pickle.UnpicklingError as error:
        named = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{what} {path} holds {named[1] if named else 'an object'}, which is neither a number, "
            f"a text nor a tensor, and would run code: {remedy}"
        ) from None
    except (RuntimeError, EOFError, ValueError):
        state = None
    missing = keys - state.keys() if isinstance(state, dict) else keys
    if missing:
        raise ValueError(
            f"{what} {path} was not written by this version of the code (it lacks "
            f"{', '.join(sorted(missing))}): {remedy}"
        )
    return state


def _has_its_digest(path: Path) -> bool:
    with open(path, "rb") as file:
        size = file.seek(0, os.SEEK_END)
        if size < _DIGEST_BYTES:
            return False
        file.seek(0)
        digest, left = hashlib.sha256(), size - _DIGEST_BYTES
        while left:
            block = file.read(min(left, 1 << 20))
            digest.update(block)
            left -= len(block)
        return file.read() == digest.hexdigest().encode()
