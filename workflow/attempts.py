"""Which of a job's files counts, so that what is measured again takes no earlier row's place.

`STEM.parquet` is a job's first attempt, `STEM--a2.parquet` its second. What was ended from outside
is tried again by the next run of the workflow; what a user names (`again`) is measured once more.
A job that Snakemake runs anew, after an edit for example, writes the same files again: what they
held stays as `STEM--of-<when it was written>.parquet`.

`STEM.state` beside a benchmark's file says of which code and parameters it is, where no red gate
refused a part of it. Until these change, its gates may run again without it.
"""

import os
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from difflib import get_close_matches
from functools import cache
from itertools import count
from pathlib import Path
from typing import TypeVar

import pyarrow.parquet as pq
from pyarrow import ArrowException

from tnp.experiment.failures import TRANSIENT
from tnp.store.schemas import TABLES

ATTEMPTS = 3
# What the stem of a file ends in, for the wildcards of the rules.
PATTERN = r"(?:--a\d+)?"

Job = TypeVar("Job")


class Attempts:
    """The files `runs`/<table>/<stem><attempt>.parquet of one device, as they are when asked first.

    Args:
        runs: folder of the device.
        planning: whether what was ended from outside gets another attempt. A process that the
            workflow started for one of its jobs must find the files that were planned before.
    """

    def __init__(self, runs: Path | str, planning: bool = True) -> None:
        self._runs = Path(runs)
        self._planning = planning
        self._last = cache(self._find)
        self.planned = cache(self._planned)

    def _planned(self, table: str, stem: str, again: bool = False) -> str:
        """How the stem of the file ends that counts: the last one's, or the one's to be written."""
        last = self._last(table).get(stem, 0)
        if again or self.to_be_tried_again(table, stem):
            last += 1
        return f"--a{last}" if last > 1 else ""

    def to_be_tried_again(self, table: str, stem: str) -> bool:
        """Whether the last attempt was killed or timed out, and fewer than three were made.

        A gate is always tried again: it goes on where it stopped.
        """
        last = self._last(table).get(stem, 0)
        if not self._planning or "status" not in TABLES[table].names:
            return False
        if last == 0 or is_last_attempt(table, last):
            return False
        file = self.last(table, stem)
        if not file.is_file():  # a pipe would be waited for
            return False
        try:
            statuses = pq.ParquetFile(file).read(["status"])["status"].to_pylist()
        except (ArrowException, OSError):  # said before the first job starts
            return False
        return any(status in TRANSIENT for status in statuses)

    def last(self, table: str, stem: str) -> Path:
        """The file of the last attempt that was made."""
        last = self._last(table).get(stem, 0)
        return self._runs / table / f"{stem}{f'--a{last}' if last > 1 else ''}.parquet"

    def replicates(self, table: str, config_id: str) -> list[int]:
        """Those of a benchmark that have a file."""
        pattern = re.compile(rf"{re.escape(config_id)}--r(\d+)")
        found = map(pattern.fullmatch, self._last(table))
        return sorted(int(match[1]) for match in found if match)

    def _find(self, table: str) -> dict[str, int]:
        """{stem: number of its last attempt}"""
        last: dict[str, int] = {}
        for file in self._runs.joinpath(table).glob("*.parquet"):
            stem, number = attempt(file)
            last[stem] = max(last.get(stem, 0), number)
        return last


def attempt(file: Path) -> tuple[str, int]:
    """Returns the stem of a job's files, and the number of the attempt that wrote this one."""
    stem, number = re.fullmatch(r"(.*?)(?:--a(\d+))?", file.stem).groups()
    return stem, int(number or 1)


def is_last_attempt(table: str, number: int) -> bool:
    """Whether what is ended from outside at this attempt is not tried again without being asked."""
    return table != "gates" and number >= ATTEMPTS


def is_of(file: Path, state: str) -> bool:
    """Whether a result is there, and was noted to be of this code and these parameters."""
    try:
        return file.is_file() and file.with_suffix(".state").read_text() == state
    except OSError:
        return False


def note_state(file: Path, state: str, refused: bool) -> None:
    """Note of which code and parameters the result is that will be written to `file`.

    Nothing is noted of one that a red gate refused: it waits for its gates until they are green.
    """
    noted = file.with_suffix(".state")
    noted.unlink(missing_ok=True)
    if not refused:
        noted.parent.mkdir(parents=True, exist_ok=True)
        noted.write_text(state)


def keep(files: Iterable[str]) -> None:
    """Give those of `files` that are there a second name, under which the store reads them too.

    Snakemake deletes a job's outputs before it runs it. Until then both names are of one file, of
    which the store counts each row once, so that a kill at any moment changes nothing.

    Raises:
        ValueError: a file cannot have a second name.
    """
    for file in filter(Path.is_file, map(Path, files)):
        written = datetime.fromtimestamp(file.stat().st_mtime, UTC)
        for further in count(1):
            of = f"--of-{written:%Y%m%dT%H%M%S%fZ}" + (f"-{further}" if further > 1 else "")
            second = file.with_stem(file.stem + of)
            try:
                os.link(file, second)
            except FileExistsError:
                # Its own is there where a run was killed before it deleted the first name.
                if not second.samefile(file):
                    continue
            except OSError as error:
                raise ValueError(
                    f"{file} is to be measured anew and cannot be kept as {second.name} "
                    f"({error.strerror}): move it to a folder of this file system that allows it, "
                    "or to data/recorded"
                ) from None
            break


def named(
    names: str | Iterable[str], jobs: Mapping[str, Job], elsewhere: Mapping[str, str]
) -> set[Job]:
    """The jobs of all ids that are named, in full or by how they begin: a study, an operator, …

    Args:
        names: a list, or text with commas between.
        jobs: id → job; the parts of an id are joined by "--".
        elsewhere: id of what only another device can measure → a sentence that says so.

    Raises:
        ValueError: a name that no id begins with.
    """
    chosen = set()
    for name in str(names).split(",") if not isinstance(names, list) else map(str, names):
        if of_name := {jobs[id_] for id_ in _of_name(name, jobs)}:
            chosen |= of_name
        elif others := _of_name(name, elsewhere):
            raise ValueError(f"again: {elsewhere[others[0]]}")
        else:
            parts = [id_.split("--") for id_ in (*jobs, *elsewhere)]
            known = {"--".join(part[:end]) for part in parts for end in range(1, len(part) + 1)}
            close = get_close_matches(name, known, n=1)
            here = sorted({id_.split("--")[0] for id_ in jobs})
            hint = f"did you mean {close[0]!r}?" if close else (
                f"choose from {', '.join(here)}, or a config_id"
            )  # fmt: skip
            raise ValueError(f"again: nothing is named {name!r}: {hint}")
    return chosen


def _of_name(name: str, ids: Iterable[str]) -> list[str]:
    return [id_ for id_ in ids if f"{id_}--".startswith(f"{name}--")]
