"""Files of tensors, written whole or not at all, and verified before they are used.

A file is one of `torch.save`, which is a zip archive. The archive's comment is the SHA-256 digest
of everything before it: PyTorch itself notices no flipped bit in a weight.
"""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Set
from pathlib import Path

import torch

from tnp.files import cannot_write, replacing

_DIGEST_BYTES = 64  # SHA-256 in hexadecimal
_NO_COMMENT = (0).to_bytes(2, "little")  # what an archive ends in: the length of its comment


def save(path: Path, state: dict) -> None:
    """Replace `path` by `state`; a kill leaves what was there before.

    Raises StoreError where the folder is not writable or full.
    """
    with replacing(path) as temporary:
        try:
            torch.save(state, temporary)
        except RuntimeError as error:  # PyTorch's for a full disk, which names no file
            raise cannot_write(path, error) from error
        with open(temporary, "r+b") as file:
            file.seek(-len(_NO_COMMENT), os.SEEK_END)
            if file.read() != _NO_COMMENT:
                raise RuntimeError("torch.save no longer writes a zip archive without a comment")
            file.seek(-len(_NO_COMMENT), os.SEEK_END)
            file.write(_DIGEST_BYTES.to_bytes(len(_NO_COMMENT), "little"))
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            file.write(digest.encode())


def load(path: Path, device: torch.device | str, keys: Set[str], what: str, remedy: str) -> dict:
    """What `save` wrote, its tensors on `device`; executes no pickled code.

    Args:
        path: the file.
        device: for the tensors.
        keys: that it must have.
        what: it is, "checkpoint", for the error's sentence.
        remedy: what to do where it cannot be used, the sentence's end.

    Raises:
        ValueError: it is not what `save` wrote, or lacks a key.
    """
    try:
        whole = _has_its_digest(path)
    except OSError as error:
        raise ValueError(f"cannot read {what} {path} ({error.strerror}): {remedy}") from None
    if not whole:
        raise ValueError(f"{what} {path} is damaged, or is none at all: {remedy}")
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
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
