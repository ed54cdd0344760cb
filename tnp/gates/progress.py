"""Keeps a gate's progress in a file, so that an interrupted gate continues where it stopped.

The file has one JSON object a line. The first line names the code. Then each check adds a line, and
each finished part adds one after its checks. The file stays when the gate's process is killed or
interrupted. The next process with the same code skips the finished parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from tnp.util.atomic_files import replacing


class Progress:
    """Keeps a gate's progress: its rows, its finished parts, and the kernels that it launched.

    Args:
        path: the file; None keeps nothing.
        identity: text for all that the rows depend on. A file of another identity is dropped.
        heard: called with this object after each check and each part.
    """

    def __init__(
        self,
        path: Path | None = None,
        identity: str = "",
        heard: Callable[[Progress], None] = lambda progress: None,
    ) -> None:
        self.rows: list[dict] = []
        self.finished: dict[str, list[str]] = {}  # part → other findings of its checks
        self.kernels: dict[str, str] = {}  # name → hash
        self.launched: dict[str, str] = {}  # of this process; `kernels` has the file's too
        self._of, self._heard = 0, heard
        self._file: TextIO | None = None
        if path is None:
            return
        about, *kept = _lines(path) or [{}]
        if about == {"identity": identity}:
            last = max((at for at, line in enumerate(kept, 1) if "part" in line), default=0)
            self._take(kept[:last])
            kept = kept[:last]
        else:
            kept = []
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", buffering=1)  # a line at a time
        for line in ({"identity": identity}, *kept):
            self._write(line)

    @staticmethod
    def merge(path: Path, others: Sequence[Path]) -> None:
        """Adds the finished parts of other files to the file `path`, each once, and deletes these.

        The newest file says which identity is the current one. Others are left out.
        """
        files = {file: lines for file in (path, *others) if (lines := _lines(file))}
        if not files:
            return
        current = files[max(files, key=lambda file: file.stat().st_mtime_ns)][0]
        merged, known = [current], set[str]()
        for about, *rest in files.values():
            checks: list[dict[str, Any]] = []
            for line in rest if about == current else ():
                checks.append(line)
                if "part" in line:
                    merged += checks if line["part"] not in known else []
                    known.add(line["part"])
                    checks = []
        with replacing(path) as new:
            new.write_text("".join(f"{json.dumps(line)}\n" for line in merged))
        for file in others:
            file.unlink(missing_ok=True)

    @classmethod
    def read(cls, path: Path) -> Progress:
        """Returns the progress that the file holds now, unfinished parts too. It writes nothing."""
        found = cls()
        found._take(_lines(path))
        return found

    def __str__(self) -> str:
        n = len(self.rows)
        return f"{len(self.finished)} of {self._of} cases" if self._of else f"{n} checks so far"

    def row(self, row: dict) -> None:
        """Takes one row of table `gates`."""
        self.rows.append(row)
        self._write({"row": row})
        self._heard(self)

    def finish(self, part: str, of: int, found: Sequence[str]) -> None:
        """Notes that all checks of a part are made.

        Args:
            part: its name.
            of: number of parts of the gate.
            found: other findings of its checks, which a continued gate reads in `finished`.
        """
        new = {name: code for name, code in self.launched.items() if name not in self.kernels}
        line = {"part": part, "of": of, "found": list(found), "kernels": new}
        self._note(line)
        self._write(line)
        self._heard(self)

    def _take(self, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if "row" in line:
                self.rows.append(line["row"])
            elif "part" in line:
                self._note(line)

    def _note(self, line: dict[str, Any]) -> None:
        self.finished[line["part"]] = line["found"]
        self._of = line["of"]
        self.kernels |= line["kernels"]

    def _write(self, line: dict[str, Any]) -> None:
        if self._file:
            print(json.dumps(line), file=self._file)


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns the file's lines up to the first broken one: a kill may cut the last line."""

    def whole() -> Iterator[dict[str, Any]]:
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                return

    return list(whole()) if path.is_file() else []
