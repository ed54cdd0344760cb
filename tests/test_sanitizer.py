"""Tests, without a GPU, what the script that runs compute-sanitizer says and makes of a child."""

import subprocess
import sys

import pytest

from tests import sanitizer


def test_without_a_gpu_it_says_so_in_one_sentence():
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": ""}
    command = [sys.executable, "-m", "tests.sanitizer"]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert child.returncode == 1 and child.stdout == ""
    assert child.stderr == "there is no GPU here: compute-sanitizer watches kernels on one\n"


def test_without_the_tool_it_says_so_in_one_sentence(monkeypatch):
    monkeypatch.setattr(sanitizer.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(sanitizer.shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["sanitizer"])
    with pytest.raises(SystemExit, match="^compute-sanitizer is not installed here: it comes with"):
        sanitizer.main()


@pytest.mark.parametrize(
    "code, said", [(0, "nothing"), (99, "found:\nbad"), (1, "it did not run:\nbad")]
)
def test_what_became_of_a_child(tmp_path, monkeypatch, code, said):
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho bad\nexit {code}\n")
    program.chmod(0o755)
    assert sanitizer.outcome(str(program), "memcheck", sanitizer.PROBLEMS[0]) == said
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(sanitizer, "LIMIT_S", 0.1)
    late = sanitizer.outcome(str(program), "memcheck", sanitizer.PROBLEMS[0])
    assert late == "not through after 0.1 s"


def test_every_kind_of_problem_is_among_them():
    n = 3 * 2 * 9 + 4 + 4 + 2 + (5 * 2 + 1) * 3 + 2 + 4
    assert len(set(sanitizer.PROBLEMS)) == len(sanitizer.PROBLEMS) == n
    named = "fused/64/by_head", "decode/128/pages", "cute/128/causal", "gelu_linear/64/ragged"
    for one in (*named, "wmma_step_1/64/full", "rows/333/few"):
        assert one in sanitizer.PROBLEMS
