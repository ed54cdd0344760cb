"""What can be run with `python -m` says how, instead of starting work or raising."""

import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest

from tnp.util.cli import Parser

ROOT = Path(__file__).parents[1]
COMMANDS = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__main__")
    for folder in ("tnp", "workflow") for path in sorted(ROOT.glob(f"{folder}/**/*.py"))
    if "\nif __name__ ==" in path.read_text()
]  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_says_how_it_is_used(command):
    call = [sys.executable, "-m", command, "--help"]
    done = subprocess.run(call, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


@pytest.mark.parametrize("command", ["tnp.bench.child", "workflow.gate_process"])
def test_a_process_of_the_workflow_says_who_starts_it(command):
    done = subprocess.run([sys.executable, "-m", command], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "snakemake" in done.stdout


def test_a_command_whose_reader_has_ended_ends_in_silence():
    call = [sys.executable, "-m", "tnp.tuning.device", "--capability", "90"]
    with subprocess.Popen(call, stdout=PIPE, stderr=PIPE, text=True, cwd=ROOT) as process:
        process.stdout.close()
        assert process.stderr.read() == "" and process.wait() == 1


def test_an_unknown_option_is_named_before_one_that_is_missing(capsys):
    parser = Parser(prog="some command")
    parser.add_argument("--width", required=True)
    with pytest.raises(SystemExit):
        parser.parse_args(["--widht=3"])
    assert "unknown option --widht" in capsys.readouterr().err
