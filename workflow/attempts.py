"""Finds the results that a device has, and names what is measured again.

A job's n-th result is `STEM--STATE-N.parquet`. STATE identifies the code and the parameters that
decide the result. A result is written once: nothing overwrites, renames or deletes it. A job's own
table is written last, so a job that was killed has no result.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import pyarrow.parquet as pq
from pyarrow import ArrowException

from tnp.experiment.failures import TRANSIENT

ATTEMPTS = 3  # a state is tried so often if each attempt is killed
# The end of a file's stem, for the wildcards of the rules.
PATTERN = r"--[0-9a-f]{16}-\d+"
STOPPED = "gate "  # the first word of the reason of a row that gates stopped

Job = TypeVar("Job")


class Attempt(NamedTuple):
    """Holds one result of a job: its file, and the parts of the file's name."""

    file: Path
    stem: str
    state: str
    number: int


class Attempts:
    """Finds the results `runs`/<table>/*.parquet of one device, once for each table."""

    def __init__(self, runs: Path | str) -> None:
        self._runs = Path(runs)
        self._of_table = cache(self._find)
        self._rows = cache(_rows)

    def of(self, table: str, stem: str) -> list[Attempt]:
        """Returns a job's results, oldest first."""
        return self._of_table(table).get(stem, [])

    def to_be_tried_again(self, table: str, stem: str) -> bool:
        """Returns whether the last result was killed or timed out, and may come about."""
        made = self.of(table, stem)
        if not made or tried_out(made):
            return False
        return any(row.get("status") in TRANSIENT for row in self._rows(made[-1].file))

    def refused(self, table: str, stem: str) -> bool:
        """Returns whether gates stopped some rows of the last result, or a whole training."""
        rows = self._rows(self.of(table, stem)[-1].file)
        return not rows or any((row.get("reason") or "").startswith(STOPPED) for row in rows)

    def replicates(self, table: str, config_id: str) -> list[int]:
        """Returns the replicates of a benchmark that have a result."""
        pattern = re.compile(rf"{re.escape(config_id)}--r(\d+)")
        found = map(pattern.fullmatch, self._of_table(table))
        return sorted(int(match[1]) for match in found if match)

    def _find(self, table: str) -> dict[str, list[Attempt]]:
        found: dict[str, list[Attempt]] = {}
        for file in self._runs.joinpath(table).glob("*.parquet"):
            if one := attempt(file):
                found.setdefault(one.stem, []).append(one)
        return {stem: sorted(made, key=lambda one: one.number) for stem, made in found.items()}


def attempt(file: Path) -> Attempt | None:
    """Returns the result that `file` holds, or None for a file of an earlier layout."""
    if not re.fullmatch(f".+{PATTERN}", file.stem):
        return None
    stem, end = file.stem.rsplit("--", 1)
    state, number = end.split("-")
    return Attempt(file, stem, state, int(number))


def tried_out(made: Sequence[Attempt]) -> bool:
    """Returns whether a job whose last result was ended early is tried again only on request.

    A gate is always tried again: it goes on where it stopped.
    """
    n_tried = sum(one.state == made[-1].state for one in made)
    return made[-1].file.parent.name != "gates" and n_tried >= ATTEMPTS


def _rows(file: Path) -> list[dict]:
    """Returns status and reason of each row, if the table has them.

    A file that cannot be read has a row without: it is named before the first job starts.
    """
    if not file.is_file():  # reading a pipe would wait for a writer
        return [{}]
    try:
        return pq.ParquetFile(file).read(["status", "reason"]).to_pylist()
    except (ArrowException, OSError):
        return [{}]


def named(
    names: str | Iterable[str], jobs: Mapping[str, Job], elsewhere: Mapping[str, str]
) -> set[Job]:
    """Returns the jobs of all ids that are named, in full or by their first parts.

    Args:
        names: a list, or text with commas between. "mlp" names all jobs of operator or study `mlp`.
        jobs: id → job; the parts of an id are joined by "--".
        elsewhere: id that only another device can measure → a sentence that says so.

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
