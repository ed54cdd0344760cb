"""Tests the manifest of recorded files: no recorded file is altered or deleted."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.store.test_files import ROW, samples
from tnp.store import manifest
from tnp.store.files import StoreError, read_table, record, write_table
from tnp.util.atomic_files import parquet_files

ROOT = Path(__file__).parents[2]
RECORDED = ROOT / "data" / "recorded"


def test_every_recorded_file_is_listed_with_its_digest() -> None:
    listed = {
        str(file.relative_to(RECORDED)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in parquet_files(RECORDED)
    }
    assert manifest.digests(RECORDED) == listed


def test_no_line_was_ever_removed_from_the_manifest() -> None:
    """In what git knows of it, which in a shallow clone is less, and in what is not committed."""
    file = RECORDED / manifest.NAME
    changes = ""
    for command in (("log", "-p", "-m", "--format="), ("diff", "HEAD")):
        git = ["git", "-C", str(ROOT), *command, "--", str(file)]
        try:
            changes += subprocess.run(git, check=True, capture_output=True, text=True).stdout
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"git cannot tell what the manifest was: {error}")
    lines = changes.splitlines()
    assert not [line for line in lines if line.startswith("-") and not line.startswith("---")]


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Returns a folder of one recorded file."""
    write_table(samples(tmp_path), "samples", [ROW])
    record(tmp_path / "data" / "runs", tmp_path / "data" / "recorded")
    return tmp_path / "data" / "recorded"


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="no sha256sum")
def test_sha256sum_reads_it(recorded: Path) -> None:
    subprocess.run(["sha256sum", "--check", "--strict", "MANIFEST"], cwd=recorded, check=True)


def test_recording_adds_lines_and_keeps_those_there(recorded: Path, tmp_path: Path) -> None:
    before = (recorded / "MANIFEST").read_text()
    write_table(samples(tmp_path, stem="new"), "samples", [ROW | {"sample": 1}])
    record(tmp_path / "data" / "runs", recorded)
    after = (recorded / "MANIFEST").read_text()
    assert after.startswith(before) and after.count("\n") == 2
    assert len(manifest.digests(recorded)) == len(parquet_files(recorded)) == 2
    record(tmp_path / "data" / "runs", recorded)
    assert (recorded / "MANIFEST").read_text() == after


def test_a_file_other_than_recorded_is_refused_by_name(recorded: Path, tmp_path: Path) -> None:
    """A sound file, but not the one that the manifest lists."""
    (file,) = parquet_files(recorded)
    assert len(read_table(file, "samples")) == 1
    write_table(file, "samples", [ROW | {"time_ms": 0.1}])
    with pytest.raises(StoreError, match=f"{file} is not what was recorded .*from git"):
        read_table(file, "samples")
    with pytest.raises(StoreError, match="is not what was recorded"):
        record(tmp_path / "data" / "runs", recorded)


def test_a_line_that_is_none_is_named(recorded: Path) -> None:
    (file,) = parquet_files(recorded)
    with open(recorded / "MANIFEST", "a") as stream:
        stream.write("half a li")
    with pytest.raises(StoreError, match="MANIFEST, line 2: not a line of sha256sum"):
        read_table(file, "samples")
