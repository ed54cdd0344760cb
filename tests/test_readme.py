"""README.md: its code runs, its links lead somewhere, its tables are those of the recorded rows."""

import math
import re
from pathlib import Path

import pytest

README = Path("README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
DOCUMENTS = ["README.md", "RESULTS.md", "SPECIFICATION.md"]


def test_the_first_block_of_python_trains_on_a_cpu_and_draws(capsys, tmp_path, monkeypatch):
    assert len([line for line in BLOCKS[0].splitlines() if line]) <= 14
    monkeypatch.chdir(tmp_path)
    on_a_cpu(BLOCKS[0], {"600": "150"})
    reports = [eval(line) for line in capsys.readouterr().out.splitlines()]
    assert [report["step"] for report in reports] == [0, 100, 150]
    assert reports[-1]["loss"] < reports[1]["loss"]
    assert "vega" in (tmp_path / "curve.html").read_text()


def on_a_cpu(block: str, instead: dict[str, str]) -> dict:
    """The names that a block for a GPU leaves, run on a CPU and with some of its text replaced."""
    for text, other in ({'"cuda"': '"cpu"'} | instead).items():
        assert text in block or text == '"cuda"'
        block = block.replace(text, other)
    names: dict = {}
    exec(block, names)
    return names


def test_the_block_for_a_gpu_trains(capsys, tmp_path, monkeypatch):
    """One small step of it, without a CUDA graph."""
    monkeypatch.chdir(tmp_path)
    smaller = {"cuda_graph=True": "cuda_graph=False", "range(1000)": "range(1)"}
    smaller |= {"batch=64, n_context=64, n_target=500": "batch=1, n_context=8, n_target=8"}
    names = on_a_cpu(BLOCKS[1], smaller)
    assert math.isfinite(names["loss"].item()) and capsys.readouterr().out.startswith("0 ")


def test_the_block_of_operators_runs():
    smaller = {"torch.bfloat16": "torch.float32", "300": "30", "1408": "128"}
    names = on_a_cpu(BLOCKS[2], smaller)
    assert names["o"].shape == names["q"].shape and names["y"].shape == names["x"].shape


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files_of_the_repository(document):
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", Path(document).read_text())
    assert not [link for link in links if not Path(link).exists()]


def test_every_question_is_linked():
    linked = set(re.findall(r"\((workflow/questions/\w+\.sql)\)", README))
    assert linked == {str(path) for path in Path("workflow/questions").glob("*.sql")}
