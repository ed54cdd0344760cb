"""How the tables in `tuned/` are written: one entry a line."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def write_entries(path: Path, entries: Sequence[dict[str, Any]]) -> None:
    """Replace the table, whole or not at all: a job may be reading it."""
    lines = ",\n".join(map(json.dumps, entries))
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(f"[\n{lines}\n]\n" if lines else "[]\n")
    os.replace(new, path)
