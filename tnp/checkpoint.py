"""Checkpoints of a training run: written whole or not at all, and verified before they are used.

A checkpoint is a file of `torch.save`, which is a zip archive. The archive's comment is the SHA-256
digest of everything before it: PyTorch itself notices no flipped bit in a weight.
"""

import hashlib
import os
import pickle
from pathlib import Path

import torch

from tnp.files import cannot_write, replacing

KEYS = frozenset({"parameters", "code", "step", "rows", "elapsed_s", "model", "optimizer"})

_DIGEST_BYTES = 64  # SHA-256 in hexadecimal
_NO_COMMENT = (0).to_bytes(2, "little")  # what an archive ends in: the length of its comment


def save(path: Path, state: dict) -> None:
    """Replace `path` by `state`, which has `KEYS`; a kill leaves what was there before.

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


def load(path: Path, device: torch.device) -> dict:
    """What `save` wrote, its tensors on `device`; executes no pickled code.

    Raises ValueError, one sentence that names `path`, where it is not what `save` wrote.
    """
    try:
        whole = _has_its_digest(path)
    except OSError as error:
        raise ValueError(f"cannot read checkpoint {path} ({error.strerror})") from None
    if not whole:
        raise ValueError(
            f"checkpoint {path} is damaged, or is no checkpoint of a training run: delete it to "
            "start the run again from step 0"
        )
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except (RuntimeError, EOFError, ValueError, pickle.UnpicklingError):
        state = None
    missing = KEYS - state.keys() if isinstance(state, dict) else KEYS
    if missing:
        raise ValueError(
            f"checkpoint {path} was not written by this version of the code (it lacks "
            f"{', '.join(sorted(missing))}): delete it to start the run again from step 0"
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
