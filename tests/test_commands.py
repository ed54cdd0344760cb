"""What can be run with `python -m` says how, instead of starting work or raising."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "command", ["tnp.train --help", "tnp.gates.compile --help", "tnp.bench.child"]
)
def test_a_command_says_how_it_is_used(command):
    done = subprocess.run([sys.executable, "-m", *command.split()], capture_output=True, text=True)
    assert (done.stdout + done.stderr).startswith("usage: ")
    assert done.returncode == (0 if "--help" in command else 1)
