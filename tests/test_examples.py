"""The examples run as they stand, in a few steps."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs_from_any_folder(example, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, example, "3"],
        cwd=tmp_path, capture_output=True, text=True, env=environment | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout
    for name in example.read_text().split('.save("')[1:]:
        assert (tmp_path / name.partition('"')[0]).exists()


def test_the_list_of_examples_is_whole():
    listed = (ROOT / "examples/README.md").read_text()
    assert EXAMPLES and all(f"]({path.name})" in listed for path in EXAMPLES)
