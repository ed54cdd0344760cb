"""Digests of files: `data/recorded/MANIFEST` lists recorded files, and new files hold their own.

The manifest has the lines that `sha256sum` writes: `cd data/recorded && sha256sum -c MANIFEST`
checks them too. No line is ever removed.
"""

import hashlib
import re
from functools import lru_cache
from pathlib import Path

from tnp.util.atomic_files import StoreError, parquet_files, replacing

NAME = "MANIFEST"
LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")
# A file's own digest is an entry of Parquet's metadata. It is taken while zeros stand in its place.
KEY, ZEROS = "tnp_file_sha256", "0" * 64
SEAL = re.compile(KEY.encode() + rb"\x18\x40([0-9a-f]{64})")  # 0x18: a string; 0x40: 64 bytes


def check(path: Path, content: bytes) -> None:
    """Checks that `content` is what was written to `path`.

    Its digest must be the one in the manifest, if the manifest of `path`'s root lists it, else the
    one in the file itself. Files of earlier layouts have none: page checksums protect those.

    Args:
        path: `<root>/<device>/<table>/<stem>.parquet`.
        content: all bytes of the file.

    Raises:
        StoreError: the digest is another one.
    """
    root = path.absolute().parents[2]
    expected = digests(root).get(path.absolute().relative_to(root).as_posix())
    if expected is None:
        found = SEAL.search(content)
        if found and found[1] != _digest(content):
            raise damaged(path, "its bytes are not those that were written")
    elif expected != hashlib.sha256(content).hexdigest():
        raise StoreError(
            f"{path} is not what was recorded (its digest differs from {root / NAME}): "
            "restore it from git"
        )


def sealed(content: bytes) -> bytes:
    """Returns the bytes of a Parquet file, whose metadata has `KEY: ZEROS`, with its digest."""
    return _sealed(content, _digest(content))


def damaged(path: Path, why: str) -> StoreError:
    """Returns the error that says that `path` is damaged, and what to do."""
    return StoreError(
        f"{path} is not a whole Parquet file ({why}): restore it from git, or delete it and run "
        "the workflow again"
    )


def digests(root: Path) -> dict[str, str]:
    """Returns {file below `root`: SHA-256} as the manifest lists it; {} without a manifest."""
    manifest = root / NAME
    try:
        return _read(manifest, manifest.stat().st_mtime_ns)
    except FileNotFoundError:
        return {}


def extend(root: Path) -> None:
    """Adds a line for every recorded file that the manifest lacks; the lines there stay."""
    known = digests(root)
    new = [path for path in parquet_files(root) if path.relative_to(root).as_posix() not in known]
    if new:
        manifest = root / NAME
        lines = [manifest.read_text()] if known else []
        for path in new:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            lines.append(f"{digest}  {path.relative_to(root).as_posix()}\n")
        with replacing(manifest) as temporary:
            temporary.write_text("".join(lines))


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(_sealed(content, ZEROS.encode())).hexdigest().encode()


def _sealed(content: bytes, digest: bytes) -> bytes:
    return SEAL.sub(lambda found: found[0][:-64] + digest, content)


@lru_cache(maxsize=4)
def _read(manifest: Path, mtime_ns: int) -> dict[str, str]:
    """Reads a manifest. `mtime_ns` makes a changed file a new entry of the cache."""
    listed = {}
    for number, line in enumerate(manifest.read_text().splitlines(), 1):
        match = LINE.fullmatch(line)
        if not match:
            raise StoreError(f"{manifest}, line {number}: not a line of sha256sum: restore it")
        listed[match[2]] = match[1]
    return listed
