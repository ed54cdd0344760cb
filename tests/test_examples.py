"""Tests that the examples run in a few steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


# Runs each example for three steps in a folder of its own, and keeps its output there.
PROGRAM = """
import contextlib, os, pathlib, runpy, sys, traceback
for example in sys.argv[1:]:
    folder = pathlib.Path(FOLDER, pathlib.Path(example).stem)
    folder.mkdir()
    os.chdir(folder)
    sys.argv = [example, "3"]
    with open("output.txt", "w") as output, contextlib.redirect_stdout(output):
        try:
            runpy.run_path(example, run_name="__main__")
        except BaseException:
            pathlib.Path("error.txt").write_text(traceback.format_exc())
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Runs all examples in one process, which imports PyTorch once."""
    folder = tmp_path_factory.mktemp("examples")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    program = PROGRAM.replace("FOLDER", repr(str(folder)))
    done = subprocess.run(
        [sys.executable, "-c", program, *EXAMPLES],
        cwd=folder, capture_output=True, text=True, env=environment | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_from_any_folder(example, folders):
    folder = folders / example.stem
    assert not (folder / "error.txt").exists(), (folder / "error.txt").read_text()
    assert (folder / "output.txt").read_text()
    for name in example.read_text().split('.save("')[1:]:
        assert (folder / name.partition('"')[0]).exists()


def test_the_list_of_examples_is_whole():
    listed = (ROOT / "examples/README.md").read_text()
    assert EXAMPLES and all(f"]({path.name})" in listed for path in EXAMPLES)
