"""A small form of `python -m tests.faults`, of less than a minute."""

from functools import partial
from pathlib import Path
from random import Random

import pytest

from tests.faults import configurations, disks, files, kills

# The figures, which take longest, are left out.
SMALL = {
    "kills": (partial(kills.run, target="measurements"), 3),
    "configurations": (configurations.run, 40),
    "files": (files.run, len(files.FAULTS)),
    "disks": (disks.run, 4),
}


@pytest.mark.parametrize("kind", SMALL)
def test_nothing_is_lost_and_nothing_false(kind: str, tmp_path: Path) -> None:
    run, n = SMALL[kind]
    assert not run(n, tmp_path, Random(0))
