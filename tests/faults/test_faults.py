"""A small form of `python -m tests.faults`, of less than a minute."""

from pathlib import Path
from random import Random

import pytest

from tests.faults.__main__ import KINDS

SMALL = {"kills": 4, "configurations": 40, "files": 25, "disks": 4}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_and_nothing_false(kind: str, tmp_path: Path) -> None:
    run, _ = KINDS[kind]
    assert not run(SMALL[kind], tmp_path, Random(0))
