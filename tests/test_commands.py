"""What can be run with `python -m` says how, instead of starting work or raising."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("command", ["tnp.train --help", "tnp.ops.compilation --help"])
def test_a_command_says_how_it_is_used(command):
    done = subprocess.run([sys.executable, "-m", *command.split()], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("usage: ")
