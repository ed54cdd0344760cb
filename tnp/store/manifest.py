"""Digests of recorded files: `data/recorded/MANIFEST` has a line for each, and loses none.

The lines are those of `sha256sum`: `cd data/recorded && sha256sum -c MANIFEST` checks them too.
"""

import hashlib
import re
from functools import lru_cache
from pathlib import Path

from tnp.util.atomic_files import StoreError, parquet_files, replacing

NAME = "MANIFEST"
LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")


def check(path: Path, content: bytes) -> bool:
    """Whether a manifest lists `path`, which is `<manifest's>/<device>/<table>/<stem>.parquet`.

    Raises StoreError where it does so with another digest than that of `content`.
    """
    root = path.absolute().parents[2]
    expected = digests(root).get(path.absolute().relative_to(root).as_posix())
    if expected not in (None, hashlib.sha256(content).hexdigest()):
        raise StoreError(
            f"{path} is not what was recorded (its digest differs from {root / NAME}): "
            "restore it from git"
        )
    return expected is not None


def digests(root: Path) -> dict[str, str]:
    """File below `root` → SHA-256 in its manifest; nothing where there is none."""
    manifest = root / NAME
    try:
        return _read(manifest, manifest.stat().st_mtime_ns)
    except FileNotFoundError:
        return {}


def extend(root: Path) -> None:
    """Add a line for every recorded file that the manifest lacks; the lines there stay."""
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


@lru_cache(maxsize=4)
def _read(manifest: Path, mtime_ns: int) -> dict[str, str]:
    """`mtime_ns` is part of what the result is kept for."""
    listed = {}
    for number, line in enumerate(manifest.read_text().splitlines(), 1):
        match = LINE.fullmatch(line)
        if not match:
            raise StoreError(f"{manifest}, line {number}: not a line of sha256sum: restore it")
        listed[match[2]] = match[1]
    return listed
